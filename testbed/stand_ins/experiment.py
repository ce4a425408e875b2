"""What stand-ins save and cost: policies side by side at one home of a cluster, over budgets, memory ratios and numbers of
nodes; and tokens that roam. Rows of plain values; files and pictures are the command's.

Latency is predicted (5 ms round trips, 200 Mbit/s unless said), quality is measured on text.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from calibration.evaluate import rows_that_fit
from calibration.exact_model import STEP_ROWS, ExactModel
from calibration.requests import CalibrationRequest
from edge_runtime.artifacts import Artifact
from edge_runtime.errors import ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from edge_runtime.selector.budget import BALANCED, FAST
from edge_runtime.selector.learned import Losses, read_losses, read_traits
from testbed.stand_ins.at_home import NO_LIMIT, AtHome
from testbed.stand_ins.roam import WHATEVER, Rule, Servers, uneven_servers, walk
from topology.cluster import Cluster, Link, Node
from topology.placement import plan_placement
from topology.traits import ExpertTraits

BUDGETS = (0.0025, 0.005, BALANCED, 0.015, 0.03)
RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0)
COUNTS = (4, 8, 12, 16)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Policy:
    """One line of the comparison. placement: rule of the topology file; selector and budget of the requests.

    may  what else the selector may do: defer and drop as in the topology file, ahead for look_ahead
    """

    name: str
    placement: str = "similarity"
    selector: str = "exact"
    budget: float = 0.0
    ratio: float | None = None
    nodes: int | None = None
    may: frozenset[str] = frozenset({"ahead"})

    @property
    def settings(self) -> dict[str, Any]:
        """All but the name, as plain values."""
        return {key: value for key, value in asdict(self).items() if key != "name"} | {
            "may": sorted(self.may)
        }


LATE, MYOPIC = frozenset({"ahead", "defer"}), frozenset({"defer"})
COMPARED = (
    Policy("spread, exact", "spread"),
    Policy("popularity, exact", "popularity"),
    Policy("similarity, exact"),
    Policy("paper", selector="paper", budget=BALANCED),
    Policy("live", selector="live", budget=BALANCED),
    Policy("live, late replies", selector="live", budget=BALANCED, may=LATE),
    Policy("the same, no look-ahead", selector="live", budget=BALANCED, may=MYOPIC),
    Policy("the same, no redundancy", selector="live", budget=BALANCED, ratio=1.0, may=LATE),
    Policy("local only", selector="live", budget=NO_LIMIT),
)
KEPT = ("live", "paper", "late")


def swept() -> list[Policy]:
    """Budgets for both selectors, and memory ratios and numbers of nodes for one of them and exact."""
    found = [
        Policy(f"{name} {budget:g}", selector=_rule_of(name), budget=budget, may=_may_of(name))
        for name in KEPT
        for budget in BUDGETS
    ]
    for name, budget in (("exact", 0.0), ("late", BALANCED), ("late", FAST)):
        at = f" {budget:g}" if budget else ""
        found += [
            Policy(
                f"{name}{at}, ratio {ratio:g}",
                selector=_rule_of(name),
                budget=budget,
                ratio=ratio,
                may=_may_of(name),
            )
            for ratio in RATIOS
        ]
        found += [
            Policy(
                f"{name}{at}, {count} nodes",
                selector=_rule_of(name),
                budget=budget,
                nodes=count,
                may=_may_of(name),
            )
            for count in COUNTS
        ]
    return found


def _rule_of(name: str) -> str:
    return "live" if name == "late" else name


def _may_of(name: str) -> frozenset[str]:
    return LATE if name == "late" else frozenset({"ahead"})


def shaped(cluster: Cluster, policy: Policy, rtt_s: float, bandwidth_bps: float) -> Cluster:
    """The cluster with equal links, the policy's placement, and as many nodes as it says: the file's, over and over."""
    nodes = cluster.nodes
    if policy.nodes is not None:
        nodes = tuple(_again(nodes[index % len(nodes)], index) for index in range(policy.nodes))
    return replace(
        cluster,
        nodes=nodes,
        placement=policy.placement,
        memory_ratio=policy.ratio or cluster.memory_ratio,
        default_link=Link("*", "*", rtt_s, bandwidth_bps),
        links=(),
    )


def _again(node: Node, index: int) -> Node:
    return replace(node, name=f"{node.name}{index}", address=f"127.0.0.1:{20000 + index}")


class Hub:
    """Text decoded at one home, by each of several policies."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        home: str | None,
        streams: int,
        rtt_s: float,
        bandwidth_bps: float,
    ) -> None:
        self._cluster, self._streams, self._home = cluster, streams, home
        self._rtt_s, self._bandwidth_bps = rtt_s, bandwidth_bps
        self._checkpoint = Checkpoint.open(cluster.model)
        self._parts = footprint(self._checkpoint, context_tokens=cluster.context_tokens)
        self.traits, self.losses = learned(cluster, self._checkpoint.model_hash)

    def alternative(self, policy: Policy) -> AtHome:
        """The policy at the home, whose name is the file's first one with attention where none was given."""
        cluster = shaped(self._cluster, policy, self._rtt_s, self._bandwidth_bps)
        placement = plan_placement(cluster, self._parts, traits=self.traits)
        homes = [stage.node for group in placement.groups for stage in group.stages]
        return AtHome(
            policy.name,
            cluster,
            placement,
            self._parts,
            self.traits.groups,
            self.losses,
            home=self._home if self._home in homes else homes[len(homes) // 2],
            policy=policy.selector,
            budget=policy.budget,
            streams=self._streams,
            may=policy.may,
        )

    def run(
        self,
        policies: Sequence[Policy],
        requests: Sequence[CalibrationRequest],
        domains: Sequence[str],
        progress: Progress,
    ) -> list[dict[str, Any]]:
        """One row for each policy."""
        from calibration.evaluate import evaluate

        context = max(request.num_tokens for request in requests) + 1
        rows = min(STEP_ROWS, rows_that_fit(self._checkpoint.spec.vocab_size))
        model = ExactModel(self._checkpoint, context_tokens=context, step_rows=rows)
        alternatives = [self.alternative(policy) for policy in policies]
        outcomes = evaluate(
            model, requests, domains, alternatives, lambda done, total: progress("decode", done, total)
        )
        return [
            _row(policy, each, outcome.mean_rise, outcome.error, outcome.total.agreement)
            for policy, each, outcome in zip(policies, alternatives, outcomes, strict=True)
        ]


def _row(policy: Policy, home: AtHome, rise: float, error: float, agreement: float) -> dict[str, Any]:
    tally, steps = home.tally, np.array(home.tally.step_s)
    return {
        "policy": policy.name,
        "placement": policy.placement,
        "budget": policy.budget if policy.budget < NO_LIMIT else "",
        "ratio": policy.ratio or "",
        "nodes": policy.nodes or "",
        "tpot_ms": float(steps.mean()) * 1e3,
        "tpot_p50_ms": float(np.median(steps)) * 1e3,
        "tpot_p95_ms": float(np.quantile(steps, 0.95)) * 1e3,
        "mb_per_1000_tokens": tally.bytes / tally.tokens / 1e3,
        "calls_per_token": tally.calls / tally.tokens,
        "waits_per_layer": tally.waits / max(tally.layers, 1),
        **{way.replace(" ", "_"): tally.share(way) for way in tally.weight},
        "tokens_per_s": tally.tokens / float(steps.sum()),
        "spent_per_token": tally.spent / tally.tokens,
        "perplexity_rise": rise,
        "rise_error": error,
        "agreement": agreement,
    }


def learned(cluster: Cluster, model_hash: str) -> tuple[ExpertTraits, Losses]:
    """What calibration found, all of it; ConfigError without."""
    from edge_runtime.selector.learned import find_artifact

    artifact: Artifact | None = find_artifact(cluster, model_hash)
    traits = read_traits(artifact) if artifact is not None else None
    losses = read_losses(artifact) if artifact is not None else None
    if traits is None or losses is None:
        raise ConfigError(
            f"model {cluster.model} has no calibration artifact with groups and losses; run `edge-runtime calibrate`"
        )
    return traits, losses


ROAMING = (
    Rule("random placement, exact", 1, 0.0, placement="random"),
    Rule("popularity, exact", 1, 0.0, placement="popularity"),
    Rule("similarity, exact", 1, 0.0),
    Rule("similarity, exact, depth 3", 3, 0.0),
    Rule("no redundancy, depth 3", 3, BALANCED, ratio=1.0),
    Rule("local substitutes only", 1, WHATEVER),
    *(Rule(f"depth {depth}", depth, BALANCED) for depth in (1, 2, 3, 5)),
)


def roam(
    traits: ExpertTraits,
    losses: Losses,
    *,
    num_servers: int = 8,
    rate_per_s: float = 200.0,
    num_tokens: int = 1000,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
) -> list[dict[str, Any]]:
    """Tokens that go on from where they were served, and tokens that return home, over several draws of servers of two
    kinds; all rules of a draw meet the same tokens.
    """
    rows = []
    for lines in ("sites", "homes"):
        for seed in seeds:
            known: dict[tuple[str, float], Servers] = {}
            for rule in ROAMING:
                place = (rule.placement, rule.ratio)
                if place not in known:
                    known[place] = uneven_servers(
                        traits, num_servers, rule.ratio, seed, placement=rule.placement, lines=lines
                    )
                for stays in (True, False):
                    found = walk(
                        known[place],
                        traits,
                        losses,
                        replace(rule, stays=stays),
                        rate_per_s=rate_per_s,
                        num_tokens=num_tokens,
                        seed=seed,
                    )
                    seconds = np.array(found.seconds)
                    rows.append(
                        {
                            "lines": lines,
                            "location": "roaming" if stays else "hub",
                            "rule": rule.name,
                            "seed": seed,
                            "mean_ms": float(seconds.mean()) * 1e3,
                            "p95_ms": float(np.quantile(seconds, 0.95)) * 1e3,
                            "moves_per_token": found.moves / len(seconds),
                            "local": found.local / found.layers,
                            "stood_in": found.stood_in / found.layers,
                        }
                    )
    return rows


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each row, headed by their keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()}
        )
    return text.getvalue()


def draw(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Latency against quality, and over budgets, memory ratios and numbers of nodes, as far as they were swept.

    False if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 8), layout="constrained")
    against, spent, ratios, nodes = figure.subplots(2, 2).flat
    for name in KEPT:
        points = sorted(
            (row["budget"], row["tpot_ms"], 100 * row["perplexity_rise"])
            for row in rows
            if row["policy"].startswith(f"{name} 0") and not row["ratio"] and not row["nodes"]
        )
        if points:
            against.plot([p[2] for p in points], [p[1] for p in points], "o-", label=name)
            spent.plot([100 * p[0] for p in points], [p[2] for p in points], "o-", label=name)
    for row in rows:
        if row["policy"].endswith("exact"):
            against.axhline(row["tpot_ms"], linestyle=":", linewidth=0.8)
            against.annotate(row["policy"], (0.0, row["tpot_ms"]), fontsize=7)
    for axes, key in ((ratios, "ratio"), (nodes, "nodes")):
        swept_rows = [row for row in rows if row[key] and "," in row["policy"]]
        for name in dict.fromkeys(row["policy"].split(",")[0] for row in swept_rows):
            line = sorted(
                (row[key], row["tpot_ms"]) for row in swept_rows if row["policy"].startswith(f"{name},")
            )
            if len(line) > 1:
                axes.plot([p[0] for p in line], [p[1] for p in line], "o-", label=name)
    against.set(xlabel="rise of perplexity, %", ylabel="time per token, ms")
    spent.set(xlabel="budget, %", ylabel="rise of perplexity, %")
    ratios.set(xlabel="copies per expert", ylabel="time per token, ms")
    nodes.set(xlabel="nodes", ylabel="time per token, ms")
    for axes in (against, spent, ratios, nodes):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.savefig(path)
    return True


def draw_bars(rows: Sequence[dict[str, Any]], path: Path) -> bool:
    """Time per token and bytes of each policy, as a picture; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["policy"] for row in rows][::-1]
    for key, label in (("tpot_p95_ms", "p95"), ("tpot_p50_ms", "p50")):
        left.barh(names, [row[key] for row in rows][::-1], label=label)
    left.set(xlabel="time per token, ms")
    left.legend()
    right.barh(names, [row["mb_per_1000_tokens"] for row in rows][::-1])
    right.set(xlabel="MB per 1,000 tokens")
    figure.savefig(path)
    return True
