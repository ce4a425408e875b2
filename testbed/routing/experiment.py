"""Compare routers on recorded or drawn traces: policies, baselines and ablations in one table, several seeds each.

Fits signatures with calibration's own code on one set of requests and serves another.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import numpy as np

from calibration.signatures_fit import VARIANTS, rank_quality, select_layers, variant_values
from edge_runtime.errors import ConfigError
from edge_runtime.routing.base import Router
from edge_runtime.routing.baselines import (
    DomainOracle,
    LeastPressure,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    ShortestQueue,
)
from edge_runtime.routing.clusters import assign_to_homes, demand_by_cluster, fit_clusters
from edge_runtime.routing.locality_band import PAPER, BandRule, LocalityBand
from edge_runtime.routing.signature import idf_weights, unit_rows
from testbed.routing.replay import Costs, Outcome, arrivals, curves, replay
from testbed.routing.traces import Traces

if TYPE_CHECKING:
    from kernels.ops import ExpertBank

TASKS = ("c", "cli", "json", "math", "proofs", "python", "sql")
TOP_TWO = 0.75  # of the language mix, as in WildChat
TAUS = (0.0, 0.1, 0.2, 0.3, 1.0)
AFFINITIES = (0.25, 1.0, 2.0)
COPIES = 2.0  # experts held by all homes together, per distinct one
BASELINES = ("round_robin", "random", "jsq", "power_of_two", "pressure", "domain")

SLOTS = 16  # requests that a home runs at once
PREFILL_BUSY = 0.6  # share of time that prefill workers compute

Shares = Callable[[float], np.ndarray]


@dataclass(frozen=True)
class Row:
    """One line of the table: the outcomes of all seeds."""

    workload: str
    num_homes: int
    load: float
    policy: str
    outcomes: tuple[Outcome, ...]

    @property
    def key(self) -> tuple[str, int, float, str]:
        """What tells it from others."""
        return self.workload, self.num_homes, self.load, self.policy

    def values(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation over the seeds."""
        found = [float(getattr(outcome, name)) for outcome in self.outcomes]
        return mean(found), stdev(found) if len(found) > 1 else 0.0


def workloads(domains: Sequence[str]) -> dict[str, Shares]:
    """Named mixes of domains: `task`, `language`, and `drift`, in which one becomes the other half-way."""
    tasks = np.array([name in TASKS for name in domains], dtype=float)
    if not tasks.any() or tasks.all():  # drawn domains have no names that say something
        even = np.ones(len(domains)) / len(domains)
        skewed = 0.5 ** np.arange(1, len(domains) + 1)
        return {"even": lambda at: even, "skewed": lambda at: skewed / skewed.sum()}
    others = [index for index, name in enumerate(domains) if name not in TASKS]
    languages = np.zeros(len(domains))
    languages[others] = (1 - TOP_TWO) / max(len(others) - 2, 1)
    for index, share in zip(others, (0.6 * TOP_TWO, 0.4 * TOP_TWO), strict=False):
        languages[index] = share
    task, language = tasks / tasks.sum(), languages / languages.sum()
    return {
        "task": lambda at: task,
        "language": lambda at: language,
        "drift": lambda at: task if at < 0.5 else language,
    }


class Bench:
    """One fit set, one serving set, one number of homes."""

    def __init__(self, fit: Traces, serve: Traces, shares: Shares, num_homes: int, *, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        mix = shares(0.0)
        weights = mix[fit.domain] / np.maximum(np.bincount(fit.domain, minlength=len(mix)), 1)[fit.domain]
        count = min(len(fit.domain), max(4 * num_homes, int((weights > 0).sum())))
        chosen = rng.choice(len(fit.domain), size=count, p=weights / weights.sum())
        self.fit, self.serve = fit.of(chosen), serve
        self.mix, self.num_homes = mix, num_homes
        self.names = [f"n{index}" for index in range(num_homes)]
        self._made: dict[tuple[str, bool, bool], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def signatures(
        self, variant: str = "count_idf", *, masked: bool = True, equal_sizes: bool = True
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Signatures of the serving set, centroids, and the demand of each cluster [C, L, E]."""
        key = (variant, masked, equal_sizes)
        if key not in self._made:
            weights = idf_weights(self.fit.prefill)
            values = [
                variant_values(variant, each.prefill, probabilities=each.probabilities, weights=weights)
                for each in (self.fit, self.serve)
            ]
            layers: Sequence[int] = range(values[0].shape[1])
            if masked:
                layers = select_layers(values[0], self.fit.decode_counts).layers
            fitted, served = (unit_rows(each[:, list(layers)].reshape(len(each), -1)) for each in values)
            told = fitted.any(axis=1)
            clusters = fit_clusters(fitted[told], self.num_homes, equal_sizes=equal_sizes)
            demand = demand_by_cluster(self.fit.decode_counts[told], clusters.labels, self.num_homes)
            self._made[key] = served, clusters.centroids, demand
        return self._made[key]

    def quality(self, variant: str, *, masked: bool) -> float:
        """Spearman's rho of a variant on the serving set."""
        return rank_quality(self.signatures(variant, masked=masked)[0], self.serve.decode_counts)

    def router(self, policy: str, seed: int) -> tuple[Router, np.ndarray]:
        """A router by its name in the table, and the signatures it wants."""
        plain: dict[str, Callable[[], Router]] = {
            "round_robin": RoundRobin,
            "random": lambda: RandomChoice(seed),
            "jsq": lambda: ShortestQueue(seed),
            "power_of_two": lambda: PowerOfTwo(seed),
            "pressure": LeastPressure,
            "domain": lambda: DomainOracle(
                dict(zip(self.serve.domains, self.mix.tolist(), strict=True)), self.num_homes, seed
            ),
        }
        if policy in plain:
            return plain[policy](), np.zeros((len(self.serve.domain), 1), dtype=np.float32)
        words = policy.split()[1:]
        rule = BandRule(uses_transfer=False)
        options: dict[str, bool] = {}
        variant = "count_idf"
        for word in words:
            if word.startswith("tau="):
                rule = replace(PAPER, tau=float(word[4:]))
            elif word.startswith("affinity="):
                rule = replace(rule, affinity=float(word[9:]))
            elif word == "fixed":
                rule = replace(rule, memory=0.0)
            elif word == "counts":
                rule = replace(rule, uses_speed=False)
            elif word == "unbalanced":
                options["equal_sizes"] = False
            elif word == "all-layers":
                options["masked"] = False
            elif word in VARIANTS:
                variant = word
        served, centroids, demand = self.signatures(variant, **options)
        if (
            "joint" not in words
        ):  # homes hold what `blind` gave them, and take the clusters that fit that best
            centroids = centroids[assign_to_homes(demand, self.resident("blind"))]
        return LocalityBand(centroids, self.names, rule), served

    def resident(self, kind: str) -> np.ndarray:
        """[H, L, E] which experts each home holds: `joint`, each what its cluster uses; else each what all use most.

        All homes hold equally many and every expert is somewhere.
        """
        _, L, E = self.fit.prefill.shape
        room = min(E, max(1, round(COPIES * E / self.num_homes)))
        overall = self.fit.decode_counts.sum(axis=0).astype(np.float64)
        overall /= overall.sum(axis=1, keepdims=True)
        wanted = np.broadcast_to(overall, (self.num_homes, L, E)).copy()
        if kind == "joint":
            wanted = self.signatures()[2].astype(np.float64)
        found = np.zeros((self.num_homes, L, E), dtype=bool)
        for layer in range(L):
            order = np.argsort(-overall[layer], kind="stable")
            free = [room] * self.num_homes
            for expert in order:  # one copy each, where it is wanted most and there is room
                able = [home for home in range(self.num_homes) if free[home] > 0]
                home = max(able, key=lambda home: (wanted[home, layer, expert], free[home]))
                found[home, layer, expert] = True
                free[home] -= 1
            for home in range(self.num_homes):
                for expert in np.argsort(-wanted[home, layer], kind="stable"):
                    if free[home] and not found[home, layer, expert]:
                        found[home, layer, expert] = True
                        free[home] -= 1
        return found


def ablations() -> list[str]:
    """ELDR in all its forms; the first is the one in use, `tau=0.1` the paper's.

    fixed       homes stay what calibration said
    counts      requests that wait weigh as much as those that run
    unbalanced, all-layers, and names of variants: other fits
    """
    paper = f"eldr tau={PAPER.tau:g}"
    return [
        "eldr",
        "eldr joint",
        paper,
        f"{paper} joint",
        *(f"eldr affinity={weight:g}" for weight in AFFINITIES),
        "eldr fixed",
        "eldr counts",
        *(f"eldr tau={tau:g}" for tau in TAUS if tau != PAPER.tau),
        f"{paper} unbalanced",
        f"{paper} all-layers",
        *(f"{paper} {variant}" for variant in VARIANTS[1:]),
    ]


def run_table(
    fit: Traces,
    serve: Traces,
    *,
    num_homes: int,
    loads: Sequence[float],
    seeds: int,
    costs: Costs,
    num_requests: int,
    model_layers: int = 0,
    only: Iterable[str] = (),
    policies: Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
    known: Sequence[Row] = (),
    keep: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Every policy at every load.

    loads  requests in decode per home that the rate aims at
    known  rows that were made before; keep: is given each new one
    """
    rows = list(known)
    made = {row.key for row in known}
    wanted = set(only)
    for name, shares in workloads(serve.domains).items():
        if wanted and name not in wanted:
            continue
        wanted_policies = policies or [*BASELINES, *ablations()]
        if all((name, num_homes, load, policy) in made for load in loads for policy in wanted_policies):
            continue
        bench = Bench(fit, serve, shares, num_homes)
        draw = np.random.default_rng(11)
        compared = [curves(serve, shares(at), SLOTS, draw) for at in (0.0, 1.0)]
        for load in loads:
            rate = rate_for(serve, load, num_homes, costs, model_layers)
            for policy in wanted_policies:
                if (name, num_homes, load, policy) in made:
                    continue
                outcomes = []
                resident = bench.resident("joint" if "joint" in policy else "blind")
                for seed in range(seeds):
                    work = arrivals(serve, num_requests, rate, np.random.default_rng([seed, 7]), shares)
                    router, signatures = bench.router(policy, seed)
                    busy = rate * costs.prefill_per_token * float(serve.prompt_tokens.mean())
                    workers = max(1, round(busy / PREFILL_BUSY + 0.5))  # prefill is not what is compared
                    outcomes.append(
                        replay(
                            serve,
                            work,
                            router,
                            signatures,
                            costs,
                            num_homes=num_homes,
                            num_workers=workers,
                            model_layers=model_layers,
                            resident=resident,
                            slots=SLOTS,
                            compared=compared,
                        )
                    )
                rows.append(Row(name, num_homes, load, policy, tuple(outcomes)))
                keep(rows[-1])
                say(
                    f"{name}, {num_homes} homes, load {load:g}, {policy}: TPOT {rows[-1].values('tpot_p50')[0]:.2f} ms"
                )
    return rows


def rate_for(traces: Traces, load: float, num_homes: int, costs: Costs, model_layers: int) -> float:
    """Requests per second at which about `load` of them decode at each home."""
    _, L, E = traces.prefill.shape
    K = traces.choices[0].shape[2]
    distinct = E * (1 - (1 - K / E) ** load)
    step_s = costs.fixed + costs.per_row * load
    step_s += (model_layers or L) * costs.per_expert * (costs.base_experts + distinct)
    tokens = float(np.mean([len(choices) for choices in traces.choices]))
    return load * num_homes / (tokens * step_s)


COLUMNS = (
    "tpot_p50",
    "tpot_p99",
    "ttft_p50",
    "distinct",
    "saved",
    "gap",
    "batch",
    "remote_calls",
    "imbalance",
)
BALANCERS = ("round_robin", "random", "jsq", "power_of_two", "pressure")


def table(rows: Sequence[Row]) -> str:
    """The rows as markdown: mean and spread, and TPOT against the load balancer with the least p50, and the one with the
    least p99."""
    lines = [
        "| workload | homes | load | policy | TPOT p50 ms | p99 ms | TTFT p50 ms | distinct | saved | of the gap | batch "
        "| remote calls/token | imbalance | p50, p99 against the best balancer |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        panel = (row.workload, row.num_homes, row.load)
        others = [r for r in rows if r.policy in BALANCERS and (r.workload, r.num_homes, r.load) == panel]
        cells = [f"{average:.2f} ({spread:.2f})" for average, spread in map(row.values, COLUMNS)]
        against = [
            f"{row.values(name)[0] / min(other.values(name)[0] for other in others or [row]) - 1:+.1%}"
            for name in ("tpot_p50", "tpot_p99")
        ]
        lines.append(
            f"| {row.workload} | {row.num_homes} | {row.load:g} | {row.policy} | {' | '.join(cells)} | {', '.join(against)} |"
        )
    return "\n".join(lines)


def append_csv(row: Row, path: Path) -> None:
    """One line for each seed, below those that are there."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["workload", "homes", "load", "policy", "seed", *COLUMNS])
        for seed, outcome in enumerate(row.outcomes):
            values = [f"{getattr(outcome, name):.6g}" for name in COLUMNS]
            writer.writerow([row.workload, row.num_homes, f"{row.load:g}", row.policy, seed, *values])


def read_csv(path: Path) -> list[Row]:
    """The rows of such a file; none if it is not there. ConfigError for another kind of file."""
    if not path.exists():
        return []
    found: dict[tuple[str, int, float, str], list[Outcome]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            try:
                key = line["workload"], int(line["homes"]), float(line["load"]), line["policy"]
                outcome = Outcome(**{name: float(line[name]) for name in COLUMNS})
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is no table of routers: {error!r} in {line}; name another file"
                ) from error
            found.setdefault(key, []).append(outcome)
    return [Row(*key, tuple(outcomes)) for key, outcomes in found.items()]


def plot(rows: Sequence[Row], path: Path) -> None:
    """TPOT p50 and distinct experts of every policy, one panel per workload."""
    from matplotlib.figure import Figure

    panels = sorted({(row.workload, row.num_homes, row.load) for row in rows})
    figure = Figure(figsize=(10, 0.5 + 3.2 * len(panels)), layout="constrained")
    for index, panel in enumerate(panels):
        mine = [row for row in rows if (row.workload, row.num_homes, row.load) == panel]
        for side, name in enumerate(("tpot_p50", "distinct")):
            axes = figure.add_subplot(len(panels), 2, 2 * index + side + 1)
            values = [row.values(name) for row in mine]
            axes.barh([row.policy for row in mine], [v for v, _ in values], xerr=[s for _, s in values])
            axes.invert_yaxis()
            axes.tick_params(labelsize=6)
            lowest = min(v for v, _ in values)
            axes.set_xlim(left=0.8 * lowest)
            axes.set_title(f"{panel[0]}, {panel[1]} homes, load {panel[2]:g}: {name}", fontsize=8)
    figure.savefig(path)


def measure_costs(
    banks: Sequence["ExpertBank"], top_k: int, *, rounds: int = 10
) -> tuple[float, float, float]:
    """Seconds of a layer's experts on this machine: `a + b * distinct experts + c * rows`, fitted on decode batches.

    banks  of several layers, which are computed in turn as a step does: one by itself stays in the processor's cache,
           where a distinct expert of the demo model takes 1 to 4 us instead of 10
    """
    import torch

    from edge_runtime.clock import SystemClock
    from kernels import ops

    E, D = banks[0].num_experts, banks[0].D
    generator = torch.Generator().manual_seed(1)
    samples = []
    now = SystemClock().processor_s
    for num_rows in (4, 8, 16):
        for among in (top_k, 2 * top_k, 4 * top_k, E):
            if among > min(E, num_rows * top_k):
                continue
            ids = torch.stack(
                [torch.randperm(among, generator=generator)[:top_k] for _ in range(num_rows)]
            ).int()
            x = torch.randn(num_rows, D, generator=generator)
            weights = torch.full((num_rows, top_k), 1 / top_k)
            hidden, out = torch.zeros(num_rows, D), torch.empty(num_rows * top_k, D)
            for bank in banks:
                ops.experts(x, ids, weights, bank, hidden, expert_out=out)
            began = now()
            for _ in range(rounds):
                for bank in banks:
                    ops.experts(x, ids, weights, bank, hidden, expert_out=out)
            samples.append((1.0, len(ids.unique()), num_rows, (now() - began) / rounds / len(banks)))
    found = np.array(samples)
    (a, b, c), *_ = np.linalg.lstsq(found[:, :3], found[:, 3], rcond=None)
    return float(a), float(b), float(c)
