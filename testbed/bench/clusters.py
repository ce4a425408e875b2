"""Measures a cluster as its users see it: tokens per second, first token, time per token, messages and bytes.

Starts real daemons, drives them through the client, and reads the nodes' own counters for where a step's time goes.
Knows nothing of how they work. A benchmark is a command, never a test.
"""

import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_runtime import launch
from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.config import STATE_VARIABLE
from edge_runtime.errors import ClusterError
from edge_runtime.protocol import Tokens
from edge_runtime.transport.keys import load_keys
from topology.cluster import Cluster
from topology.files import read_cluster

READY_S = 120.0
ENDED_S = 10.0
SETTLE_S = 5.0
STEP_PARTS = (
    ("plan", "step_plan"),
    ("rows", "step_rows"),
    ("attention", "step_attention"),
    ("own experts", "experts_local"),
    ("sending", "experts_send"),
    ("waiting", "experts_wait"),
    ("head", "step_head"),
    ("sampling", "step_sample"),
)


@dataclass(frozen=True)
class Measured:
    """One cell: a cluster under so many streams. Medians over rounds, with the lowest and highest where it matters."""

    cluster: str
    nodes: int
    streams: int
    rounds: int
    tokens_per_s: float
    tokens_per_s_min: float
    tokens_per_s_max: float
    ttft_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float
    messages_per_token: float
    bytes_per_token: float
    layer_us: dict[str, float]
    """Microseconds of a step by part, per layer of the model and step, summed over homes and divided by steps."""
    rest_us: dict[str, float]
    """Microseconds of a step outside the layers."""


class RunningCluster:
    """A topology file's daemons, up for as long as the `with` block lasts."""

    def __init__(self, topology: Path, clock: Clock, ready_s: float = READY_S) -> None:
        self._ready_s = ready_s
        self.cluster: Cluster = read_cluster(topology)
        self._topology = topology.absolute()
        self._clock = clock
        self._folder = TemporaryDirectory(prefix="edge-bench-")
        self.pids: dict[str, int] = {}
        self._local = launch.LocalCluster(Path(self._folder.name), {})

    def __enter__(self) -> "RunningCluster":
        os.environ[STATE_VARIABLE] = self._folder.name
        local = launch.start_local(self.cluster, self._topology)
        self._local = local
        self.pids = {name: process.pid for name, process in local.processes.items()}
        try:
            launch.wait_ready(
                local, self.client, self._clock, self._ready_s, lambda line: print(line, file=sys.stderr)
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.environ[STATE_VARIABLE] = self._folder.name  # another cluster may have been started meanwhile
        launch.stop_local(self._topology, self._clock)
        for process in self._local.processes.values():
            process.wait(ENDED_S)  # they are stopped: only their exit codes are fetched
        self._folder.cleanup()

    def client(self) -> Client:
        """A client that is not connected yet."""
        folder = self.cluster.keys
        keys = load_keys(Path(folder), "client") if folder else None
        return Client(self.cluster.coordinator, keys, self._clock)


def measure(
    running: RunningCluster, prompts: Sequence[str], streams: int, max_tokens: int, rounds: int, clock: Clock
) -> Measured:
    """Run `streams` requests of `max_tokens` tokens at once, `rounds` times. The first round warms up, uncounted."""
    rates, ttfts, gaps = [], [], []
    with running.client() as client:
        client.connect()
        _round(client, prompts, streams, max_tokens, clock)
        before = settled(client, clock)
        for _ in range(rounds):
            rate, first, between = _round(client, prompts, streams, max_tokens, clock)
            rates.append(rate)
            ttfts += first
            gaps += between
        after = settled(client, clock)
    counted = difference(before, after)
    tokens = counted["tokens_generated"]
    steps = max(counted["step_steps"], 1.0)
    num_layers = _num_layers(running.cluster)
    inside = {"attention", "own experts", "sending", "waiting"}
    parts = {label: counted[name] / steps * 1e6 for label, name in STEP_PARTS}
    return Measured(
        cluster=running.cluster.name,
        nodes=len(running.cluster.nodes),
        streams=streams,
        rounds=rounds,
        tokens_per_s=statistics.median(rates),
        tokens_per_s_min=min(rates),
        tokens_per_s_max=max(rates),
        ttft_ms=statistics.median(ttfts) * 1e3,
        tpot_p50_ms=_percentile(gaps, 0.50) * 1e3,
        tpot_p95_ms=_percentile(gaps, 0.95) * 1e3,
        messages_per_token=2 * counted["calls_made"] / tokens,
        bytes_per_token=(counted["bytes_out"] + counted["bytes_in"]) / tokens,
        layer_us={label: part / num_layers for label, part in parts.items() if label in inside},
        rest_us={label: part for label, part in parts.items() if label not in inside},
    )


def _round(
    client: Client, prompts: Sequence[str], streams: int, max_tokens: int, clock: Clock
) -> tuple[float, list[float], list[float]]:
    """One round: generated tokens per second after the first ones, first-token times, gaps between tokens."""
    arrivals: dict[str, list[float]] = {}

    def note(answer: Answer, tokens: Tokens) -> None:
        if tokens.token_ids:
            arrivals.setdefault(answer.request_id, []).append(clock.now())

    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    asked = [Prompt(prompt=prompts[index % len(prompts)], sampling=sampling) for index in range(streams)]
    answers = client.run(asked, wait_ready_s=READY_S, on_tokens=note)
    for answer in answers:
        if (error := answer.error()) is not None:
            raise error
    first = [answer.first_token_s - answer.sent_s for answer in answers if answer.first_token_s is not None]
    began = min(moments[0] for moments in arrivals.values())
    ended = max(moments[-1] for moments in arrivals.values())
    num_tokens = sum(len(answer.token_ids) for answer in answers) - len(answers)
    gaps = [later - sooner for moments in arrivals.values() for sooner, later in pairwise(moments)]
    return num_tokens / (ended - began), first, gaps


def settled(client: Client, clock: Clock) -> dict[str, float]:
    """The nodes' counters, summed, once their heartbeats have caught up with an idle cluster."""
    deadline = clock.now() + SETTLE_S
    last: dict[str, float] | None = None
    while clock.now() < deadline:
        clock.sleep(1.1)
        totals = _totals(client.status())
        if last == totals:
            return totals
        last = totals
    if last is None:
        raise ClusterError(f"no heartbeat came within {SETTLE_S:.0f} s")
    return last


def _totals(body: dict[str, Any]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for node in body["nodes"]:
        report = dict(node["report"])
        numbers = dict(report.pop("numbers", {}))
        numbers.pop("processor_s", None)  # of an idle node it grows too
        for name, value in (numbers | {"tokens_generated": report["tokens_generated"]}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _num_layers(cluster: Cluster) -> int:
    config = json.loads((Path(cluster.model) / "config.json").read_text())
    return int(config["num_hidden_layers"])


def _percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(cells: Sequence[Measured]) -> str:
    """The results in Markdown."""
    lines = [
        "| cluster | nodes | streams | tok/s (min-max) | TTFT ms | TPOT p50 ms | p95 ms | messages/token | bytes/token |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        lines.append(
            f"| {cell.cluster} | {cell.nodes} | {cell.streams} | {cell.tokens_per_s:.0f} "
            f"({cell.tokens_per_s_min:.0f}-{cell.tokens_per_s_max:.0f}) | {cell.ttft_ms:.1f} | {cell.tpot_p50_ms:.2f} | "
            f"{cell.tpot_p95_ms:.2f} | {cell.messages_per_token:.1f} | {cell.bytes_per_token:.0f} |"
        )
    lines += ["", "Microseconds of a home's step (parts named per layer are per layer):", ""]
    layer_names, rest_names = list(cells[0].layer_us), list(cells[0].rest_us)
    lines.append(
        "| cluster | streams | " + " | ".join([f"{n} / layer" for n in layer_names] + rest_names) + " |"
    )
    lines.append("|---" * (2 + len(layer_names) + len(rest_names)) + "|")
    for cell in cells:
        numbers = [f"{value:.0f}" for value in (*cell.layer_us.values(), *cell.rest_us.values())]
        lines.append(f"| {cell.cluster} | {cell.streams} | " + " | ".join(numbers) + " |")
    return "\n".join(lines)


def as_json(cells: Sequence[Measured]) -> list[dict[str, Any]]:
    """Plain values of everything measured."""
    return [asdict(cell) for cell in cells]
