"""Say what a placement gives each node, in bytes, and why. For people and for `plan --json`; decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from topology.cluster import DECODE, EXPERTS, Cluster, find_node
from topology.costs import ModelFootprint, context_limit
from topology.ids import describe_experts
from topology.node_plan import NodePlan, Placement


@dataclass(frozen=True)
class NodeRow:
    """One node's share, as a row of a table. Sizes in whole bytes."""

    name: str
    roles: tuple[str, ...]
    weight_format: str
    trunk_format: str
    layers: tuple[int, int] | None
    """First and last layer of its trunk; None without one."""
    process_bytes: int
    trunk_bytes: int
    kv_tokens: int
    kv_bytes: int
    workspace_bytes: int
    num_experts: int
    expert_bytes: int
    planned_bytes: int
    memory_bytes: int
    free_bytes: int
    why: str


def explain(
    placement: Placement,
    cluster: Cluster,
    footprint: ModelFootprint,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> tuple[NodeRow, ...]:
    """One row per node, in the order of the placement. left_out: why a plan uses nodes for less than they may do."""
    copies = placement.copies()
    num_experts = len(footprint.experts())

    def row(plan: NodePlan) -> NodeRow:
        sizes = footprint.expert_bytes[find_node(cluster, plan.node).weight_format]
        smallest = min((size for size in sizes if size), default=0)
        unique = sum(copies[expert] == 1 for expert in plan.experts)
        reasons = [
            *_trunk_reasons(plan, placement, cluster, footprint),
            _expert_reason(plan, cluster, unique=unique, num_experts=num_experts, smallest=smallest),
            *_pin_reasons(plan, cluster),
        ]
        if plan.node in left_out:
            is_idle = not plan.layers and not plan.experts
            reasons = ([] if is_idle else reasons) + [f"left out: {left_out[plan.node]}"]
        return NodeRow(
            name=plan.node,
            roles=tuple(sorted(plan.roles)),
            weight_format=find_node(cluster, plan.node).weight_format,
            trunk_format=plan.trunk_format,
            layers=(plan.first_layer, plan.last_layer - 1) if plan.layers else None,
            process_bytes=plan.process_bytes,
            trunk_bytes=plan.trunk_bytes,
            kv_tokens=plan.kv_blocks * footprint.block_tokens,
            kv_bytes=plan.kv_bytes,
            workspace_bytes=plan.workspace_bytes,
            num_experts=len(plan.experts),
            expert_bytes=plan.expert_bytes,
            planned_bytes=plan.planned_bytes,
            memory_bytes=plan.memory_bytes,
            free_bytes=plan.free_bytes,
            why="; ".join(reasons),
        )

    return tuple(row(plan) for plan in placement.nodes)


def _trunk_reasons(
    plan: NodePlan, placement: Placement, cluster: Cluster, footprint: ModelFootprint
) -> list[str]:
    declared = find_node(cluster, plan.node)
    if not plan.layers:
        if declared.holds_trunk:
            return ["runs no layers in this plan, though its roles allow it, so holds neither trunk nor KV"]
        return ["runs no attention, so holds neither trunk nor KV"]
    tokens = plan.kv_blocks * footprint.block_tokens
    group = next((group for group in placement.groups if plan.node in group.nodes), None)
    if group is not None and len(group.stages) > 1:
        others = ", ".join(str(stage) for stage in group.stages if stage.node != plan.node)
        layers = f"layers {plan.first_layer} to {plan.last_layer - 1} of {footprint.num_layers}"
        reasons = [f"answers requests together with {others}, so holds the trunk of {layers}"]
    else:
        role = "answers requests" if DECODE in plan.roles else "prefills for others"
        reasons = [f"{role}, so holds all {plan.last_layer} layers of the trunk"]
    wanted = max(cluster.kv_tokens, context_limit(cluster, footprint))
    short = f" of the {wanted} wanted, all it has room for beside the rest" if tokens < wanted else ""
    reasons.append(f"KV for {tokens} tokens{short}")
    return reasons


def _expert_reason(plan: NodePlan, cluster: Cluster, *, unique: int, num_experts: int, smallest: int) -> str:
    if EXPERTS not in find_node(cluster, plan.node).roles:
        return "does not have the role experts"
    if EXPERTS not in plan.roles:
        return "hosts no experts in this plan"
    if not plan.experts:
        fits = plan.free_bytes >= smallest
        return "holds no experts: fewer nodes hold all copies" if fits else "no room left for an expert"
    others = len(plan.experts) - unique
    return f"{len(plan.experts)} of {num_experts} experts: {unique} only here, {others} also elsewhere"


def _pin_reasons(plan: NodePlan, cluster: Cluster) -> list[str]:
    pinned = [pin.expert for pin in cluster.pins if pin.node == plan.node]
    return [f"pinned here: {describe_experts(pinned)}"] if pinned else []
