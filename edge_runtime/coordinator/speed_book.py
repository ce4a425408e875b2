"""What is known of each node's speed: what it measured, corrected by the processor time that its work really takes.

A node tries its share when it loads it. While it serves, its heartbeats count steps, rows, calls and processor seconds; what
the trial promised for them against what they took says how much slower its arithmetic is beside its other threads, and what
each step, each call that it makes and each that it answers costs on top: least squares over the heartbeats, older ones
fading. What heartbeats do not tell apart is off by the same factor. What the control thread takes to hand out tokens is
apart from all that: it runs beside the next step. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from edge_runtime.protocol import NodeReport
from topology.costs import ModelFootprint
from topology.node_plan import NodePlan, Placement
from topology.speeds import LinkSpeed, Measured, NodeSpeed, slower
from topology.step_time import operations

ENOUGH_S = 0.03  # of promised work between two looks, to correct a speed by
FADE = 0.9  # what a heartbeat counts for after the next one that brought enough
PRIOR_WEIGHT = 0.01  # heartbeats that the trial itself counts for
ALIKE_WEIGHT = 0.02  # and that its proportions count for: a heartbeat errs by 10 %, proportions by some 70 %
STEP_EXTRA_S = 100e-6  # beside a node's other threads, where nothing was seen yet. Measured: 125 us that no part of a step has
SERVE_TIMES = (
    2.5  # an expert call at its peer, in echoes: tensors to check, experts to find. Measured: 2.3 to 2.7
)
LEAST, MOST = 0.5, 6.0  # times what is believed
# Of a home's control thread for handing out what a step brought, and each token of it: text, message. Measured: 320 us for one
# token, 440 for four, 1,100 for sixteen.
HAND_OUT_STEP_S, HAND_OUT_TOKEN_S = 260e-6, 50e-6

COUNTERS = (
    "step_steps",
    "step_rows_computed",
    "step_attended_tokens",
    "calls_made",
    "pairs_sent",
    "pairs_served",
    "processor_s",
    "control_s",
)


class Costs(NamedTuple):
    """What a node's work takes: times its trial's arithmetic; processor seconds of a step, of a call made, of one answered;
    and times what handing out tokens is believed to take."""

    factor: float
    step_s: float
    call_s: float
    serve_s: float
    hand_out: float = 1.0


class Observed(msgspec.Struct, frozen=True):
    """One process of a node.

    costs    fitted; None before anything was seen
    counted  its counters when it was last looked at
    matrix, aim  sums of the least squares over heartbeats, in units of what is believed
    handed_out  seconds of the control thread, and what is believed of them, over heartbeats
    """

    pid: int = 0
    costs: Costs | None = None
    counted: dict[str, float] = {}
    matrix: tuple[tuple[float, ...], ...] = ((0.0,) * 4,) * 4
    aim: tuple[float, ...] = (0.0,) * 4
    handed_out: tuple[float, float] = (0.0, 0.0)


def believed_of(speed: NodeSpeed) -> Costs:
    """Before anything was seen of a node that found this speed in its trial."""
    call_s = max(speed.call_work_s, 1e-6)
    return Costs(1.0, STEP_EXTRA_S, call_s, max(SERVE_TIMES * speed.serve_work_s, 1e-6))


def counters_of(report: NodeReport) -> dict[str, float]:
    """What is followed."""
    found = {name: report.numbers.get(name, 0.0) for name in COUNTERS}
    return found | {"calls_served": float(report.calls_served), "tokens": float(report.tokens_generated)}


def promised_s(
    done: Mapping[str, float], speed: NodeSpeed, footprint: ModelFootprint, plan: NodePlan | None
) -> float:
    """Processor seconds of arithmetic that a node's trial promises for what it did. done: counters' growth."""
    layers = range(plan.first_layer, plan.last_layer) if plan is not None else range(0)
    steps, rows = done["step_steps"], done["step_rows_computed"]
    total = done["calls_made"] * speed.send_overhead_s
    trunk_bytes = sum(footprint.layer_bytes[layer] for layer in layers)
    total += steps * (
        speed.step_overhead_s + len(layers) * speed.layer_overhead_s + trunk_bytes / speed.memory_bytes_per_s
    )
    total += rows * operations(footprint, trunk_bytes) / speed.flops
    total += done["tokens"] * speed.row_overhead_s
    kv_bytes = sum(footprint.kv_bytes_per_token[layer] for layer in layers)
    total += done["step_attended_tokens"] * kv_bytes / speed.attended_bytes_per_s
    if layers and layers[-1] + 1 == footprint.num_layers:
        head_bytes = footprint.head_bytes + (footprint.embed_bytes if footprint.head_is_tied else 0)
        total += steps * head_bytes / speed.memory_bytes_per_s
        total += done["tokens"] * operations(footprint, head_bytes) / speed.flops
    moe_layers = sum(layer in layers for layer in footprint.moe_layers)
    own_pairs = max(0.0, rows * moe_layers * footprint.top_k - done["pairs_sent"])
    weight_format = plan.weight_format if plan is not None else "as_stored"
    total += _experts_s(own_pairs, steps * moe_layers, speed, footprint, weight_format)
    return total + _experts_s(done["pairs_served"], done["calls_served"], speed, footprint, weight_format)


def _experts_s(
    pairs: float, calls: float, speed: NodeSpeed, footprint: ModelFootprint, weight_format: str
) -> float:
    """Of kernel calls that have so many pairs of row and expert altogether."""
    sizes = [size for size in footprint.expert_bytes[weight_format] if size]
    if not pairs or not calls or not sizes:
        return 0.0
    experts, size = speed.experts, sum(sizes) / len(sizes)
    stored = [found for found in footprint.expert_bytes["as_stored"] if found]
    E = footprint.experts_per_layer
    touched = calls * E * (1 - (1 - 1 / E) ** (pairs / calls))
    work = pairs * operations(footprint, sum(stored) / len(stored))
    if experts is None:
        return touched * size / speed.memory_bytes_per_s + work / speed.flops
    return calls * experts.overhead_s + touched * size / experts.bytes_per_s + work / experts.flops


def look(
    before: Observed, pid: int, report: NodeReport, footprint: ModelFootprint, plan: NodePlan | None
) -> Observed:
    """Take in a heartbeat of the process `pid`; plan: what it holds."""
    counted = counters_of(report)
    if before.pid != pid or not before.counted:
        return Observed(pid, None, counted)
    done = {name: value - before.counted.get(name, 0.0) for name, value in counted.items()}
    if report.speed is None or not footprint.top_k or min(done.values()) < 0:  # another engine counts anew
        return msgspec.structs.replace(before, counted=counted)
    believed = believed_of(report.speed)
    row = (
        promised_s(done, report.speed, footprint, plan),
        done["step_steps"] * believed.step_s,
        done["calls_made"] * believed.call_s,
        done["calls_served"] * believed.serve_s,
    )
    took_s = done["processor_s"] - done["control_s"]
    # An idle process takes a little too, and what is not counted (a later stage's steps) is not promised.
    if not ENOUGH_S <= sum(row) <= took_s / LEAST or took_s > MOST * sum(row):
        return msgspec.structs.replace(before, counted=counted)
    shares = [part / took_s for part in row]  # errors count by their share
    matrix = tuple(
        tuple(FADE * old + a * b for old, b in zip(line, shares, strict=True))
        for line, a in zip(before.matrix, shares, strict=True)
    )
    aim = tuple(FADE * old + part for old, part in zip(before.aim, shares, strict=True))
    handed_out = (
        FADE * before.handed_out[0] + done["control_s"],
        FADE * before.handed_out[1]
        + done["step_steps"] * HAND_OUT_STEP_S
        + done["tokens"] * HAND_OUT_TOKEN_S,
    )
    count = len(row)
    together = np.full((count, count), 1 / count)
    pull = PRIOR_WEIGHT * together + ALIKE_WEIGHT * (np.eye(count) - together)
    times = np.linalg.solve(np.array(matrix) + pull, np.array(aim) + pull.sum(axis=0))
    found = [float(value) for value in np.clip(times, LEAST, MOST) * np.array(believed[:count])]
    hand_out = handed_out[0] / handed_out[1] if handed_out[1] else 1.0
    costs = Costs(*found)._replace(hand_out=min(max(hand_out, LEAST), MOST))
    return Observed(pid, costs, counted, matrix, aim, handed_out)


def corrected(speed: NodeSpeed, costs: Costs | None) -> NodeSpeed:
    """What a node measured of itself, as its work has turned out.

    Who waits for a call that it answers waits for its work on it, and for what an echo takes beyond the work of both ends.
    """
    costs = costs or believed_of(speed)
    slowed = slower(speed, costs.factor)
    idle_s = max(0.0, speed.call_overhead_s - speed.call_work_s - speed.serve_work_s)
    return replace(
        slowed,
        step_overhead_s=slowed.step_overhead_s + costs.step_s,
        hand_out_step_s=costs.hand_out * HAND_OUT_STEP_S,
        hand_out_token_s=costs.hand_out * HAND_OUT_TOKEN_S,
        call_work_s=costs.call_s,
        serve_work_s=costs.serve_s,
        call_overhead_s=idle_s + costs.serve_s,
    )


def measured_of(
    reports: Mapping[str, NodeReport], observed: Mapping[str, Observed], names: Iterable[str]
) -> Measured:
    """What is known of the nodes of these names."""
    speeds, cores = {}, {}
    found: dict[tuple[str, str], list[LinkSpeed]] = {}
    for name in names:
        report = reports.get(name)
        if report is None:
            continue
        if report.speed is not None:
            speeds[name] = corrected(report.speed, observed.get(name, Observed()).costs)
        if report.cores:
            cores[name] = report.cores
        for peer, link in report.links.items():
            found.setdefault((min(name, peer), max(name, peer)), []).append(link)
    links = {pair: _of_both_ends(both) for pair, both in found.items()}
    return Measured(speeds, links, cores)


def _of_both_ends(both: Sequence[LinkSpeed]) -> LinkSpeed:
    """One link as its ends see it: means, but a rate that was seen wins over a bound, and of bounds the highest."""
    rates = [link.bandwidth_bps for link in both if not link.rate_is_bound]
    return LinkSpeed(
        rtt_s=sum(link.rtt_s for link in both) / len(both),
        bandwidth_bps=sum(rates) / len(rates) if rates else max(link.bandwidth_bps for link in both),
        rate_is_bound=not rates,
    )


def plan_of(placement: Placement, name: str) -> NodePlan | None:
    """A node's share, None if it has none."""
    return next((plan for plan in placement.nodes if plan.node == name), None)
