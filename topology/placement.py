"""Decide what each node holds: trunk, KV, workspace, and every expert at least once. Pure, and the same everywhere.

Knows the topology file and the model's bytes; nothing of who is alive, nor of what is loaded now.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush, heapreplace

from topology import costs
from topology.cluster import DECODE, Cluster, Node
from topology.costs import ModelFootprint
from topology.errors import PlacementError
from topology.ids import ExpertId
from topology.replicas import add_replicas
from topology.shelf import Shelf
from topology.units import format_bytes_rounded


@dataclass(frozen=True)
class NodePlan:
    """What one node is to hold. All sizes in whole bytes."""

    node: str
    roles: frozenset[str]
    first_layer: int
    """First layer of its trunk."""
    last_layer: int
    """One past the last layer of its trunk; 0 and 0 for a node without trunk."""
    experts: tuple[ExpertId, ...]
    """Resident experts, sorted."""
    trunk_bytes: int
    expert_bytes: int
    """All resident experts together, in the node's weight format."""
    kv_blocks: int
    kv_bytes: int
    workspace_bytes: int
    process_bytes: int
    """Set aside for the interpreter and its libraries."""
    memory_bytes: int
    """The node's limit, as the file states it."""

    @property
    def reserved_bytes(self) -> int:
        """All but experts."""
        return self.process_bytes + self.trunk_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def planned_bytes(self) -> int:
        """All that the process is to have resident; never above `memory_bytes`."""
        return self.reserved_bytes + self.expert_bytes

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.planned_bytes


@dataclass(frozen=True)
class Placement:
    """Experts -> nodes, and what else each node holds, as one version (`epoch`)."""

    epoch: int
    nodes: tuple[NodePlan, ...]
    """In the order of the topology file."""

    def hosts(self) -> dict[ExpertId, tuple[str, ...]]:
        """Expert -> the nodes that hold it, in the order of the file; sorted by expert."""
        found: dict[ExpertId, list[str]] = {}
        for plan in self.nodes:
            for expert in plan.experts:
                found.setdefault(expert, []).append(plan.node)
        return {expert: tuple(found[expert]) for expert in sorted(found)}

    def copies(self) -> Counter[ExpertId]:
        """Expert -> how many nodes hold it."""
        return Counter(expert for plan in self.nodes for expert in plan.experts)

    def plan_of(self, node: str) -> NodePlan:
        """The share of one node; `KeyError` if the placement has no such node."""
        for plan in self.nodes:
            if plan.node == node:
                return plan
        raise KeyError(node)


def plan_placement(
    cluster: Cluster,
    footprint: ModelFootprint,
    *,
    epoch: int = 1,
    demand: Mapping[ExpertId, float] | None = None,
) -> Placement:
    """Place a model on a cluster, or raise `PlacementError` with the bytes that are needed and available.

    demand  tokens that each expert receives, in any unit; it decides who gets replicas. None if all are alike

    1. Decode and prefill nodes hold the whole trunk. They and expert hosts hold workspace. Every process has its
       reserve.
    2. KV: a trunk node gets blocks for `kv_tokens`, or as many as it has room for, but never less than one whole
       context. Where that leaves too little room for the first copies of all experts, the nodes that have both
       trunk and experts are held to one common limit: the highest at which every expert fits, again never
       less than one context. Only then are experts refused.
    3. First copies go to the nodes with the role `experts` in proportion to their room, so that each of them gets
       some of each layer.
    4. Replicas follow, up to floor(memory_ratio x experts) copies in all, as `replicas.py` says.

    With experts of different sizes the packing is greedy, largest first, and may refuse what a search could fit.
    """
    _refuse_small_nodes(cluster, footprint)
    plans, shelves = _place_first_copies(cluster, footprint)
    experts = footprint.experts()
    add_replicas(
        shelves, experts, max_replicas=int(cluster.memory_ratio * len(experts)) - len(experts), demand=demand
    )
    placed = {shelf.node: shelf for shelf in shelves}
    return Placement(epoch, tuple(_with_experts(plan, placed.get(plan.node)) for plan in plans))


def spread_first_copies(shelves: Sequence[Shelf], experts: Sequence[ExpertId]) -> list[ExpertId]:
    """Put each expert on the shelf that is least full for its size; return those that fit nowhere.

    Large experts come first, else they go by layer, so that each shelf gets its share of every layer, give or take
    one expert for each other shelf. Each shelf is given one expert before any gets a second.
    """
    queue = [(shelf.fill, -shelf.room_bytes, shelf.node, shelf) for shelf in shelves]
    heapify(queue)
    left_over = []
    for expert in sorted(experts, key=lambda expert: (-_largest(shelves, expert), expert)):
        passed_over = []
        while queue and not queue[0][-1].takes(expert):
            passed_over.append(heappop(queue))
        if queue:
            shelf = queue[0][-1]
            shelf.put(expert)
            heapreplace(queue, (shelf.fill, -shelf.room_bytes, shelf.node, shelf))
        else:
            left_over.append(expert)
        for entry in passed_over:
            heappush(queue, entry)
    return left_over


def _largest(shelves: Sequence[Shelf], expert: ExpertId) -> int:
    return max((shelf.size_of(expert) for shelf in shelves), default=0)


def _place_first_copies(cluster: Cluster, footprint: ModelFootprint) -> tuple[list[NodePlan], list[Shelf]]:
    """Find the most KV at which every expert has a place, and place it there."""

    def attempt(most_blocks: int) -> tuple[list[NodePlan], list[Shelf], list[ExpertId]]:
        plans = [_reserve(cluster, node, footprint, most_blocks) for node in cluster.nodes]
        shelves = [
            Shelf(
                node=node.name,
                room_bytes=plan.free_bytes,
                layer_sizes=tuple(footprint.expert_bytes[node.weight_format]),
                is_home=DECODE in node.roles,
            )
            for node, plan in zip(cluster.nodes, plans, strict=True)
            if node.hosts_experts
        ]
        return plans, shelves, spread_first_copies(shelves, footprint.experts())

    least, most = _least_blocks(cluster, footprint), _wanted_blocks(cluster, footprint)
    plans, shelves, left_over = attempt(most)
    if not left_over:
        return plans, shelves
    plans, shelves, left_over = attempt(least)
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


def _reserve(cluster: Cluster, node: Node, footprint: ModelFootprint, most_blocks: int) -> NodePlan:
    """A node's plan without experts; `most_blocks` limits the KV of a node that hosts experts as well."""
    last_layer = footprint.num_layers if node.holds_trunk else 0
    plan = NodePlan(
        node=node.name,
        roles=node.roles,
        first_layer=0,
        last_layer=last_layer,
        experts=(),
        trunk_bytes=costs.trunk_bytes(footprint, 0, last_layer),
        expert_bytes=0,
        kv_blocks=0,
        kv_bytes=0,
        workspace_bytes=costs.workspace_bytes(cluster, node, footprint),
        process_bytes=cluster.process_reserve_bytes,
        memory_bytes=node.memory_bytes,
    )
    if not node.holds_trunk:
        return plan
    block_bytes = costs.kv_block_bytes(footprint, 0, last_layer)
    blocks = min(_wanted_blocks(cluster, footprint), plan.free_bytes // block_bytes)
    if node.hosts_experts:
        blocks = min(blocks, most_blocks)
    return replace(plan, kv_blocks=blocks, kv_bytes=blocks * block_bytes)


def _least_blocks(cluster: Cluster, footprint: ModelFootprint) -> int:
    return costs.kv_blocks(footprint, costs.context_limit(cluster, footprint))


def _wanted_blocks(cluster: Cluster, footprint: ModelFootprint) -> int:
    return max(costs.kv_blocks(footprint, cluster.kv_tokens), _least_blocks(cluster, footprint))


def _with_experts(plan: NodePlan, shelf: Shelf | None) -> NodePlan:
    if shelf is None:
        return plan
    return replace(plan, experts=tuple(sorted(shelf.experts)), expert_bytes=shelf.used_bytes)


def _refuse_small_nodes(cluster: Cluster, footprint: ModelFootprint) -> None:
    """Raise for all nodes that lack room for what comes before any expert; the error's numbers are the worst's."""
    short = []
    for node in cluster.nodes:
        parts = {
            "process": cluster.process_reserve_bytes,
            "trunk": costs.trunk_bytes(footprint, 0, footprint.num_layers) if node.holds_trunk else 0,
            "KV of one context": _least_blocks(cluster, footprint)
            * costs.kv_block_bytes(footprint, 0, footprint.num_layers)
            * node.holds_trunk,
            "workspace": costs.workspace_bytes(cluster, node, footprint),
        }
        if sum(parts.values()) > node.memory_bytes:
            short.append((sum(parts.values()), node, parts))
    if not short:
        return
    told = "; ".join(
        f"node {node.name} needs {needed} bytes before any expert and has {node.memory_bytes} ("
        + ", ".join(f"{part} {format_bytes_rounded(size)}" for part, size in parts.items() if size)
        + ")"
        for needed, node, parts in short
    )
    remedy = (
        "raise memory, lower context_tokens or max_batch_rows, or give such a node the role experts alone"
    )
    needed, node, _ = max(short, key=lambda entry: entry[0] - entry[1].memory_bytes)
    raise PlacementError(
        f"{told}: {remedy}", node=node.name, needed_bytes=needed, available_bytes=node.memory_bytes
    )


def _no_room(shelves: Sequence[Shelf], left_over: Sequence[ExpertId]) -> PlacementError:
    """Why the first copies do not fit, in whole experts: free bytes too few for one expert do not count as available."""
    available = sum(shelf.used_bytes for shelf in shelves)
    needed = available + sum(min(shelf.size_of(expert) for shelf in shelves) for expert in left_over)
    num_placed = sum(len(shelf.experts) for shelf in shelves)
    roomiest = max(shelves, key=lambda shelf: (shelf.free_bytes, shelf.node))
    return PlacementError(
        f"the model's {num_placed + len(left_over)} experts need {needed} bytes on the nodes with the role experts, "
        f"which have room for {num_placed} of them, {available} bytes, beside process, trunk, KV of one context "
        f"and workspace: {needed - available} bytes short (an expert takes {roomiest.size_of(left_over[0])}, the "
        f"most left on one node is {roomiest.free_bytes}, on {roomiest.node}); add memory or nodes, or lower "
        "context_tokens or max_batch_rows",
        needed_bytes=needed,
        available_bytes=available,
    )
