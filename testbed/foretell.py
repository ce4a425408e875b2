"""Holds what the planner predicts against what a cluster does: the time between two tokens, under so many requests at once.

Starts real daemons, lets a few answers pass so that nodes correct what they measured, and then asks for predictions before
each measurement. Prompts are of many domains, since rows of one batch that go on alike would choose the same experts. All
processes share this machine's processors, also with whatever else runs here: how busy that is is measured during every cell,
as the sessions of others that want a processor, and told to the prediction.
"""

import contextlib
import json
import os
import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from edge_runtime.client import Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.coordinator.deploy import plan_for
from edge_runtime.errors import ClusterError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from testbed.bench.clusters import RunningCluster
from testbed.carried import PROMPTS
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.node_plan import Placement
from topology.serving import predict_serving
from topology.speeds import LinkSpeed, Machines, NodeSpeed, machines_of

READY_S = 120.0
PROBE_S = 0.05
WARM_UP = ((2, 48), (6, 32), (2, 48))  # requests at once, tokens of each: not the counts that are measured
TOKENS = 64
CELL_S = 1.5  # of answers at least: a neighbour's turn on a processor lasts some milliseconds
SETTLE_S = 2.5  # heartbeats tell what nodes have seen
PROMPT_TOKENS = 25  # of the prompts, on average
CONTEXT_TOKENS = PROMPT_TOKENS + TOKENS / 2


@dataclass(frozen=True)
class Foretold:
    """One cluster under so many requests: medians over rounds, with the lowest and highest measured; milliseconds."""

    cluster: str
    requests: int
    rounds: int
    predicted_ms: float
    measured_ms: float
    measured_min_ms: float
    measured_max_ms: float
    busy: float
    """Sessions of others that wanted a processor meanwhile."""
    ratios: tuple[float, ...]
    """Predicted over measured, by round."""

    @property
    def ratio(self) -> float:
        """Predicted over measured: the median of the rounds."""
        return statistics.median(self.ratios)


class BusyProbe(threading.Thread):
    """Counts, while it runs, how many sessions other than ours want a processor: the kernel shares out by session."""

    def __init__(self, own_pids: Sequence[int]) -> None:
        super().__init__(name="busy-probe", daemon=True)
        self._own = frozenset(os.getsid(pid) for pid in (*own_pids, os.getpid()))
        self._stopping = threading.Event()
        self._counts: list[int] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.join()

    def run(self) -> None:
        while not self._stopping.wait(PROBE_S):
            self._counts.append(len(running_sessions() - self._own))

    @property
    def busy(self) -> float:
        """Sessions of others that want a processor, as a mean."""
        return statistics.fmean(self._counts) if self._counts else 0.0


def running_sessions() -> set[int]:
    """Sessions of this machine with a process that runs or could."""
    found = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                if fields[0] == "R":
                    found.add(int(fields[3]))
    return found


def measured_machines(cluster: Cluster, body: dict[str, Any], busy: float) -> Machines:
    """What `status` says of the nodes' speeds, for the planner."""
    speeds, cores = {}, {}
    for node in body["nodes"]:
        found = node["speed"]
        if found["measured"] is not None:
            speeds[node["name"]] = msgspec.convert(found["measured"], NodeSpeed)
        if found["cores"]:
            cores[node["name"]] = found["cores"]
    links = {
        (link["between"][0], link["between"][1]): msgspec.convert(link["measured"], LinkSpeed)
        for link in body["links"]
    }
    missing = sorted(set(cluster.node_names) - speeds.keys())
    if missing:
        raise ClusterError(f"{', '.join(missing)} has not told its speed")
    return machines_of(cluster, speeds, links, cores, busy)


def foretell(topology: Path, counts: Sequence[int], rounds: int, clock: Clock) -> list[Foretold]:
    """Predictions and measurements of one topology file, for each number of requests in turn, `rounds` times."""
    with RunningCluster(topology, clock) as running, running.client() as client:
        client.connect()
        cluster = running.cluster
        sizes = footprint(Checkpoint.open(cluster.model), context_tokens=cluster.context_tokens)
        placement = plan_for(cluster, sizes, cluster.node_names)
        for requests, tokens in WARM_UP:
            token_seconds(client, requests, tokens)
            clock.sleep(SETTLE_S / 2)
        found: dict[int, list[tuple[float, float, float]]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                found[count].append(
                    measure_cell(client, list(running.pids.values()), cluster, sizes, placement, count, clock)
                )
    return [_summary(cluster.name, count, cells) for count, cells in found.items()]


def measure_cell(
    client: Client,
    pids: Sequence[int],
    cluster: Cluster,
    sizes: ModelFootprint,
    placement: Placement,
    count: int,
    clock: Clock,
) -> tuple[float, float, float]:
    """Predicted and measured milliseconds, and how busy others kept the machine."""
    body = client.status()
    took_s: list[float] = []
    until = clock.now() + CELL_S
    with BusyProbe(pids) as probe:
        while not took_s or clock.now() < until:
            took_s.append(token_seconds(client, count, TOKENS, first=count * len(took_s)))
    took = statistics.fmean(took_s)
    machines = measured_machines(cluster, body, probe.busy)
    [predicted] = predict_serving(sizes, machines, placement, (count,), context_tokens=CONTEXT_TOKENS)
    clock.sleep(SETTLE_S / 2)
    return predicted.seconds * 1e3, took * 1e3, probe.busy


@cache
def domain_prompts() -> tuple[str, ...]:
    """Of sixteen languages and formats."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line)["prompt"] for line in lines)


def token_seconds(client: Client, requests: int, tokens: int, first: int = 0) -> float:
    """Seconds between two tokens at the homes, on average over `requests` answers at once, to the prompts from `first` on."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    texts = domain_prompts()
    asked = [
        Prompt(prompt=texts[(first + number) % len(texts)], sampling=sampling) for number in range(requests)
    ]
    answers = client.run(asked, wait_ready_s=READY_S)
    for answer in answers:
        if (error := answer.error()) is not None:
            raise error
    return statistics.fmean(answer.finished.timing.tpot_s for answer in answers if answer.finished)


def _summary(cluster: str, count: int, cells: Sequence[tuple[float, float, float]]) -> Foretold:
    predicted, measured, busy = zip(*cells, strict=True)
    return Foretold(
        cluster=cluster,
        requests=count,
        rounds=len(cells),
        predicted_ms=statistics.median(predicted),
        measured_ms=statistics.median(measured),
        measured_min_ms=min(measured),
        measured_max_ms=max(measured),
        busy=statistics.fmean(busy),
        ratios=tuple(one / other for one, other in zip(predicted, measured, strict=True)),
    )


def table(cells: Sequence[Foretold], *, has_head: bool = True) -> str:
    """The results in Markdown, or further lines of such a table."""
    head = [
        "| cluster | requests | predicted ms | measured ms (min-max) | predicted / measured | by round | others |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = [
        f"| {cell.cluster} | {cell.requests} | {cell.predicted_ms:.2f} | {cell.measured_ms:.2f} "
        f"({cell.measured_min_ms:.2f}-{cell.measured_max_ms:.2f}) | {cell.ratio:.2f} | "
        f"{' '.join(f'{ratio:.2f}' for ratio in cell.ratios)} | {cell.busy:.1f} |"
        for cell in cells
    ]
    return "\n".join([*head, *lines] if has_head else lines)
