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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from topology.costs import AS_STORED, ModelFootprint, trunk_sizes
from topology.host_choice import choose_hosts
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
        if self.chances is not None:
            return np.maximum(0.0, 1 - self.mass[:, columns].sum(axis=1) / top_k) ** top_k
        count = self.count[:, columns].sum(axis=1)  # k different ones out of E, none of them among these
        left = 1 - count[:, None] / (num_experts - np.arange(top_k))
        return np.maximum(0.0, left).prod(axis=1)


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
    last_layer = footprint.num_layers if last_layer is None else last_layer
    layers = [layer for layer in footprint.moe_layers if first_layer <= layer < last_layer]
    held = {expert: nodes for expert, nodes in hosts.items() if first_layer <= expert.layer < last_layer}
    names = sorted({name for nodes in held.values() for name in nodes} - {home})
    chosen = choose_hosts(
        held,
        home=home,
        alive=alive if alive is not None else names,
        num_layers=footprint.num_layers,
        num_experts=footprint.experts_per_layer,
        peers=[home, *names],
    )
    owner = chosen[layers]
    if (owner < 0).any():
        return None
    return shares_of(tuple(names), owner, chances_of(footprint, layers, demand), all_alike=not demand)


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
    touched = shares.touched(batch, E, K)
    of_layers = tuple(layers)
    stored = _sizes(footprint.expert_bytes["as_stored"], of_layers)
    of_row = operations(footprint, 1.0) * stored  # operations of one row through one expert

    def compute(node: str, column: int, per_call: Floats) -> Floats:
        speed, sizes = machines.speed(node), footprint.expert_bytes[machines.weight_format(node)]
        read = touched[:, column] * _sizes(sizes, of_layers)
        rows = batch * shares.mass[:, column] * of_row
        if speed.experts is None:
            return (read / speed.memory_bytes_per_s + rows / speed.flops) / per_call
        is_called = shares.mass[:, column] > 1e-9
        own = read / speed.experts.bytes_per_s + rows / speed.experts.flops
        return is_called * speed.experts.overhead_s + own / per_call

    local = compute(home, 0, np.ones(len(layers)))
    num_peers = len(shares.nodes)
    chance, seconds, wire, remote = (np.zeros((len(layers), num_peers)) for _ in range(4))
    for index, node in enumerate(shares.nodes):
        mass = shares.mass[:, index + 1]
        spared = shares.spared([index + 1], E, K)
        called = 1 - spared**batch
        per_call = np.maximum(called, 1e-12)
        link = machines.link(home, node)
        rows = (
            batch * (1 - spared + mass) / per_call
        )  # out once for each token, back once for each routed row
        remote[:, index] = compute(node, index + 1, per_call)
        wire[:, index] = link.rtt_s + rows * (footprint.width * WIRE_ITEM_BYTES * 8 / link.bandwidth_bps)
        seconds[:, index] = wire[:, index] + machines.speed(node).call_overhead_s + remote[:, index]
        chance[:, index] = np.where(mass > 1e-9, called, 0.0)
    own = machines.speed(home)
    sending = chance.sum(axis=1) * (own.send_overhead_s + own.call_work_s)
    slowest_first = [int(index) for index in np.argsort(-seconds.mean(axis=0), kind="stable")]
    longest, nobody_yet, on_wire = np.zeros(len(layers)), np.ones(len(layers)), np.zeros(len(layers))
    for position, index in enumerate(slowest_first):
        nobody = shares.spared([column + 1 for column in slowest_first[: position + 1]], E, K) ** batch
        longest += (nobody_yet - nobody) * np.maximum(local, seconds[:, index])
        on_wire += (nobody_yet - nobody) * np.minimum(
            wire[:, index], np.maximum(0.0, seconds[:, index] - local)
        )
        nobody_yet = nobody
    work = {home: float((local + sending).sum())}
    for index, node in enumerate(shares.nodes):
        served_s = remote[:, index] + machines.speed(node).serve_work_s
        work[node] = float((chance[:, index] * served_s).sum())
    wait = sending + longest + nobody_yet * local - local
    return ExpertSeconds(local, wait, chance, sending, on_wire, work)


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
) -> StepPrediction:
    """One decode step of `batch` rows through layers [first_layer, last_layer) at a home.

    shares          of these layers, from `expert_shares`; None if an expert has no host: the step never ends
    context_tokens  tokens of KV that a row attends to, on average
    """
    last_layer = footprint.num_layers if last_layer is None else last_layer
    _require_shape(footprint)
    layers = [layer for layer in footprint.moe_layers if first_layer <= layer < last_layer]
    speed = machines.speed(home)
    by_layer, head = trunk_seconds(footprint, speed, batch, context_tokens, machines.trunk_format(home))
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
        hosts = placement.hosts()
        self._shares: dict[Stage, ExpertShares | None] = {
            stage: expert_shares(
                footprint,
                hosts,
                home=stage.node,
                first_layer=stage.first_layer,
                last_layer=stage.last_layer,
                demand=demand,
                alive=alive,
            )
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
