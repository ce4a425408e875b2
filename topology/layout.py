"""Decide what each node holds for given decode groups: trunk, KV, workspace, and every expert at least once. Pure.

Knows the topology file and the model's bytes; nothing of who is alive. Which groups there are is `stages.py`'s to say.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from topology import costs
from topology.cluster import DECODE, EXPERTS, PREFILL, Cluster, Node
from topology.costs import ModelFootprint
from topology.errors import PlacementError, TopologyError
from topology.gather import ROWS, Bools
from topology.host_choice import cover_ranks, cover_tables
from topology.ids import ExpertId
from topology.keep import keep_previous
from topology.node_plan import GroupPlan, NodePlan, Placement, Stage
from topology.rules import NEED_TRAITS, Rule, as_table, chances_at
from topology.shelf import Shelf
from topology.speeds import NodeSpeed, declared_speed, machines_of
from topology.spread import spread_first_copies
from topology.step_time import expert_seconds, shares_of
from topology.traits import ExpertTraits, Floats, Traffic
from topology.units import in_one_unit

CALL_WORK_S, SERVE_WORK_S = 125e-6, 125e-6
"""Processor seconds of a call at the home and at the peer, where they were not measured: 0.27 ms together for the demo model."""
KEEP_KV = 1.5  # an earlier KV pool stays unless there is room for so many times its blocks


def kv_floor_blocks(cluster: Cluster, footprint: ModelFootprint, num_tokens: int) -> int:
    """Blocks for so many tokens, but for one context at least and for `kv_tokens` at most."""
    least = costs.kv_blocks(footprint, costs.context_limit(cluster, footprint))
    wanted = max(costs.kv_blocks(footprint, cluster.kv_tokens), least)
    return min(max(costs.kv_blocks(footprint, num_tokens), least), wanted)


def every_home(cluster: Cluster, footprint: ModelFootprint) -> tuple[GroupPlan, ...]:
    """The plan `home`: each decode node runs all layers for requests of its own."""
    return tuple(
        GroupPlan((Stage(node.name, 0, footprint.num_layers),))
        for node in cluster.nodes
        if DECODE in node.roles
    )


def lay_out(
    cluster: Cluster,
    footprint: ModelFootprint,
    *,
    groups: Sequence[GroupPlan] | None = None,
    hosts: Collection[str] | None = None,
    epoch: int = 1,
    demand: Mapping[ExpertId, float] | None = None,
    speeds: Mapping[str, NodeSpeed] | None = None,
    pins: Mapping[ExpertId, str] | None = None,
    previous: Placement | None = None,
    kv_floor_tokens: int = 0,
    traits: ExpertTraits | None = None,
    traffic: Traffic | None = None,
) -> Placement:
    """Place a model on a cluster, or raise `PlacementError` with the bytes that are needed and available.

    groups    where requests may live; None for `every_home`. With groups given, homes take what they can of their own
              layers before any other node does
    hosts     nodes that may hold experts; None for all with the role
    demand    tokens that each expert receives, in any unit: who gets replicas, and a place at a home or a fast node
    speeds    measured; memory bandwidth counts beside room. Else the file's, else all are alike
    pins      beside those of the file
    previous  what lies right in it stays; see `keep.py`
    kv_floor_tokens  with groups given, how far KV may shrink so that a home holds all experts of its layers; at least
              one context, at most `kv_tokens`
    traits, traffic  what was calibrated, and where requests live: what the file's `placement` decides by, see
              `rules.py`

    1. Nodes of a group hold the trunk of their layers, nodes with the role prefill alone all of it. They and expert
       hosts hold workspace. Every process has its reserve.
    2. KV: a trunk node gets blocks for `kv_tokens`, or as many as it and its group have room for, but never less than
       one whole context. Where that leaves too little room for the first copies of all experts, the nodes that have
       both trunk and experts are held to one common limit: the highest at which every expert fits, again never less
       than one context. Only then are experts refused. Blocks that a node had before stay as they are rather than grow
       a little.
    3. Pinned experts first, then first copies in proportion to room and speed, so that each host gets some of each
       layer.
    4. Replicas follow, up to floor(memory_ratio x experts) copies in all, as `rules.py` and `replicas.py` say. Rules by
       demand then gather what homes lack on few nodes, as `gather.py` says, where steps get no longer by it.

    With experts of different sizes the packing is greedy, largest first, and may refuse what a search could fit.
    """
    _refuse_missing_traits(cluster, footprint, traits)
    desk = _Desk(cluster, footprint, groups, hosts, speeds, pins, previous, kv_floor_tokens)
    desk.refuse_small_nodes()
    plans, shelves = desk.place_first_copies()
    experts = footprint.experts()
    max_copies = max(int(cluster.memory_ratio * len(experts)), len(experts))

    if demand is None and traits is not None and cluster.placement in NEED_TRAITS:
        demand = traits.demand()
    traffic = traffic or Traffic()
    judge = (
        _slower_layers(cluster, footprint, shelves, traits, traffic, speeds) if traits is not None else None
    )
    rule = Rule(cluster.placement, demand, traits, traffic, footprint.top_k, judge)
    rule.settle(shelves, experts, max_copies=max_copies)
    if previous is not None and previous.rule == rule.name:
        kept = desk.shelves_of(plans)
        if keep_previous(
            kept,
            _held_before(previous, plans),
            experts,
            max_copies=max_copies,
            grown_bytes=_grown_bytes(previous, kept),
            fresh_bytes={shelf.node: shelf.used_bytes for shelf in shelves},
            demand=demand,
        ):
            rule.replicate(kept, experts, max_copies=max_copies)
            shelves = kept
    placed = {shelf.node: shelf for shelf in shelves}
    return Placement(
        epoch,
        tuple(_with_experts(plan, placed.get(plan.node)) for plan in plans),
        tuple(desk.groups),
        rule.name,
    )


def _refuse_missing_traits(cluster: Cluster, footprint: ModelFootprint, traits: ExpertTraits | None) -> None:
    if cluster.placement in NEED_TRAITS and footprint.moe_layers:
        if traits is None:
            raise TopologyError(
                f'placement = "{cluster.placement}" looks at what calibration found, and there is no artifact: run '
                f'`edge-runtime calibrate {cluster.model}`, name its folder by `calibration`, or write placement = "spread"'
            )
        found = (traits.layers, traits.frequency.shape[1])
        if found != (footprint.moe_layers, footprint.experts_per_layer):
            raise TopologyError(
                f"the calibration artifact describes layers {list(traits.layers)} of {found[1]} experts, the model has "
                f"{list(footprint.moe_layers)} of {footprint.experts_per_layer}: calibrate this model"
            )


@dataclass
class _Reserved:
    """One node before any expert: what the plan uses it for, and its range of layers."""

    node: Node
    stage: Stage | None

    @property
    def layers(self) -> tuple[int, int]:
        return (self.stage.first_layer, self.stage.last_layer) if self.stage else (0, 0)


class _Desk:
    """What one call of `lay_out` works with."""

    def __init__(
        self,
        cluster: Cluster,
        footprint: ModelFootprint,
        groups: Sequence[GroupPlan] | None,
        hosts: Collection[str] | None,
        speeds: Mapping[str, NodeSpeed] | None,
        pins: Mapping[ExpertId, str] | None,
        previous: Placement | None,
        kv_floor_tokens: int,
    ) -> None:
        self.cluster, self.footprint = cluster, footprint
        self.floor_blocks = kv_floor_blocks(cluster, footprint, kv_floor_tokens)
        self.before = {plan.node: plan for plan in previous.nodes} if previous else {}
        self.home_first = groups is not None
        self.groups = every_home(cluster, footprint) if groups is None else tuple(groups)
        self.stages = {stage.node: stage for group in self.groups for stage in group.stages}
        self.nodes = [self._reserved(node, hosts) for node in cluster.nodes]
        self.speeds = self._relative_speeds(speeds)
        pairs = {(pin.expert, pin.node) for pin in cluster.pins} | set((pins or {}).items())
        self.pins = sorted(pairs)
        self._refuse_pins_nowhere()

    def _reserved(self, node: Node, hosts: Collection[str] | None) -> _Reserved:
        stage = self.stages.get(node.name)
        if stage is None and PREFILL in node.roles and DECODE not in node.roles:
            stage = Stage(node.name, 0, self.footprint.num_layers)
        roles = set(node.roles)
        if stage is None:
            roles -= {PREFILL, DECODE}
        if hosts is not None and node.name not in hosts:
            roles.discard(EXPERTS)
        return _Reserved(replace(node, roles=frozenset(roles)), stage)

    def _relative_speeds(self, measured: Mapping[str, NodeSpeed] | None) -> dict[str, float]:
        """Memory bandwidth of each node, the fastest being 1; all 1 where nothing is known."""
        if not measured and all(node.memory_bytes_per_s is None for node in self.cluster.nodes):
            return dict.fromkeys(self.cluster.node_names, 1.0)
        rates = {
            name: ((measured or {}).get(name) or declared_speed(self.cluster, name)).memory_bytes_per_s
            for name in self.cluster.node_names
        }
        if measured:  # alike is what differs by less than a measurement may err
            middle = sorted(rates.values())[len(rates) // 2]
            rates = {name: 4.0 ** round(math.log(rate / middle, 4)) for name, rate in rates.items()}
        fastest = max(rates.values())
        return {name: rate / fastest for name, rate in rates.items()}

    def refuse_small_nodes(self) -> None:
        """Raise for all nodes that lack room for what comes before any expert; the error's numbers are the worst's."""
        short = []
        for entry in self.nodes:
            first, last = entry.layers
            parts = {
                "process": self.cluster.process_bytes(entry.node),
                "trunk": costs.trunk_bytes(self.footprint, first, last, entry.node.trunk_format),
                "KV of one context": self._least_blocks() * costs.kv_block_bytes(self.footprint, first, last),
                "workspace": costs.workspace_bytes(self.cluster, entry.node, self.footprint),
            }
            if sum(parts.values()) > entry.node.memory_bytes:
                short.append((sum(parts.values()), entry.node, parts))
        if not short:
            return
        told = "; ".join(_too_small(node, parts) for _, node, parts in short)
        remedy = (
            "raise memory, lower context_tokens or max_batch_rows, or give such a node the role experts alone"
        )
        needed, node, _ = max(short, key=lambda entry: entry[0] - entry[1].memory_bytes)
        raise PlacementError(
            f"{told}: {remedy}", node=node.name, needed_bytes=needed, available_bytes=node.memory_bytes
        )

    def place_first_copies(self) -> tuple[list[NodePlan], list[Shelf]]:
        """Find the most KV at which every expert has a place, and place it there."""
        pinned = {expert for expert, _ in self.pins}
        others = [expert for expert in self.footprint.experts() if expert not in pinned]

        def attempt(most_blocks: int) -> tuple[list[NodePlan], list[Shelf], list[ExpertId]]:
            plans = self._plans(most_blocks)
            shelves = self.shelves_of(plans)
            short = {e for e, node in self.pins for s in shelves if s.node == node and e not in s.experts}
            left_over = spread_first_copies(shelves, others, home_first=self.home_first)
            return plans, shelves, sorted(short) + left_over

        least, most = self._least_blocks(), self._wanted_blocks()
        plans, shelves, left_over = attempt(most)
        if not left_over:
            return plans, shelves
        plans, shelves, left_over = attempt(least)
        self._refuse_pins_without_room(shelves)
        if left_over:
            raise _no_room(shelves, left_over)
        while most - least > 1:  # every expert fits at `least`, and does not at `most`
            middle = (least + most) // 2
            tried = attempt(middle)
            if tried[2]:
                most = middle
            else:
                least, (plans, shelves, _) = middle, tried
        return plans, shelves

    def shelves_of(self, plans: Sequence[NodePlan]) -> list[Shelf]:
        """A shelf for each expert host, with the pinned experts that have room on it and nothing else."""
        wanted: dict[str, list[ExpertId]] = {}
        for expert, node in self.pins:
            wanted.setdefault(node, []).append(expert)
        shelves = []
        for entry, plan in zip(self.nodes, plans, strict=True):
            if not entry.node.hosts_experts:
                continue
            is_home = entry.stage is not None and DECODE in entry.node.roles
            name = entry.node.name
            shelf = Shelf(
                node=name,
                room_bytes=plan.free_bytes,
                layer_sizes=tuple(self.footprint.expert_bytes[entry.node.weight_format]),
                home_layers=range(*entry.layers) if is_home else range(0),
                speed=self.speeds[name],
                pinned=frozenset(wanted.get(name, ())),
            )
            for expert in wanted.get(name, ()):
                if shelf.fits(expert):
                    shelf.put(expert)
            shelves.append(shelf)
        return shelves

    def _plans(self, most_blocks: int) -> list[NodePlan]:
        """All nodes without experts. The stages of a group have equally many KV blocks: more would serve nobody."""
        plans = {entry.node.name: self._reserve(entry, most_blocks) for entry in self.nodes}
        for group in self.groups:
            blocks = min(plans[node].kv_blocks for node in group.nodes)
            blocks = min([blocks, *(self._kept_blocks(plans[node]) for node in group.nodes)])
            for node in group.nodes:
                plans[node] = self._with_blocks(plans[node], blocks)
        return [plans[entry.node.name] for entry in self.nodes]

    def _kept_blocks(self, plan: NodePlan) -> int:
        """The blocks that a node has, where it could have a little more: another KV pool costs more than that is worth."""
        old = self.before.get(plan.node)
        is_kept = old and old.layers == plan.layers and old.kv_blocks >= self._least_blocks()
        if old and is_kept and old.kv_blocks <= plan.kv_blocks < KEEP_KV * old.kv_blocks:
            return old.kv_blocks
        return plan.kv_blocks

    def _reserve(self, entry: _Reserved, most_blocks: int) -> NodePlan:
        """A node's plan without experts; `most_blocks` limits the KV of a node that hosts experts as well."""
        node, (first, last) = entry.node, entry.layers
        plan = NodePlan(
            node=node.name,
            roles=node.roles,
            first_layer=first,
            last_layer=last,
            experts=(),
            trunk_bytes=costs.trunk_bytes(self.footprint, first, last, node.trunk_format),
            expert_bytes=0,
            kv_blocks=0,
            kv_bytes=0,
            workspace_bytes=costs.workspace_bytes(self.cluster, node, self.footprint),
            process_bytes=self.cluster.process_bytes(node),
            memory_bytes=node.memory_bytes,
            weight_format=node.weight_format,
            trunk_format=node.trunk_format,
            device=node.device,
        )
        if first == last:
            return plan
        block_bytes = costs.kv_block_bytes(self.footprint, first, last)
        blocks = min(self._wanted_blocks(), plan.free_bytes // block_bytes)
        if (
            self.home_first and node.hosts_experts
        ):  # all experts of its layers before more KV than one context
            sizes = self.footprint.expert_bytes[node.weight_format][first:last]
            beside_all = plan.free_bytes - sum(sizes) * self.footprint.experts_per_layer
            if beside_all // block_bytes >= self.floor_blocks:
                blocks = min(blocks, beside_all // block_bytes)
        return self._with_blocks(plan, min(blocks, most_blocks) if node.hosts_experts else blocks)

    def _with_blocks(self, plan: NodePlan, blocks: int) -> NodePlan:
        block_bytes = costs.kv_block_bytes(self.footprint, plan.first_layer, plan.last_layer)
        return replace(plan, kv_blocks=blocks, kv_bytes=blocks * block_bytes)

    def _least_blocks(self) -> int:
        return costs.kv_blocks(self.footprint, costs.context_limit(self.cluster, self.footprint))

    def _wanted_blocks(self) -> int:
        return max(costs.kv_blocks(self.footprint, self.cluster.kv_tokens), self._least_blocks())

    def _refuse_pins_nowhere(self) -> None:
        """Pins to experts or nodes that there are not, or that hold no experts."""
        known = set(self.footprint.experts()) if self.pins else set()
        roles = {entry.node.name: entry.node.roles for entry in self.nodes}
        for expert, node in self.pins:
            size = 0
            if expert not in known:
                layers = self.footprint.moe_layers
                why = (
                    f"the model has no such expert: {self.footprint.experts_per_layer} in each of its "
                    f"{len(layers)} layers with experts, {layers[0]} to {layers[-1]}"
                    if layers
                    else "the model has no experts"
                )
            elif node not in roles:
                why = f"there is no such node: {', '.join(roles)}"
            elif EXPERTS not in roles[node]:
                why = f"{node} may not hold experts"
            else:
                continue
            raise PlacementError(
                f"{expert} is pinned to {node}, but {why}", node=node, needed_bytes=size, available_bytes=0
            )

    def _refuse_pins_without_room(self, shelves: Sequence[Shelf]) -> None:
        for shelf in shelves:
            needed = sum(shelf.size_of(expert) for expert in shelf.pinned)
            if needed > shelf.room_bytes:
                wanted, room = in_one_unit(needed, shelf.room_bytes)
                raise PlacementError(
                    f"{len(shelf.pinned)} experts pinned to {shelf.node} need {wanted} and it has room for {room} beside "
                    "process, trunk, KV of one context and workspace: raise its memory, or pin fewer",
                    node=shelf.node,
                    needed_bytes=needed,
                    available_bytes=shelf.room_bytes,
                )


def _slower_layers(
    cluster: Cluster,
    footprint: ModelFootprint,
    shelves: Sequence[Shelf],
    traits: ExpertTraits,
    traffic: Traffic,
    speeds: Mapping[str, NodeSpeed] | None,
) -> Callable[[Bools], Bools]:
    """Which layers [L] of an arrangement [L, N, E] would cost more than what stands on the shelves does.

    Few calls are long calls, where rows take long to send or experts to read. What counts is the home's step, and what its
    calls take of the processors of others, who have steps of their own.
    """
    machines = machines_of(cluster, speeds)
    names = [shelf.node for shelf in shelves]
    rank = cover_ranks(names, traits.layers)
    chances = [chances_at(traits, traffic, name, footprint.top_k) for name in names]

    def seconds(held: Bools) -> Floats:
        found = np.zeros(len(traits.layers))
        for home, shelf in enumerate(shelves):
            rows = [row for row, layer in enumerate(traits.layers) if layer in shelf.home_layers]
            if not rows or not traffic.share_of(shelf.node):
                continue
            others = [name for name in names if name != shelf.node]
            columns = np.array([0 if name == shelf.node else 1 + others.index(name) for name in names])
            taken = expert_seconds(
                footprint,
                machines,
                home=shelf.node,
                layers=[traits.layers[row] for row in rows],
                shares=shares_of(
                    tuple(others),
                    columns[cover_tables(held[rows], home, rank[rows, home])],
                    chances[home][rows],
                ),
                batch=ROWS,
            )
            own = machines.speed(shelf.node)
            at_home = 0.0 if own.call_work_s else max(0.0, CALL_WORK_S - own.send_overhead_s)
            work = [at_home + (machines.speed(name).serve_work_s or SERVE_WORK_S) for name in others]
            found[rows] += traffic.share_of(shelf.node) * (taken.local + taken.wait + taken.chance @ work)
        return found

    before: list[Floats] = []

    def is_slower(held: Bools) -> Bools:
        before[:] = before or [seconds(as_table(shelves, traits))]
        return seconds(held) > before[0] * (1 + 1e-9)

    return is_slower


def _with_experts(plan: NodePlan, shelf: Shelf | None) -> NodePlan:
    if shelf is None:
        return plan
    return replace(plan, experts=tuple(sorted(shelf.experts)), expert_bytes=shelf.used_bytes)


def _held_before(previous: Placement, plans: Sequence[NodePlan]) -> dict[str, tuple[ExpertId, ...]]:
    """Node -> the experts it holds already, in the format it is to have."""
    formats = {plan.node: plan.weight_format for plan in plans}
    return {
        plan.node: plan.experts for plan in previous.nodes if formats.get(plan.node) == plan.weight_format
    }


def _grown_bytes(previous: Placement, shelves: Sequence[Shelf]) -> dict[str, int]:
    """Node -> how many bytes of room for experts it has beyond what it had."""
    rooms = {plan.node: plan.memory_bytes - plan.reserved_bytes for plan in previous.nodes if plan.experts}
    return {
        shelf.node: shelf.room_bytes - rooms.get(shelf.node, 0)
        for shelf in shelves
        if shelf.room_bytes > rooms.get(shelf.node, 0)
    }


def _too_small(node: Node, parts: Mapping[str, int]) -> str:
    """What a node needs before any expert, by parts."""
    named = {part: size for part, size in parts.items() if size}
    needed, has, *each = in_one_unit(sum(parts.values()), node.memory_bytes, *named.values())
    told = ", ".join(f"{part} {size}" for part, size in zip(named, each, strict=True))
    return f"node {node.name} needs {needed} before any expert and has {has} ({told})"


def _no_room(shelves: Sequence[Shelf], left_over: Sequence[ExpertId]) -> PlacementError:
    """Why the first copies do not fit, in whole experts: free bytes too few for one expert do not count as available."""
    if not shelves:
        return PlacementError(
            "no node may hold experts: give one the role experts", needed_bytes=1, available_bytes=0
        )
    available = sum(shelf.used_bytes for shelf in shelves)
    needed = available + sum(min(shelf.size_of(expert) for shelf in shelves) for expert in left_over)
    num_placed = sum(len(shelf.experts) for shelf in shelves)
    roomiest = max(shelves, key=lambda shelf: (shelf.free_bytes, shelf.node))
    one = roomiest.size_of(left_over[0])
    wanted, room, short, each, left = in_one_unit(
        needed, available, needed - available, one, roomiest.free_bytes
    )
    return PlacementError(
        f"the model's {num_placed + len(left_over)} experts need {wanted} on the nodes with the role experts, "
        f"which have room for {num_placed} of them, {room}, beside process, trunk, KV of one context "
        f"and workspace: {short} short (an expert takes {each}, the most left on one node is {left}, on "
        f"{roomiest.node}); add memory or nodes, or lower context_tokens or max_batch_rows",
        needed_bytes=needed,
        available_bytes=available,
    )
