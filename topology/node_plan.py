"""What a placement says: each node's share, the homes of each decode group, and where every expert lives. Values only."""

from collections import Counter
from dataclasses import dataclass

from topology.ids import ExpertId


@dataclass(frozen=True)
class Stage:
    """A range of layers of a decode group and the node that runs it, with KV of its own."""

    node: str
    first_layer: int
    last_layer: int
    """Exclusive."""

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer)

    def __str__(self) -> str:
        return f"{self.node} layers {self.first_layer}-{self.last_layer - 1}"


@dataclass(frozen=True)
class GroupPlan:
    """The homes that together run all layers of a request, in the order of the layers. One stage is a plain home."""

    stages: tuple[Stage, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(stage.node for stage in self.stages)

    def __str__(self) -> str:
        return ", ".join(map(str, self.stages)) if len(self.stages) > 1 else self.nodes[0]


@dataclass(frozen=True)
class NodePlan:
    """What one node is to hold. All sizes in whole bytes."""

    node: str
    roles: frozenset[str]
    """What the plan uses it for: the roles of the file, less those that the plan leaves out; empty if it is not used."""
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
    weight_format: str = "as_stored"
    """How it keeps its experts; one that changes makes them other bytes."""
    trunk_format: str = "as_stored"
    """How it keeps the matrices of its trunk."""
    device: str = "cpu"
    """What it computes on."""

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

    @property
    def layers(self) -> range:
        """Layers of its trunk."""
        return range(self.first_layer, self.last_layer)


@dataclass(frozen=True)
class Placement:
    """Experts -> nodes, and what else each node holds, as one version (`epoch`)."""

    epoch: int
    nodes: tuple[NodePlan, ...]
    """In the order of the topology file."""
    groups: tuple[GroupPlan, ...] = ()
    """Where a request may live: each group runs all layers. In the order of the file by their first stage."""
    rule: str = "spread"
    """By which its experts were placed; one of another rule has nothing that is right where it is."""

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
