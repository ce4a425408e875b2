"""The same comparison through real daemons: a shaped cluster for each policy, so many requests in flight that come at random,
and what answers and nodes say of them. A result is kept in a file, and what is kept is not measured again. Knows no model.
"""

import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError
from edge_runtime.selector.budget import MOST
from testbed.bench.clusters import READY_S, RunningCluster, difference, settled
from testbed.kept import Kept
from testbed.stand_ins.experiment import Policy

SHAPE_VARIABLE = "EDGE_SHAPE"


def shaped_file(source: Path, folder: Path, policy: Policy, rtt: str, bandwidth: str) -> Path:
    """A copy of a topology file with equal links and the policy's placement and selector."""
    text = source.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^\[\[link\]\].*?(?=^\[|\Z)", "", text)
    text = re.sub(r"(?ms)^\[default_link\].*?(?=^\[|\Z)", "", text)
    text = re.sub(r"(?m)^(placement|selector|defer|drop|look_ahead) *=.*\n", "", text)
    model = re.search(r'(?m)^model *= *"([^"]+)"', text)
    if model is not None:
        absolute = (source.parent / model[1]).resolve().as_posix()
        text = text.replace(model[0], f'model = "{absolute}"')
    settings = f'placement = "{policy.placement}"\nselector = "{policy.selector}"\n'
    settings += "".join(f"{key} = true\n" for key in ("defer", "drop") if key in policy.may)
    settings += "" if "ahead" in policy.may else "look_ahead = false\n"
    if policy.ratio is not None:
        text = re.sub(r"(?m)^memory_ratio *=.*\n", "", text)
        settings += f"memory_ratio = {policy.ratio}\n"
    text = text.replace("[cluster]\n", f"[cluster]\n{settings}", 1)
    text += f'\n[default_link]\nrtt = "{rtt}"\nbandwidth = "{bandwidth}"\n'
    path = folder / "topology.toml"
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Arrivals:
    """What is asked of each cluster. The same seed gives the same moments and prompts.

    in_flight    requests that are there at once; when one ends, the next comes after an exponential pause
    num_requests in all; rate_per_s: of the first ones, and one by mean pause
    """

    in_flight: int
    num_requests: int
    rate_per_s: float
    max_tokens: int
    seed: int


def through_daemons(
    topology: Path,
    policies: Sequence[Policy],
    prompts: Sequence[str],
    clock: Clock,
    arrivals: Arrivals,
    *,
    rtt: str,
    bandwidth: str,
    kept: Path | None,
    progress: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """One row for each policy.

    kept  folder of results: what was measured before with the same settings comes from there; None: nothing is kept
    """
    rows: list[dict[str, Any]] = []
    results = Kept(kept, asdict(arrivals), rtt, bandwidth, topology.read_text(encoding="utf-8"))
    for policy in policies:
        settings = policy.settings
        row = results.get(policy.name, settings)
        if row is None:
            row = _through_one(topology, policy, prompts, clock, arrivals, rtt, bandwidth)
            results.put(policy.name, row, settings)
        rows.append(row)
        progress("daemons", len(rows), len(policies))
    return rows


def _through_one(
    topology: Path,
    policy: Policy,
    prompts: Sequence[str],
    clock: Clock,
    arrivals: Arrivals,
    rtt: str,
    bandwidth: str,
) -> dict[str, Any]:
    with TemporaryDirectory(prefix="edge-stand-ins-") as folder:
        path = shaped_file(topology, Path(folder), policy, rtt, bandwidth)
        os.environ[SHAPE_VARIABLE] = "1"
        try:
            with RunningCluster(path, clock) as running:
                return _measured(running, policy, prompts, clock, arrivals)
        finally:
            del os.environ[SHAPE_VARIABLE]


def _measured(
    running: RunningCluster, policy: Policy, prompts: Sequence[str], clock: Clock, arrivals: Arrivals
) -> dict[str, Any]:
    sampling = {
        "max_tokens": arrivals.max_tokens,
        "ignore_eos": True,
        "seed": 1,
        "quality": min(policy.budget, MOST),
    }
    num_requests = arrivals.num_requests
    answers: list[Answer | None] = [None] * num_requests
    first_s = clock.now() + 0.5

    def ask(place: int) -> None:
        """One of those in flight: asks, waits for the answer, pauses, asks again."""
        draw = random.Random(arrivals.seed * 10_007 + place)
        due = first_s + sum(draw.expovariate(arrivals.rate_per_s) for _ in range(place + 1))
        with running.client() as client:
            client.connect()
            for index in range(place, num_requests, arrivals.in_flight):
                clock.sleep(max(0.0, due - clock.now()))
                prompt = Prompt(prompt=prompts[index % len(prompts)], sampling=sampling)
                [answers[index]] = client.run([prompt], wait_ready_s=READY_S)
                due = clock.now() + draw.expovariate(arrivals.rate_per_s)

    with running.client() as client:
        client.connect()
        before = settled(client, clock)
        began = clock.now()
        threads = [threading.Thread(target=ask, args=(place,)) for place in range(arrivals.in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = clock.now() - began
        counted = difference(before, settled(client, clock))
    results = [answer.as_json() for answer in answers if answer is not None and answer.finished is not None]
    if len(results) < num_requests:
        raise ClusterError(f"{policy.name}: {num_requests - len(results)} of {num_requests} requests failed")
    tpot = np.array([result["timing"]["home"]["tpot_s"] for result in results]) * 1e3
    tokens = sum(result["usage"]["completion_tokens"] for result in results)

    def mean(key: str) -> float:
        return fmean(result["bill"][key] for result in results)

    return {
        "policy": policy.name,
        "placement": policy.placement,
        "budget": min(policy.budget, MOST),
        "tpot_ms": float(tpot.mean()),
        "tpot_p50_ms": float(np.median(tpot)),
        "tpot_p95_ms": float(np.quantile(tpot, 0.95)),
        "mb_per_1000_tokens": (counted["bytes_out"] + counted["bytes_in"]) / tokens / 1e3,
        "calls_per_token": counted["calls_made"] / tokens,
        "local_exact": mean("exact_here"),
        "local_substitute": mean("substituted"),
        "remote": mean("exact_elsewhere"),
        "remote_late": mean("deferred"),
        "tokens_per_s": tokens / seconds,
        "spent_per_token": sum(result["bill"]["budget_spent"] for result in results) / tokens,
    }


def with_quality(rows: Sequence[dict[str, Any]], judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what the same policy costs in quality, as text under the same placement and selector tells it."""
    known = {row["policy"]: row for row in judged}
    names = ("perplexity_rise", "rise_error", "agreement")
    return [
        row | {name: known[row["policy"]][name] for name in names if row["policy"] in known} for row in rows
    ]


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for people; beside each TPOT how far it is below the exact one at the same placement."""
    exact = next((row for row in rows if row["placement"] == "similarity" and not row["budget"]), None)
    lines = [
        "| policy | TPOT ms, mean | p50 | p95 | MB per 1,000 tokens | local exact | stand-in | remote | of it late | tok/s "
        "| perplexity (s.e.) |",
        "|---|" + "---|" * 10,
    ]
    for row in rows:
        below = ""
        if exact is not None and row["budget"]:
            below = f" ({100 * (row['tpot_ms'] / exact['tpot_ms'] - 1):+.0f} %)"
        rise = ""
        if row.get("perplexity_rise") is not None:
            rise = (
                f"{100 * row['perplexity_rise']:+.2f} % ({100 * row['rise_error']:.2f})"
                if row["budget"]
                else "0"
            )
        shares = (
            row["local_exact"],
            row["local_substitute"],
            row["remote"] + row["remote_late"],
            row["remote_late"],
        )
        cells = (
            row["policy"],
            f"{row['tpot_ms']:.1f}{below}",
            f"{row['tpot_p50_ms']:.1f}",
            f"{row['tpot_p95_ms']:.1f}",
            f"{row['mb_per_1000_tokens']:.1f}",
            *(f"{100 * share:.0f} %" for share in shares),
            f"{row['tokens_per_s']:.0f}",
            rise,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
