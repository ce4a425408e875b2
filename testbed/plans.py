"""Measures what each plan makes of the same machines and links, beside what the planner predicts of it.

One machine alone, one home with its experts elsewhere, layers in 2 and in 4 stages, and what the planner chooses: the same
topology file each time, but for its plan. Starts real daemons on shaped links; a measurement is a command, never a test.
"""

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_runtime.client import Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from testbed.bench import READY_S, RunningCluster
from topology.cluster import DECODE, Cluster
from topology.errors import TopologyError
from topology.files import read_cluster
from topology.node_plan import GroupPlan
from topology.placement import plan_placement
from topology.speeds import machines_of
from topology.step_time import GroupPrediction, PlacementClock
from topology.workload import Workload

SHAPE_VARIABLE = "EDGE_SHAPE"
TOKENS = 48
CONTEXT_TOKENS = 8 + TOKENS / 2


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
        "planner's choice": with_plan(text, "auto"),
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


def measure(
    topology: Path,
    counts: Sequence[int],
    rounds: int,
    clock: Clock,
    report: Callable[[str], None] = lambda line: None,
) -> list[Measured]:
    """Every plan of a topology file, each under so many requests."""
    text, cluster = topology.read_text(encoding="utf-8"), read_cluster(topology)
    text = re.sub(r"(?m)^model\s*=.*$", f'model = "{cluster.model}"', text)
    os.environ[SHAPE_VARIABLE] = "1"
    found: list[Measured] = []
    with TemporaryDirectory(prefix="edge-plans-") as folder:
        for name, changed in variants(text, cluster).items():
            report(name)
            file = Path(folder) / "topology.toml"
            file.write_text(changed, encoding="utf-8")
            try:
                found += _measure_plan(name, file, counts, rounds, clock)
            except TopologyError as error:
                found += [Measured(name, count, why=str(error)) for count in counts]
    return found


def _measure_plan(name: str, file: Path, counts: Sequence[int], rounds: int, clock: Clock) -> list[Measured]:
    predicted = predictions(read_cluster(file), counts)
    with RunningCluster(file, clock) as running, running.client() as client:
        client.connect()
        groups = _groups_text(client.status())
        _tpot_s(client, max(counts))
        took: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                took[count].append(_tpot_s(client, count) * 1e3)
    return [
        Measured(
            name,
            count,
            groups,
            predicted[count] * 1e3,
            statistics.median(took[count]),
            min(took[count]),
            max(took[count]),
        )
        for count in counts
    ]


def predictions(cluster: Cluster, counts: Sequence[int]) -> dict[int, float]:
    """Requests at once -> seconds between two tokens of one of them, by the file's speeds and links."""
    sizes = footprint(Checkpoint.open(cluster.model), context_tokens=cluster.context_tokens)
    placement = plan_placement(cluster, sizes)
    clock = PlacementClock(sizes, machines_of(cluster), placement)

    def predict(group: GroupPlan, batch: int) -> GroupPrediction:
        return clock.predict(group, batch, CONTEXT_TOKENS)

    return {count: Workload(batches=((count, 1.0),)).seconds(predict, placement.groups) for count in counts}


def _groups_text(body: Mapping[str, Any]) -> str:
    return "; ".join(
        ", ".join(
            f"{stage['node']} {stage['first_layer']}-{stage['last_layer']}" for stage in group["stages"]
        )
        for group in body["groups"]
    )


def _tpot_s(client: Client, requests: int) -> float:
    """Seconds between two tokens at the homes, on average over `requests` answers at once."""
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    prompts = [Prompt(prompt=f"Chapter {number}:", sampling=sampling) for number in range(requests)]
    answers = client.run(prompts, wait_ready_s=READY_S)
    for answer in answers:
        error: EdgeError | None = answer.error()
        if error is not None:
            raise error
    return statistics.fmean(answer.finished.timing.tpot_s for answer in answers if answer.finished)


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
    *fixed, _ = dict.fromkeys(cell.plan for cell in cells)
    for count in dict.fromkeys(cell.requests for cell in cells):
        at = {cell.plan: cell for cell in cells if cell.requests == count and not cell.why}
        best = min(
            (at[plan] for plan in fixed if plan in at), key=lambda cell: cell.measured_ms, default=None
        )
        chosen = next((cell for plan, cell in at.items() if plan not in fixed), None)
        if best is not None and chosen is not None:
            share = chosen.measured_ms / best.measured_ms - 1
            lines.append(
                f"\n{count} requests: the planner's choice takes {share:+.0%} of {best.plan}, the best of the others"
            )
    return "\n".join(lines)
