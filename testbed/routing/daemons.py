"""The comparison of routers through real daemons: one cluster whose router changes, the same arrivals for every policy.

Runs are kept one a line, so that a comparison can be made in pieces. Knows no model; what is measured is what the client sees
and what nodes count. Answers are greedy, so every policy must give the same tokens: a difference is an error.
"""

import itertools
import json
import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError, ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from testbed.bench.clusters import READY_S, RunningCluster
from testbed.bench.sitting import free_ports
from testbed.routing.experiment import BALANCERS
from testbed.routing.experiment import workloads as mixes

POLICIES = (*BALANCERS, "eldr", "eldr tau=0.1")
PROMPT_CHARS = (200, 900)  # of a prompt: some 60 to 300 tokens
PER_DOMAIN = 40
WARM_UP = 0.2  # share of the requests that are left out at the beginning
HEARTBEAT_S = 0.5
SETTLED_S = 10.0
BEGIN_S = 1.0  # before the first arrival

Say = Callable[[str], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all runs have in common.

    copies  of each expert in the whole cluster; 0: every node holds all
    """

    model: Path
    homes: int
    workers: int
    copies: float
    requests: int
    tokens: int

    @property
    def home_names(self) -> list[str]:
        return [f"home{index}" for index in range(self.homes)]


def topology_text(setting: Setting, policy: str, ports: Sequence[int]) -> str:
    """The topology file of one run. A policy is a router's name and, after it, `tau=0.1`, `affinity=1`, `joint`.

    joint  each home holds the experts of its cluster; without it experts lie where there is room
    """
    router, *words = policy.split()
    options = [word.replace("=", " = ") for word in words if "=" in word]
    placement = "popularity" if "joint" in words else "spread"
    num_nodes = setting.homes + setting.workers
    lines = [
        "[cluster]",
        'name = "routing"',
        f'model = "{setting.model.resolve().as_posix()}"',
        f'coordinator = "127.0.0.1:{ports[0]}"',
        f"memory_ratio = {setting.copies or float(num_nodes)}",
        f'placement = "{placement}"',
        f'heartbeat = "{round(HEARTBEAT_S * 1000)} ms"',
        'lost_after = "20 s"',
        "kv_tokens = 8192",
        "[routing]",
        f'policy = "{router}"',
        *options,
        "[default_node]",
        'memory = "900 MiB"',
    ]
    names = [f"press{index}" for index in range(setting.workers)] + setting.home_names
    for name, port in zip(names, ports[1:], strict=True):
        role = "decode" if name in setting.home_names else "prefill"
        lines += ["[[node]]", f'name = "{name}"', f'address = "127.0.0.1:{port}"']
        lines += [f'roles = ["{role}", "experts"]']
    return "\n".join(lines) + "\n"


def prompts_of(corpus: Path) -> dict[str, list[str]]:
    """Domain -> texts that calibration has not seen."""
    from calibration.corpus import find_domains, sample_documents

    found = sample_documents(
        find_domains(corpus, "validation"), PER_DOMAIN, 3, max_chars=PROMPT_CHARS[1], seen=lambda _: None
    )
    return {name: [text for text in texts if text.strip()] for name, texts in found.items()}


def arrivals(
    texts: dict[str, list[str]], workload: str, count: int, rate: float, seed: int
) -> list[tuple[float, str]]:
    """When each request comes, seconds from the start, and its prompt: Poisson, domains as the workload mixes them."""
    domains = sorted(texts)
    known = mixes(domains)
    if workload not in known:
        raise ConfigError(f"no workload is called {workload!r}; there are {', '.join(known)}")
    rng = np.random.default_rng([seed, 5])
    at, found = 0.0, []
    for number in range(count):
        at += float(rng.exponential(1.0 / rate))
        name = domains[int(rng.choice(len(domains), p=known[workload](number / count)))]
        text = texts[name][int(rng.integers(len(texts[name])))]
        found.append((at, text[: int(rng.integers(PROMPT_CHARS[0], PROMPT_CHARS[1] + 1))]))
    return found


def shortened(text: str, tokenizer: Tokenizer, most_tokens: int) -> str:
    """The beginning of a text that is no longer than so many tokens: 900 characters are 300 of English and 600 of Japanese."""
    while (count := len(tokenizer.encode(text))) > most_tokens:
        text = text[: min(len(text) - 1, len(text) * most_tokens // count)]
    return text


def run_all(
    setting: Setting,
    corpus: Path,
    out: Path,
    *,
    workloads: Sequence[str],
    rates: Sequence[float],
    policies: Sequence[str],
    seeds: int,
    budget_s: float,
    clock: Clock,
    say: Say,
) -> list[Row]:
    """Make the runs that `out` lacks, seed by seed so that every policy gets on alike; returns all that it has.

    budget_s  no run begins that would, as long as the last one, end later than that; 0: no limit
    """
    for rate in rates:
        if not 0 < rate < math.inf:
            raise ConfigError(f"--rate: expected requests per second, a number above 0, found {rate:g}")
    rows = read_rows(out)
    done = {key_of(row) for row in rows}
    wanted = itertools.product(range(seeds), workloads, rates, policies)
    keys = [(workload, rate, setting.copies, seed, policy) for seed, workload, rate, policy in wanted]
    missing = [key for key in keys if key not in done]
    if not missing:
        return rows
    room = Checkpoint.open(setting.model).spec.context_tokens - setting.tokens
    if room < 1:
        raise ConfigError(
            f"--tokens: answers of {setting.tokens} leave no room for a prompt in the model's context of "
            f"{room + setting.tokens} tokens; ask for fewer"
        )
    texts, tokenizer = prompts_of(corpus), Tokenizer.open(setting.model)
    began, longest_s = clock.now(), 0.0
    with Live(setting, missing[0][-1], clock) as live:
        for workload, rate, copies, seed, policy in missing:
            run_began = clock.now()
            if budget_s and run_began + longest_s - began > budget_s:
                say(f"{budget_s:.0f} s are over; called again it goes on with seed {seed}, {policy}")
                break
            live.route(policy)
            work = arrivals(texts, workload, setting.requests, rate, seed)
            measured = live.run([(at, shortened(text, tokenizer, room)) for at, text in work])
            row = {"workload": workload, "rate": rate, "copies": copies, "seed": seed, "policy": policy}
            refuse_other_answers(rows, row | measured)
            rows.append(row | measured)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            longest_s = max(longest_s, clock.now() - run_began)
            say(f"{key_of(row)}: TPOT {measured['tpot_p50']:.2f} ms, {clock.now() - run_began:.0f} s")
    return rows


def read_rows(path: Path) -> list[Row]:
    """Runs that were kept."""
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path} holds a line that is no run: {error}; take it out, or name another file"
        ) from error


def key_of(row: Row) -> tuple[str, float, float, int, str]:
    """What tells a run from others."""
    return row["workload"], row["rate"], row["copies"], row["seed"], row["policy"]


def refuse_other_answers(rows: Sequence[Row], found: Row) -> None:
    """ClusterError where a run answered its prompts otherwise than another policy did the same ones."""
    for row in rows:
        if work_of(row) != work_of(found):
            continue
        pairs = enumerate(zip(row["answers"], found["answers"], strict=True))
        unlike = [index for index, (one, other) in pairs if one != other]
        if unlike:
            raise ClusterError(
                f"{found['policy']} answered {len(unlike)} of {len(found['answers'])} prompts otherwise than "
                f"{row['policy']}, first number {unlike[0]} of {found['workload']} with seed {found['seed']}; greedy answers "
                "must not hang on the router"
            )


def work_of(row: Row) -> tuple[object, ...] | None:
    """What was asked of a run, whoever routed it; None where an older version did not keep the answers."""
    if "answers" not in row:
        return None
    return *key_of(row)[:-1], row["requests"], row["tokens"]


def agreement(rows: Sequence[Row]) -> str:
    """How many answers were held against those of another policy, all of which `refuse_other_answers` let pass."""
    works: dict[object, list[Row]] = {}
    for row in rows:
        if work_of(row) is not None:
            works.setdefault(work_of(row), []).append(row)
    several = [runs for runs in works.values() if len({run["policy"] for run in runs}) > 1]
    policies = sorted({run["policy"] for runs in several for run in runs})
    if not several:
        return "answers of policies were not held against each other: no two of them had the same prompts"
    prompts, tokens = (sum(runs[0][key] for runs in several) for key in ("requests", "tokens"))
    return f"{prompts} prompts in {len(several)} runs, {tokens} tokens: the same under {', '.join(policies)}, token for token"


class Live:
    """A cluster on this machine whose router can be changed, up for as long as the `with` block lasts."""

    def __init__(self, setting: Setting, policy: str, clock: Clock) -> None:
        self._setting, self._clock = setting, clock
        self._ports = free_ports(1 + setting.homes + setting.workers)
        self._policy = policy
        self._runs = 0
        self._held = ExitStack()

    def __enter__(self) -> "Live":
        with self._held:
            folder = self._held.enter_context(TemporaryDirectory(prefix="edge-routing-"))
            self._path = Path(folder) / "topology.toml"
            self._path.write_text(self._text, encoding="utf-8")
            running = self._held.enter_context(RunningCluster(self._path, self._clock))
            self._client = self._held.enter_context(running.client())
            self._client.connect()
            self._held = self._held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def _text(self) -> str:
        return topology_text(self._setting, self._policy, self._ports)

    def route(self, policy: str) -> None:
        """From now on by this policy, with the placement that goes with it."""
        if policy == self._policy:
            return
        self._policy = policy
        epoch = self._client.apply(self._text, str(self._path))
        deadline = self._clock.now() + READY_S
        while self._clock.now() < deadline:
            body = self._client.status()
            if not body["change"] and body["epoch"] >= epoch:
                if body["changes"] and not body["changes"][-1]["is_done"]:
                    raise ClusterError(f"the change to {policy} failed: {body['changes'][-1]['detail']}")
                return
            self._clock.sleep(HEARTBEAT_S / 2)
        raise ClusterError(f"the change to {policy} took longer than {READY_S:.0f} s")

    def run(self, work: Sequence[tuple[float, str]]) -> Row:
        """Ask, and see what came of it. Prompts of one run are not found in the KV that another has left."""
        self._runs += 1
        sampling = {"max_tokens": self._setting.tokens, "ignore_eos": True, "temperature": 0.0, "seed": 1}
        prompts = [Prompt(prompt=text, sampling=sampling, salt=f"run {self._runs}") for _, text in work]
        before = counted(self._client, self._setting, self._clock)
        moments = [BEGIN_S + at for at, _ in work]
        answers = self._client.run(prompts, wait_ready_s=READY_S, after_s=moments)
        after = counted(self._client, self._setting, self._clock)
        return measured_of(answers, {name: after[name] - before.get(name, 0.0) for name in after})


def counted(client: Client, setting: Setting, clock: Clock) -> dict[str, float]:
    """What homes have counted, summed, once two looks at an idle cluster agree."""
    deadline = clock.now() + SETTLED_S
    last: dict[str, float] = {}
    while clock.now() < deadline:
        clock.sleep(2 * HEARTBEAT_S)
        found: dict[str, float] = {}
        for node in client.status()["nodes"]:
            if node["name"] in setting.home_names:
                numbers = node["report"].get("numbers", {})
                numbers |= {"tokens": float(node["report"].get("tokens_generated", 0))}
                for name, value in numbers.items():
                    found[name] = found.get(name, 0.0) + float(value)
        if last and found["tokens"] == last["tokens"]:
            return found
        last = found
    raise ClusterError(f"homes did not come to rest within {SETTLED_S:.0f} s")


def measured_of(answers: Sequence[Answer], grown: dict[str, float]) -> Row:
    """One run's figures; latencies in milliseconds, as the client saw them.

    processor_ms  of all homes, for each token that they decoded
    remote_calls  experts for each decoded token, over all layers, that others computed
    messages      calls for each decoded token that these went out in, one for each layer, step and peer
    imbalance     largest number of answers at a home over the mean one, at each arrival there
    answers       a checksum of each answer's tokens, in the order in which they were asked for
    """
    if failed := [answer.error() for answer in answers if answer.finished is None]:
        raise ClusterError(f"{len(failed)} of {len(answers)} requests failed; the first: {failed[0]}")
    late = answers[int(WARM_UP * len(answers)) :]
    results = [answer.as_json() for answer in late]
    tpot = np.array([result["timing"]["tpot_s"] for result in results]) * 1e3
    spans = [(a.first_token_s or 0.0, a.last_token_s, a.node) for a in answers]
    homes = sorted({node for *_, node in spans})
    unequal = []
    for begin, _, _ in spans[int(WARM_UP * len(spans)) :]:
        at = [sum(b <= begin < e for b, e, node in spans if node == home) for home in homes]
        unequal.append(max(at) / max(mean(at), 1.0))
    layers, tokens = max(grown["step_touched_layers"], 1.0), max(grown["tokens"], 1.0)
    p50, p99 = np.percentile(tpot, [50, 99])
    return {
        "requests": len(answers),
        "tokens": sum(len(answer.as_json()["token_ids"]) for answer in answers),
        "answers": [checksum(answer.as_json()["token_ids"]) for answer in answers],
        "tpot_p50": float(p50),
        "tpot_p99": float(p99),
        "ttft_p50": float(np.median([result["timing"]["ttft_s"] for result in results])) * 1e3,
        "distinct": grown["step_touched_experts"] / layers,
        "batch": grown["step_touched_rows"] / layers,
        "remote_calls": grown.get("pairs_sent", 0.0) / tokens,
        "messages": grown.get("calls_made", 0.0) / tokens,
        "imbalance": float(np.mean(unequal)),
        "processor_ms": grown["processor_s"] / tokens * 1e3,
        "ahead_blocks": grown.get("blocks_fetched_ahead", 0.0),
        "blocks": grown.get("blocks_fetched", 0.0),
    }


def checksum(token_ids: Sequence[int]) -> str:
    """Eight letters that two unlike answers share once in four billion times."""
    return f"{zlib.crc32(np.array(token_ids, dtype='<i8').tobytes()):08x}"


COLUMNS = (
    ("TPOT p50 ms", "tpot_p50"),
    ("p99 ms", "tpot_p99"),
    ("TTFT p50 ms", "ttft_p50"),
    ("distinct", "distinct"),
    ("batch", "batch"),
    ("remote calls/token", "remote_calls"),
    ("messages/token", "messages"),
    ("imbalance", "imbalance"),
    ("processor ms/token", "processor_ms"),
)


def table(rows: Sequence[Row]) -> str:
    """Mean over the runs and, in brackets, their standard deviation; p50 and p99 against the best balancer, run by run."""
    names = ["workload", "rate", "copies", "policy", "runs", *(name for name, _ in COLUMNS)]
    names.append("p50, p99 against the best balancer")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    panels = dict.fromkeys((row["workload"], row["rate"], row["copies"]) for row in rows)
    for panel in panels:
        mine = [row for row in rows if (row["workload"], row["rate"], row["copies"]) == panel]
        for policy in dict.fromkeys(row["policy"] for row in mine):
            runs = [row for row in mine if row["policy"] == policy]
            cells = [panel[0], f"{panel[1]:g}", f"{panel[2]:g}", policy, str(len(runs))]
            cells += [_spread([run[key] for run in runs if key in run]) for _, key in COLUMNS]
            cells.append(", ".join(_against(mine, runs, key) for key in ("tpot_p50", "tpot_p99")))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; of what no run has, kept by an older version, nothing."""
    if not values:
        return "-"
    spread = stdev(values) if len(values) > 1 else 0.0
    return f"{mean(values):.2f} ({spread:.2f})"


def _against(panel: Sequence[Row], runs: Sequence[Row], key: str) -> str:
    """Mean ratio to the balancer that is best on average, over the seeds that both have."""
    of = {
        policy: {row["seed"]: row[key] for row in panel if row["policy"] == policy}
        for policy in BALANCERS
        if any(row["policy"] == policy for row in panel)
    }
    if not of:
        return "-"
    best = min(of.values(), key=lambda by_seed: mean(by_seed.values()))
    ratios = [run[key] / best[run["seed"]] for run in runs if run["seed"] in best]
    return f"{mean(ratios) - 1:+.1%}" if ratios else "-"
