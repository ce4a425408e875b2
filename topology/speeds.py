"""How fast nodes and links are: measured, else as the topology file says, else typical. And a fit from measurements.

Knows no model: a measurement is bytes, operations, counts and seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topology.cluster import Cluster, Link, find_node, split_address

BYTE_BITS = 8
# Of client and coordinator for handing on what a home's step brought. Measured: 270 us where that is one token, 440 where
# it is four, which come in one message.
READ_STEP_S, READ_TOKEN_S = 215e-6, 55e-6


@dataclass(frozen=True, kw_only=True)
class ExpertSpeed:
    """What one call of a node's own experts is made of, in the format in which it holds them."""

    bytes_per_s: float
    """Bytes of touched experts per second."""
    flops: float
    """Floating-point operations per second."""
    overhead_s: float
    """Seconds of a layer's call that neither experts nor rows change."""

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class NodeSpeed:
    """What a node's time is made of. The defaults are one thread of a desktop CPU, for where nothing is measured.

    A step's seconds are taken as a sum, bytes / bandwidth + operations / flops + overheads: memory and arithmetic are
    not assumed to overlap, which overstates a step by at most two and keeps the fit linear.
    """

    memory_bytes_per_s: float = 8e9
    """Bytes of weights read per second. Measured on a 2-core x86: 8.5-9.3 GB/s read, 7-12.6 copied."""
    flops: float = 60e9
    """Floating-point operations per second. Measured there at 16 rows: 40 GFLOP/s in float32, 65 native bfloat16."""
    attended_bytes_per_s: float = 5e9
    """Bytes of KV that attention goes through per second, row by row. It computes with them, so it is slower than reading:
    measured 4.7 GB/s where weights come at 20."""
    step_overhead_s: float = 300e-6
    """Seconds of a step that neither batch nor layers change: scheduling, sampling, handing out tokens. Measured on the
    demo model: 50 for the plan, 150 for the rows, 120 for sampling, in us."""
    layer_overhead_s: float = 100e-6
    """Seconds of a layer that the batch does not change. Measured on the demo model: 176 us of attention at batch 1, of
    which 83 are bytes."""
    call_overhead_s: float = 50e-6
    """Seconds that an expert call waits for this node beyond wire and arithmetic. Measured there: 42 us per further peer."""
    send_overhead_s: float = 50e-6
    """Seconds that a home takes to lay out one call."""
    row_overhead_s: float = 0.0
    """Seconds of a step that each row whose token is chosen adds besides its arithmetic: tables, sampling. Measured: 45 us,
    where the rows of a prompt take 10."""
    hand_out_step_s: float = 0.0
    """Processor seconds in which a home hands out what a step brought: text, messages. Another thread does it while the next
    step runs, so a step waits for it only where no processor is free. Measured: 260 us for a step and 50 for a token."""
    hand_out_token_s: float = 0.0
    """The same for each token."""
    call_work_s: float = 0.0
    """Processor seconds of a call at the home that makes it, beyond laying it out: sending, and taking in the reply. One
    after another for the peers of a layer. 0 where nobody measured."""
    serve_work_s: float = 0.0
    """Processor seconds of a call at the node that answers it, beyond arithmetic."""
    experts: ExpertSpeed | None = None
    """Of its experts, where measured; else they are as fast as the trunk."""

    def __post_init__(self) -> None:
        _require_positive(self)


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """What it takes to get from one node to another. The defaults are those of `Link`."""

    rtt_s: float = Link.rtt_s
    """Round-trip time of a small message, seconds."""
    bandwidth_bps: float = Link.bandwidth_bps
    """Bits per second, each way."""
    rate_is_bound: bool = False
    """It is measured, and messages take no longer than without a link: its rate is at least that."""

    def __post_init__(self) -> None:
        _require_positive(self)

    def transfer_s(self, num_bytes: float) -> float:
        """Seconds that `num_bytes` occupy the link, without the way."""
        return num_bytes * BYTE_BITS / self.bandwidth_bps


def _require_positive(speed: object) -> None:
    """Refuse what no clock measures: rates above 0, seconds from 0, all finite."""
    for entry in fields(speed):  # type: ignore[arg-type]
        value = getattr(speed, entry.name)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and not (
                0 <= value < float("inf")
                and (value or (entry.name.endswith("_s") and "per_s" not in entry.name))
            )
        ):
            raise ValueError(f"{entry.name} is {value}, expected a positive number")


@dataclass(frozen=True)
class Machines:
    """The speeds of a cluster's nodes and links as the planner takes them: see `machines_of`."""

    speeds: Mapping[str, NodeSpeed]
    links: Mapping[frozenset[str], LinkSpeed] = field(default_factory=dict)
    """Pair of nodes -> their link, where it differs from `default_link`."""
    default_link: LinkSpeed = field(default_factory=LinkSpeed)
    formats: Mapping[str, str] = field(default_factory=dict)
    """Node -> the weight format of its experts, `as_stored` if it is not there."""
    trunk_formats: Mapping[str, str] = field(default_factory=dict)
    """The same of its trunk."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """Node -> the machine that it is on, itself if it is not there."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """Machine -> its processors; one that is not there has one for whoever wants it."""
    busy: float = 0.0
    """Processes of others that want a processor of each machine all the time, as a mean."""
    reader: str = ""
    """Machine of the coordinator, where every step's tokens are handed on; empty if not known."""
    read_step_s: float = 0.0
    """Processor seconds there for a step of a home, and ..."""
    read_token_s: float = 0.0
    """... for each of its tokens."""

    def host(self, node: str) -> str:
        return self.hosts.get(node, node)

    def speed(self, node: str) -> NodeSpeed:
        return self.speeds[node]

    def link(self, a: str, b: str) -> LinkSpeed:
        return self.links.get(frozenset((a, b)), self.default_link)

    def weight_format(self, node: str) -> str:
        return self.formats.get(node, "as_stored")

    def trunk_format(self, node: str) -> str:
        return self.trunk_formats.get(node, "as_stored")


@dataclass(frozen=True)
class Measured:
    """What is measured of a cluster."""

    speeds: Mapping[str, NodeSpeed] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkSpeed] = field(default_factory=dict)
    """Pair of nodes, in either order -> their link."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """Node -> processors of its machine."""


NOTHING_MEASURED = Measured()


def declared_speed(cluster: Cluster, node: str) -> NodeSpeed:
    """What the topology file says of a node, typical figures for the rest; more threads compute faster."""
    found = find_node(cluster, node)
    memory = found.memory_bytes_per_s or NodeSpeed.memory_bytes_per_s
    return NodeSpeed(
        memory_bytes_per_s=memory,
        attended_bytes_per_s=memory * (NodeSpeed.attended_bytes_per_s / NodeSpeed.memory_bytes_per_s),
        flops=found.flops or NodeSpeed.flops * found.threads,
    )


def machines_of(
    cluster: Cluster,
    speeds: Mapping[str, NodeSpeed] | None = None,
    links: Mapping[tuple[str, str], LinkSpeed] | None = None,
    cores: Mapping[str, float] | None = None,
    busy: float = 0.0,
) -> Machines:
    """A cluster's speeds: measured before declared before typical.

    speeds  node -> measured, for those that were
    links   pair of nodes, in either order -> measured
    cores   node -> processors of its machine; nodes at addresses of one host share them
    busy    see `Machines`
    """
    declared = {
        frozenset((link.a, link.b)): LinkSpeed(rtt_s=link.rtt_s, bandwidth_bps=link.bandwidth_bps)
        for link in cluster.links
    }
    default = cluster.default_link
    measured = {}
    for pair, link in (links or {}).items():
        said = declared.get(frozenset(pair), default)
        if link.rate_is_bound:  # what the file says may be right, as far as it is not below that
            link = replace(link, bandwidth_bps=max(link.bandwidth_bps, said.bandwidth_bps))
        measured[frozenset(pair)] = link
    return Machines(
        speeds={
            name: (speeds or {}).get(name) or declared_speed(cluster, name) for name in cluster.node_names
        },
        links={**declared, **measured},
        default_link=LinkSpeed(rtt_s=default.rtt_s, bandwidth_bps=default.bandwidth_bps),
        formats={node.name: node.weight_format for node in cluster.nodes},
        trunk_formats={node.name: node.trunk_format for node in cluster.nodes},
        hosts={node.name: node.host for node in cluster.nodes},
        cores={node.host: cores[node.name] for node in cluster.nodes if cores and node.name in cores},
        busy=busy,
        reader=split_address(cluster.coordinator)[0],
        read_step_s=READ_STEP_S,
        read_token_s=READ_TOKEN_S,
    )


class SpeedSample(NamedTuple):
    """One measurement on one node: what was done, and how long it took.

    touched_bytes  weights read
    operations     floating-point operations: rows times what one row takes, see `step_time.operations`
    seconds        how long it took
    steps, layers, calls  how many whole steps, layers and expert calls it contains: each has an overhead of its own
    attended_bytes  KV that attention went through
    """

    touched_bytes: float
    operations: float
    seconds: float
    steps: int = 0
    layers: int = 0
    calls: int = 0
    attended_bytes: float = 0.0


FIT_ROUNDS = 8  # of reweighting; the fit stands still after 3 to 5
OUTLIER = 0.25  # relative error from which a sample counts less: a neighbour disturbed it
LEAST_SECONDS = 1e-7  # what no clock measures tells nothing
LEAST_SHARE = 1e-3  # a fitted cost is never below this share of the prior's: no node is infinitely fast


def fit_speed(
    samples: Sequence[SpeedSample], *, prior: NodeSpeed | None = None, prior_weight: float = 2e-3
) -> NodeSpeed:
    """The speed that explains the samples best, in the sense of least squares of the relative error.

    prior         what is believed without samples; what they do not determine stays there
    prior_weight  how many samples the prior counts for: little, it only fills in what they leave open

    Costs are never negative, and samples far off the fit count less (Huber's weights), so that one disturbed
    measurement changes little. Without samples the prior comes back.
    """
    prior = prior or NodeSpeed()
    usable = [sample for sample in samples if sample.seconds >= LEAST_SECONDS]
    if not usable:
        return prior
    believed = np.array(_costs(prior))
    # x = cost / believed cost: the columns are alike in size, and the prior is a vector of ones.
    rows = np.array(
        [(s.touched_bytes, s.operations, s.steps, s.layers, s.calls, s.attended_bytes) for s in usable],
        dtype=float,
    )
    rows = rows * believed / np.array([s.seconds for s in usable])[:, None]
    weights = np.ones(len(usable))
    shares = np.ones(len(believed))
    for _ in range(FIT_ROUNDS):
        # A cost that turns out far above the prior's is not held back by the distance: only ratios count.
        pull = np.diag(prior_weight / np.maximum(1.0, shares) ** 2)
        matrix = rows.T @ (rows * weights[:, None]) + pull
        aim = rows.T @ weights + pull.sum(axis=0)
        shares = _bounded_minimum(matrix, aim, LEAST_SHARE)
        errors = np.abs(rows @ shares - 1)
        weights = np.minimum(1.0, OUTLIER / np.maximum(errors, 1e-12))
    return _from_costs(believed * shares)


def _costs(speed: NodeSpeed) -> tuple[float, ...]:
    """Seconds per byte, per operation, per step, per layer, per call, per byte that is attended to."""
    return (
        1 / speed.memory_bytes_per_s,
        1 / speed.flops,
        max(speed.step_overhead_s, 1e-9),
        max(speed.layer_overhead_s, 1e-9),
        max(speed.call_overhead_s, 1e-9),
        1 / speed.attended_bytes_per_s,
    )


def _from_costs(costs: NDArray[np.float64]) -> NodeSpeed:
    per_byte, per_operation, step, layer, call, per_attended_byte = (float(cost) for cost in costs)
    return NodeSpeed(
        memory_bytes_per_s=1 / per_byte,
        flops=1 / per_operation,
        attended_bytes_per_s=1 / per_attended_byte,
        step_overhead_s=step,
        layer_overhead_s=layer,
        call_overhead_s=call,
    )


def _bounded_minimum(
    matrix: NDArray[np.float64], aim: NDArray[np.float64], least: float
) -> NDArray[np.float64]:
    """argmin of x' matrix x / 2 - aim' x with every x >= least, by trying which of the few bounds hold."""
    best, best_value = np.full(len(aim), least), np.inf
    for free in product((True, False), repeat=len(aim)):
        chosen = np.array(free)
        x = np.full(len(aim), least)
        if chosen.any():
            rest = aim[chosen] - matrix[np.ix_(chosen, ~chosen)] @ x[~chosen]
            x[chosen] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], rest)
        value = x @ matrix @ x / 2 - aim @ x
        if (x >= least * (1 - 1e-9)).all() and value < best_value:
            best, best_value = x, value
    return best


def slower(speed: NodeSpeed, factor: float) -> NodeSpeed:
    """The same node at 1/factor of its speed, overheads included."""
    experts = speed.experts
    return replace(
        speed,
        memory_bytes_per_s=speed.memory_bytes_per_s / factor,
        flops=speed.flops / factor,
        attended_bytes_per_s=speed.attended_bytes_per_s / factor,
        call_work_s=speed.call_work_s * factor,
        serve_work_s=speed.serve_work_s * factor,
        hand_out_step_s=speed.hand_out_step_s * factor,
        hand_out_token_s=speed.hand_out_token_s * factor,
        experts=experts
        and ExpertSpeed(
            bytes_per_s=experts.bytes_per_s / factor,
            flops=experts.flops / factor,
            overhead_s=experts.overhead_s * factor,
        ),
        **{
            name.name: getattr(speed, name.name) * factor
            for name in fields(speed)
            if name.name.endswith("overhead_s")
        },
    )
