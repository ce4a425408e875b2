"""How long a decode step takes: one model of time for planner, router, selector, tier scheduler and simulator.

Seconds of a home with its layers [first, last) and a batch of B token rows, as an expectation over what the gate chooses:

    step overhead + rows * row overhead
    + sum over layers of (layer overhead + trunk of the layer)
    + sum over MoE layers of (sending + max(own experts, max over called peers of one call))
    + head, on the last layers

    trunk of the layer, head, experts  = bytes read / memory bandwidth + operations / flops; attention goes through the
                                         KV of each row at a rate of its own
    one call of a peer = RTT + call overhead + bytes of rows / link rate + its experts
    sending            = what the home does itself for each peer that is called: lays out, sends, takes in

Handing out what a step brought is another thread's: it takes a processor beside the next step, and no time of this one.

Experts: expert e is chosen by a token with probability p(e), k/E for all without demand, k in all for a layer.
B tokens touch it with 1 - (1 - p)^B, so E * (1 - (1 - k/E)^B) different ones in all; a token needs nothing of a set of
s experts with (1 - s/E)(1 - s/(E-1))... over its k choices, or with (1 - sum of p / k)^k under demand: 27 to 28 of 48
layers have a hop at k = 8 of 128 and locality 0.9. A layer waits for a peer unless only faster ones are called.

Stages: a token's latency is the sum of the stages and the hops between them, the last one back to the first included;
throughput is the batch over the slowest stage, when every stage has a batch of its own to work on.

Knows no clock, no state of a queue and no memory limit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topology.costs import AS_STORED, ModelFootprint, trunk_sizes
from topology.host_choice import cover_rank, cover_tables
from topology.ids import ExpertId
from topology.node_plan import GroupPlan, Placement, Stage
from topology.speeds import LinkSpeed, Machines, NodeSpeed

WIRE_ITEM_BYTES = 4  # rows and replies travel as float32 where answers are exact
OPERATIONS_PER_WEIGHT = 2  # a multiplication and an addition for each weight and row
DEFAULT_CONTEXT_TOKENS = 256  # tokens of KV that a row attends to on average, where nobody says

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepPrediction:
    """One step of one home, or of one stage. Seconds; expectations."""

    seconds: float
    """All of it."""
    trunk_s: float
    """Overheads, attention, gates, dense layers, head."""
    local_s: float
    """Own experts."""
    wait_s: float
    """Sending to peers, and waiting for them beyond the time of own experts."""
    calls: float
    """Messages to peers."""
    remote_layers: float
    """Layers that need any peer."""
    hit_rate: float
    """Share of routed rows whose expert is resident at the home; 1 without MoE layers."""
    work_s: Mapping[str, float] = field(default_factory=dict)
    """Node -> processor seconds that the step takes there, of all its threads."""
    wire_s: float = 0.0
    """Part of `seconds` in which no processor works: round trips and bytes on their way."""
    node: str = ""
    """The home."""
    home_s: float = 0.0
    """Part of `seconds` in which the home itself works."""


@dataclass(frozen=True)
class GroupPrediction:
    """A step of a whole decode group at a batch of `batch` rows."""

    batch: int
    stages: tuple[StepPrediction, ...]
    hops_s: float
    """On the wire between stages and back to the first, all together; 0 for a plain home."""

    @property
    def latency_s(self) -> float:
        """Seconds from a token to the next one of the same request."""
        return sum(stage.seconds for stage in self.stages) + self.hops_s

    @property
    def slowest_s(self) -> float:
        return max(stage.seconds for stage in self.stages)

    @property
    def work_s(self) -> dict[str, float]:
        """Node -> processor seconds that a step of the group takes there."""
        found: dict[str, float] = {}
        for stage in self.stages:
            for node, seconds in stage.work_s.items():
                found[node] = found.get(node, 0.0) + seconds
        return found

    @property
    def tokens_per_s(self) -> float:
        """Throughput with every stage at work on a batch of its own: as many requests as `batch` times stages."""
        return self.batch / (self.slowest_s if len(self.stages) > 1 else self.latency_s)


@dataclass(frozen=True)
class ExpertShares:
    """Which part of each layer's experts each node answers for, as one home sees it.

    M MoE layers of the home, N nodes that it calls besides itself, which is column 0.

    mass     [M, 1+N]  routed rows per token: sum of p(e) over the experts taken from that node; sums to k
    count    [M, 1+N]  how many experts that is
    chances  [M, E]    p(e), and `owner` [M, E] the column that answers for e; None where all are alike
    """

    nodes: tuple[str, ...]
    mass: Floats
    count: Floats
    chances: Floats | None = None
    owner: NDArray[np.integer] | None = None
    is_level: bool = False
    """Every layer has the same shares, and all experts are alike."""

    def touched(self, batch: int, num_experts: int, top_k: int) -> Floats:
        """[M, 1+N] different experts that `batch` tokens touch, as an expectation."""
        if self.chances is None or self.owner is None:
            return self.count * (1 - (1 - min(1.0, top_k / num_experts)) ** batch)
        chance = 1 - (1 - self.chances) ** batch
        columns = np.arange(self.mass.shape[1])
        return np.stack(
            [np.where(self.owner == column, chance, 0.0).sum(axis=1) for column in columns], axis=1
        )

    def spared(self, columns: Sequence[int], num_experts: int, top_k: int) -> Floats:
        """[M] chance that a token needs none of what these columns answer for."""
        return self.spared_by(self.weighed[:, columns].sum(axis=1), num_experts, top_k)

    @property
    def weighed(self) -> Floats:
        """[M, 1+N] what `spared_by` goes by: `mass` under demand, `count` where all are alike."""
        return self.count if self.chances is None else self.mass

    def spared_by(self, weighed: Floats, num_experts: int, top_k: int) -> Floats:
        """[...] chance that a token needs none of a set of experts, by the sum of `weighed` over their columns [...]."""
        if self.chances is not None:
            return np.maximum(0.0, 1 - weighed / top_k) ** top_k
        left = 1 - weighed[..., None] / (num_experts - np.arange(top_k))  # k different ones, none of the set
        return np.maximum(0.0, left).prod(axis=-1)


def distinct_experts(num_experts: int, top_k: int, batch: int) -> float:
    """E * (1 - (1 - k/E)^B): different experts of a layer that B tokens touch when all are alike."""
    return num_experts * (1 - (1 - min(1.0, top_k / num_experts)) ** batch) if num_experts else 0.0


def operations(footprint: ModelFootprint, num_bytes: float, rows: float = 1.0) -> float:
    """Floating-point operations of `rows` rows through weights that take `num_bytes` in the checkpoint."""
    return OPERATIONS_PER_WEIGHT * rows * num_bytes / footprint.weight_item_bytes


def chances_of(
    footprint: ModelFootprint, layers: Sequence[int], demand: Mapping[ExpertId, float] | None
) -> Floats:
    """[M, E] probability that a token chooses each expert: k/E, or demand scaled to k for a layer, never above 1."""
    E, K = footprint.experts_per_layer, footprint.top_k
    chances = np.full((len(layers), E), min(1.0, K / E) if E else 0.0)
    for row, layer in enumerate(layers if demand else ()):
        wanted = np.array([max(0.0, demand.get(ExpertId(layer, i), 0.0)) for i in range(E)])  # type: ignore[union-attr]
        if wanted.sum() > 0:  # a little for those that nobody asked for: a token chooses k all the same
            chances[row] = scaled_to(wanted / wanted.sum() + 1e-6 / E, K)
    return chances


def scaled_to(shares: Floats, total: int) -> Floats:
    """Shares scaled to `total` with none above 1: what the largest lose the others gain."""
    scaled = np.zeros_like(shares)
    open_ = np.ones(len(shares), dtype=bool)
    for _ in range(len(shares)):
        room = total - scaled[~open_].sum()
        if not open_.any() or room <= 0:
            break
        scaled[open_] = shares[open_] / shares[open_].sum() * room
        over = open_ & (scaled > 1)
        if not over.any():
            break
        scaled[over] = 1.0
        open_ &= ~over
    return np.minimum(scaled, 1.0)


def expert_shares(
    footprint: ModelFootprint,
    hosts: Mapping[ExpertId, Sequence[str]],
    *,
    home: str,
    first_layer: int = 0,
    last_layer: int | None = None,
    demand: Mapping[ExpertId, float] | None = None,
    alive: Collection[str] | None = None,
) -> ExpertShares | None:
    """Who answers for which experts of a home's layers, by the very rule of `host_choice`; None if some have nobody."""
    last = footprint.num_layers if last_layer is None else last_layer
    return _held(footprint, hosts).shares(footprint, home, first_layer, last, demand, alive)


class _Held(NamedTuple):
    """Who holds which expert, as a table, since every home of a placement asks.

    holds  [L, N, E] of all layers and of `nodes`, which are sorted
    """

    nodes: Sequence[str]
    holds: NDArray[np.bool_]

    def shares(
        self,
        footprint: ModelFootprint,
        home: str,
        first_layer: int,
        last_layer: int,
        demand: Mapping[ExpertId, float] | None,
        alive: Collection[str] | None,
    ) -> ExpertShares | None:
        """See `expert_shares`."""
        layers = [layer for layer in footprint.moe_layers if first_layer <= layer < last_layer]
        holds = self.holds[layers]
        peers = [
            (column, name)
            for column, name in enumerate(self.nodes)
            if name != home and holds[:, column].any()
        ]
        names = tuple(name for _, name in peers)
        own = (
            holds[:, self.nodes.index(home)]
            if home in self.nodes
            else np.zeros((len(layers), holds.shape[2]), dtype=bool)
        )
        reached = [
            holds[:, column] & (alive is None or name in alive) for column, name in peers
        ]  # each [M, E]
        table = np.stack([own, *reached], axis=1)
        owner = cover_tables(table, 0, cover_rank(home, [home, *names], layers))
        if (owner < 0).any():
            return None
        return shares_of(names, owner, chances_of(footprint, layers, demand), all_alike=not demand)


def _held(footprint: ModelFootprint, hosts: Mapping[ExpertId, Sequence[str]]) -> _Held:
    nodes = sorted({name for held_by in hosts.values() for name in held_by})
    column = {name: index for index, name in enumerate(nodes)}
    holds = np.zeros((footprint.num_layers, len(nodes), footprint.experts_per_layer), dtype=bool)
    places = [(layer, column[name], index) for (layer, index), names in hosts.items() for name in names]
    holds[tuple(np.array(places, dtype=np.intp).reshape(-1, 3).T)] = True
    return _Held(nodes, holds)


def shares_of(
    nodes: tuple[str, ...], owner: NDArray[np.integer], chances: Floats, *, all_alike: bool = False
) -> ExpertShares:
    """The shares of a home that takes each expert from a known node.

    owner      [M, E] 0 for the home itself, else 1 and more for `nodes`
    chances    [M, E] that a token chooses each expert
    all_alike  all chances of a layer are one
    """
    columns = np.arange(1 + len(nodes))
    mine = owner[:, None, :] == columns[None, :, None]
    mass, count = np.where(mine, chances[:, None, :], 0.0).sum(axis=2), mine.sum(axis=2).astype(np.float64)
    return ExpertShares(nodes, mass, count, None if all_alike else chances, None if all_alike else owner)


@lru_cache(maxsize=1024)
def _sizes(by_layer: tuple[int, ...], layers: tuple[int, ...]) -> Floats:
    """[M] bytes of an expert in these layers; the planner asks thousands of times."""
    return np.array([by_layer[layer] for layer in layers], dtype=float)


def trunk_seconds(
    footprint: ModelFootprint,
    speed: NodeSpeed,
    batch: int,
    context_tokens: float = DEFAULT_CONTEXT_TOKENS,
    trunk_format: str = AS_STORED,
) -> tuple[Floats, float]:
    """Seconds of each layer's trunk, [L], and of the head; the overhead of layers in, that of the step not."""
    kept = trunk_sizes(footprint, trunk_format)
    layer_bytes = np.array(footprint.layer_bytes, dtype=float)
    read_bytes = np.array(kept.layer_bytes, dtype=float)
    kv_bytes = batch * context_tokens * np.array(footprint.kv_bytes_per_token, dtype=float)
    layers = (
        speed.layer_overhead_s
        + read_bytes / speed.memory_bytes_per_s
        + kv_bytes / speed.attended_bytes_per_s
        + operations(footprint, 1.0, batch) * layer_bytes / speed.flops
    )
    head_bytes = footprint.head_bytes + (footprint.embed_bytes if footprint.head_is_tied else 0)
    read_by_head = kept.head_bytes + (kept.embed_bytes if footprint.head_is_tied else 0)
    head = read_by_head / speed.memory_bytes_per_s + operations(footprint, head_bytes, batch) / speed.flops
    return layers, head


@dataclass(frozen=True)
class ExpertSeconds:
    """What the experts of a home's MoE layers take in one step: [M] layers, [M, N] layers and peers."""

    local: Floats
    """[M] own experts."""
    wait: Floats
    """[M] sending, and waiting beyond own experts."""
    chance: Floats
    """[M, N] of a call to each peer."""
    sending: Floats
    """[M] part of `wait`."""
    wire: Floats
    """[M] part of `wait` in which nobody computes."""
    work_s: Mapping[str, float]
    """Node -> processor seconds, without the trunk."""


def expert_seconds(
    footprint: ModelFootprint,
    machines: Machines,
    *,
    home: str,
    layers: Sequence[int],
    shares: ExpertShares,
    batch: int,
) -> "ExpertSeconds":
    """What the experts of these layers take, [M] layers, [M, N] layers and peers; expectations."""
    K, E = footprint.top_k, footprint.experts_per_layer
    num_layers, of_layers = len(layers), tuple(layers)

    # All nodes at once, the home first, in tables of [1+N, M] and [N, M]: the planner comes here some thousand times.
    nodes = (home, *shares.nodes)
    speeds, links = (
        [machines.speed(node) for node in nodes],
        [machines.link(home, node) for node in nodes[1:]],
    )
    formats = [machines.weight_format(node) for node in nodes]
    stored = _sizes(footprint.expert_bytes["as_stored"], of_layers)
    sizes = np.array([_sizes(footprint.expert_bytes[each], of_layers) for each in formats])
    mass, weighed, touched = shares.mass.T, shares.weighed.T, shares.touched(batch, E, K).T
    if shares.is_level and (stored == stored[0]).all() and (sizes == sizes[:, :1]).all():
        stored, sizes = (
            stored[:1],
            sizes[:, :1],
        )  # one layer stands for all: M is 1 until sums over layers are taken
        mass, weighed, touched = mass[:, :1], weighed[:, :1], touched[:, :1]

    def each_layer(table: Floats) -> Floats:
        return table if table.shape[-1] == num_layers else np.repeat(table, num_layers, axis=-1)

    of_row = operations(footprint, 1.0) * stored  # operations of one row through one expert
    alone = shares.spared_by(weighed[1:], E, K)
    called = 1 - alone**batch
    per_call = np.maximum(called, 1e-12)
    own_s = touched * sizes / _column(
        _expert_rate(speed) for speed in speeds
    ) + batch * mass * of_row / _column((speed.experts or speed).flops for speed in speeds)
    begun_s = (mass > 1e-9) * _column(
        0.0 if speed.experts is None else speed.experts.overhead_s for speed in speeds
    )
    local, remote = begun_s[0] + own_s[0], begun_s[1:] + own_s[1:] / per_call

    carried = (
        batch * (1 - alone + mass[1:]) / per_call
    )  # out once for each token, back once for each routed row
    row_bits = footprint.width * WIRE_ITEM_BYTES * 8
    wire = _column(link.rtt_s for link in links) + carried * _column(
        row_bits / link.bandwidth_bps for link in links
    )
    seconds = wire + _column(speed.call_overhead_s for speed in speeds[1:]) + remote
    chance = np.where(mass[1:] > 1e-9, called, 0.0)
    by_layer = np.ascontiguousarray(each_layer(chance).T)
    sending = np.ascontiguousarray(chance.T).sum(axis=1) * (speeds[0].send_overhead_s + speeds[0].call_work_s)

    # A layer waits for its slowest peer, unless only faster ones are called.
    slowest_first = np.argsort(-np.ascontiguousarray(each_layer(seconds).T).mean(axis=0), kind="stable")
    so_far = np.cumsum(weighed[1:][slowest_first], axis=0)
    nobody = np.concatenate([np.ones((1, len(local))), shares.spared_by(so_far, E, K) ** batch])
    waits_for = nobody[:-1] - nobody[1:]
    nothing = np.zeros(len(local))  # summed peer by peer: numpy's own order hangs on the table's shape
    longest = sum(waits_for * np.maximum(local, seconds[slowest_first]), nothing)
    beyond = np.maximum(0.0, seconds[slowest_first] - local)
    on_wire = sum(waits_for * np.minimum(wire[slowest_first], beyond), nothing)
    wait = sending + longest + nobody[-1] * local - local

    served_s = chance * (remote + _column(speed.serve_work_s for speed in speeds[1:]))
    work = {home: float(each_layer(local + sending).sum())}
    work |= dict(zip(shares.nodes, each_layer(served_s).sum(axis=1).tolist(), strict=True))
    return ExpertSeconds(
        each_layer(local), each_layer(wait), by_layer, each_layer(sending), each_layer(on_wire), work
    )


def _expert_rate(speed: NodeSpeed) -> float:
    """Bytes of experts that a node reads in a second."""
    return speed.memory_bytes_per_s if speed.experts is None else speed.experts.bytes_per_s


def _column(numbers: Iterable[float]) -> Floats:
    """[n, 1], to go with a line for each node."""
    return np.array(list(numbers), dtype=float).reshape(-1, 1)


def predict_home_step(
    footprint: ModelFootprint,
    machines: Machines,
    *,
    home: str,
    shares: ExpertShares | None,
    batch: int = 1,
    first_layer: int = 0,
    last_layer: int | None = None,
    context_tokens: float = DEFAULT_CONTEXT_TOKENS,
    trunk: tuple[Floats, float] | None = None,
) -> StepPrediction:
    """One decode step of `batch` rows through layers [first_layer, last_layer) at a home.

    shares          of these layers, from `expert_shares`; None if an expert has no host: the step never ends
    context_tokens  tokens of KV that a row attends to, on average
    trunk           what `trunk_seconds` says of the home, where that is known
    """
    last_layer = footprint.num_layers if last_layer is None else last_layer
    _require_shape(footprint)
    layers = [layer for layer in footprint.moe_layers if first_layer <= layer < last_layer]
    speed = machines.speed(home)
    by_layer, head = trunk or trunk_seconds(
        footprint, speed, batch, context_tokens, machines.trunk_format(home)
    )
    trunk_s = speed.step_overhead_s + batch * speed.row_overhead_s
    trunk_s += float(by_layer[first_layer:last_layer].sum())
    beside_s = speed.hand_out_step_s + batch * speed.hand_out_token_s if first_layer == 0 else 0.0
    if last_layer == footprint.num_layers:
        trunk_s += head
    if not layers:
        work = {home: trunk_s + beside_s}
        return StepPrediction(trunk_s, trunk_s, 0.0, 0.0, 0.0, 0.0, 1.0, work, 0.0, home, trunk_s)
    if shares is None:
        never = float("inf")
        return StepPrediction(never, trunk_s, 0.0, never, 0.0, 0.0, 0.0)
    found = expert_seconds(footprint, machines, home=home, layers=layers, shares=shares, batch=batch)
    local_s, wait_s = float(found.local.sum()), float(found.wait.sum())
    remote = 1 - shares.mass[:, 0] / footprint.top_k
    peers = range(1, 1 + len(shares.nodes))
    spared = shares.spared(list(peers), footprint.experts_per_layer, footprint.top_k)
    return StepPrediction(
        seconds=trunk_s + local_s + wait_s,
        trunk_s=trunk_s,
        local_s=local_s,
        wait_s=wait_s,
        calls=float(found.chance.sum()),
        remote_layers=float((1 - spared**batch).sum()),
        hit_rate=float(1 - remote.mean()),
        work_s={**found.work_s, home: trunk_s + beside_s + found.work_s[home]},
        wire_s=float(found.wire.sum()),
        node=home,
        home_s=trunk_s + local_s + float(found.sending.sum()),
    )


def hop_seconds(link: LinkSpeed, receiver: NodeSpeed, num_bytes: float) -> float:
    """One way over a link with `num_bytes`, and the receiver's taking it in."""
    return link.rtt_s / 2 + link.transfer_s(num_bytes) + receiver.call_overhead_s


def predict_stages(
    footprint: ModelFootprint,
    machines: Machines,
    stages: Sequence[Stage],
    shares: Sequence[ExpertShares | None],
    *,
    batch: int = 1,
    context_tokens: float = DEFAULT_CONTEXT_TOKENS,
) -> GroupPrediction:
    """One decode step of a group; `shares` has one entry for each stage. One stage over all layers is a plain home."""
    steps = tuple(
        predict_home_step(
            footprint,
            machines,
            home=stage.node,
            shares=share,
            batch=batch,
            first_layer=stage.first_layer,
            last_layer=stage.last_layer,
            context_tokens=context_tokens,
        )
        for stage, share in zip(stages, shares, strict=True)
    )
    return GroupPrediction(batch, steps, hops_seconds(footprint, machines, stages, batch))


def hops_seconds(footprint: ModelFootprint, machines: Machines, stages: Sequence[Stage], batch: int) -> float:
    """On the wire between the stages of a group and back to the first, all together; 0 for a plain home."""
    if len(stages) == 1:
        return 0.0
    row_bytes, seconds = batch * footprint.width * WIRE_ITEM_BYTES, 0.0
    for index, stage in enumerate(stages):
        receiver = stages[(index + 1) % len(stages)].node
        carried = row_bytes if index + 1 < len(stages) else batch * 4  # the last sends the token ids back
        seconds += hop_seconds(machines.link(stage.node, receiver), machines.speed(receiver), carried)
    return seconds


class PlacementClock:
    """Predicts the groups of one placement; what does not depend on the batch is worked out once."""

    def __init__(
        self,
        footprint: ModelFootprint,
        machines: Machines,
        placement: Placement,
        *,
        demand: Mapping[ExpertId, float] | None = None,
        alive: Collection[str] | None = None,
    ) -> None:
        self._footprint, self._machines = footprint, machines
        held = _held(footprint, placement.hosts())
        self._shares: dict[Stage, ExpertShares | None] = {
            stage: held.shares(footprint, stage.node, stage.first_layer, stage.last_layer, demand, alive)
            for group in placement.groups
            for stage in group.stages
        }

    def predict(
        self, group: GroupPlan, batch: int = 1, context_tokens: float = DEFAULT_CONTEXT_TOKENS
    ) -> GroupPrediction:
        """One decode step of one of the placement's groups."""
        shares = [self._shares[stage] for stage in group.stages]
        return predict_stages(
            self._footprint,
            self._machines,
            group.stages,
            shares,
            batch=batch,
            context_tokens=context_tokens,
        )


def _require_shape(footprint: ModelFootprint) -> None:
    if footprint.moe_layers and (footprint.width < 1 or footprint.top_k < 1):
        raise ValueError(
            f"a step's time needs the model's width and top_k, found {footprint.width} and {footprint.top_k}: "
            "whoever makes the ModelFootprint has to fill them in"
        )
