"""Measures what each plan makes of the same machines and links, beside what the planner predicts of it.

One machine alone, one home with its experts elsewhere, layers in 2 and in 4 stages, and what the planner chooses: the same
topology file each time, but for its plan. Starts real daemons on shaped links; a measurement is a command, never a test.
"""

import os
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_runtime.client import Client
from edge_runtime.clock import Clock
from edge_runtime.coordinator.deploy import plan_for
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from testbed.bench.clusters import RunningCluster
from testbed.foretell import SETTLE_S, WARM_UP, measure_cell, token_seconds
from topology.cluster import DECODE, Cluster
from topology.errors import TopologyError
from topology.files import read_cluster

SHAPE_VARIABLE = "EDGE_SHAPE"
CHOICE = "the planner's choice"
PORTS = 50  # between those of two plans


@dataclass(frozen=True)
class Measured:
    """One plan under so many requests: milliseconds between two tokens of one of them, medians over rounds.

    groups  where requests may live, for people; empty if the plan cannot be
    why     it cannot be
    """

    plan: str
    requests: int
    groups: str = ""
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    measured_min_ms: float = 0.0
    measured_max_ms: float = 0.0
    why: str = ""


def variants(text: str, cluster: Cluster) -> dict[str, str]:
    """Plan, for people -> the topology file with that plan.

    The one home is the first decode node that is not the roomiest: where experts are elsewhere, something has to be.
    """
    homes = [node for node in cluster.nodes if DECODE in node.roles]
    roomiest = max(homes, key=lambda node: node.memory_bytes)
    home = next((node for node in homes if node is not roomiest), roomiest)
    others = [node.name for node in cluster.nodes if node is not home]
    return {
        "solo": with_plan(text, "solo"),
        "one home": _lenders(with_plan(text, "home"), others),
        "2 stages": with_plan(text, "stages", stages=2),
        "4 stages": with_plan(text, "stages", stages=4),
        CHOICE: with_plan(text, "auto"),
    }


def with_plan(text: str, plan: str, *, stages: int | None = None) -> str:
    """A topology file with another plan."""
    text = re.sub(r"(?m)^(plan|stages)\s*=.*\n", "", text)
    lines = f'[cluster]\nplan = "{plan}"\n' + (f"stages = {stages}\n" if stages else "")
    return re.sub(r"(?m)^\[cluster\]\n", lines, text, count=1)


def _lenders(text: str, names: Sequence[str]) -> str:
    """A topology file in which these nodes run experts for others and nothing else."""
    for name in names:
        table = rf'(?ms)^(\[\[node\]\]\n(?:(?!^\[).)*?^name = "{re.escape(name)}"[^\n]*\n(?:(?!^\[).)*)'
        found = re.search(table, text)
        if found is None:
            raise TopologyError(f'no [[node]] with name = "{name}" on a line of its own')
        without = re.sub(r"(?m)^roles\s*=.*\n", "", found.group(1))
        text = text.replace(
            found.group(1), without.replace("[[node]]\n", '[[node]]\nroles = ["experts"]\n', 1), 1
        )
    return text


def on_other_ports(text: str, step: int) -> str:
    """A topology file whose addresses of this machine are `step` ports further on."""
    return re.sub(r"(127\.0\.0\.1:)(\d+)", lambda found: found[1] + str(int(found[2]) + step), text)


def measure(
    topology: Path,
    counts: Sequence[int],
    rounds: int,
    clock: Clock,
    report: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Every plan of a topology file, each under so many requests.

    All of them are up at once and are measured in turn, since the machine is never the same for long. Plans that give every
    node the same, such as the planner's choice and what it chose, are one cluster, measured once for both.
    """
    text, cluster = topology.read_text(encoding="utf-8"), read_cluster(topology)
    text = re.sub(r"(?m)^model\s*=.*$", f'model = "{cluster.model}"', text)
    os.environ[SHAPE_VARIABLE] = "1"
    impossible: dict[str, str] = {}
    with TemporaryDirectory(prefix="edge-plans-") as folder, ExitStack() as stack:
        plans: dict[str, _Plan] = {}
        for index, (name, changed) in enumerate(variants(text, cluster).items()):
            report(f"starting: {name}")
            file = Path(folder) / f"plan{index}.toml"
            file.write_text(on_other_ports(changed, PORTS * index), encoding="utf-8")
            try:
                plan = _Plan(read_cluster(file), counts)
            except TopologyError as error:
                impossible[name] = str(error)
                continue
            plans[name] = next((other for other in plans.values() if other.placement == plan.placement), plan)
            if plans[name] is not plan:
                continue
            running = stack.enter_context(RunningCluster(file, clock))
            plans[name].client = stack.enter_context(running.client())
            plans[name].client.connect()
            plans[name].pids = list(running.pids.values())
            plans[name].warm_up(clock)
        for number in range(rounds):
            report(f"round {number + 1} of {rounds}")
            for plan in dict.fromkeys(plans.values()):
                for count in counts:
                    plan.measure(count, clock)
        found = [plan.measured(name, count) for name, plan in plans.items() for count in counts]
    return found + [Measured(name, count, why=why) for name, why in impossible.items() for count in counts]


class _Plan:
    """One plan, laid out, then up and measured."""

    client: Client
    pids: Sequence[int]

    def __init__(self, cluster: Cluster, counts: Sequence[int]) -> None:
        self._cluster = cluster
        self._sizes = footprint(Checkpoint.open(cluster.model), context_tokens=cluster.context_tokens)
        self.placement = plan_for(cluster, self._sizes, cluster.node_names)
        self._cells: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}

    def warm_up(self, clock: Clock) -> None:
        """Let nodes correct what they measured by what their work takes."""
        for requests, tokens in WARM_UP:
            token_seconds(self.client, requests, tokens)
            clock.sleep(SETTLE_S / 2)

    def measure(self, count: int, clock: Clock) -> None:
        cell = measure_cell(self.client, self.pids, self._cluster, self._sizes, self.placement, count, clock)
        self._cells[count].append(cell)

    def measured(self, name: str, count: int) -> Measured:
        predicted, took, _ = zip(*self._cells[count], strict=True)
        return Measured(
            plan=name,
            requests=count,
            groups="; ".join(map(str, self.placement.groups)),
            predicted_ms=statistics.median(predicted),
            measured_ms=statistics.median(took),
            measured_min_ms=min(took),
            measured_max_ms=max(took),
        )


def table(cells: Sequence[Measured]) -> str:
    """The results in Markdown, and how the planner's choice compares with the best of the others."""
    lines = [
        "| plan | requests | measured ms (min-max) | predicted ms | predicted / measured | groups |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell.why:
            lines.append(f"| {cell.plan} | {cell.requests} | - | - | - | {cell.why[:80]} |")
            continue
        lines.append(
            f"| {cell.plan} | {cell.requests} | {cell.measured_ms:.2f} ({cell.measured_min_ms:.2f}-"
            f"{cell.measured_max_ms:.2f}) | {cell.predicted_ms:.2f} | {cell.predicted_ms / cell.measured_ms:.2f} | "
            f"{cell.groups} |"
        )
    for count in dict.fromkeys(cell.requests for cell in cells):
        at = {cell.plan: cell for cell in cells if cell.requests == count and not cell.why}
        chosen = at.pop(CHOICE, None)
        best = min(at.values(), key=lambda cell: cell.measured_ms, default=None)
        if best is None or chosen is None:
            continue
        same = next((cell.plan for cell in at.values() if cell.groups == chosen.groups), None)
        told = (
            f"{chosen.measured_ms / best.measured_ms - 1:+.0%} beside {best.plan}, the fastest of the others"
        )
        lines += ["", f"{count} requests: {CHOICE} takes {told}" + (f"; it is {same}" if same else "")]
    return "\n".join(lines)
