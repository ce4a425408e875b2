"""Say what a placement gives each node, in bytes, and why. For people and for `plan --json`; decides nothing."""

from dataclasses import dataclass

from topology.cluster import DECODE, Cluster, find_node
from topology.costs import ModelFootprint, context_limit
from topology.placement import NodePlan, Placement


@dataclass(frozen=True)
class NodeRow:
    """One node's share, as a row of a table. Sizes in whole bytes."""

    name: str
    roles: tuple[str, ...]
    weight_format: str
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


def explain(placement: Placement, cluster: Cluster, footprint: ModelFootprint) -> tuple[NodeRow, ...]:
    """One row per node, in the order of the placement."""
    copies = placement.copies()
    num_experts = len(footprint.experts())

    def row(plan: NodePlan) -> NodeRow:
        unique = sum(copies[expert] == 1 for expert in plan.experts)
        reasons = [
            *_trunk_reasons(plan, cluster, footprint),
            _expert_reason(plan, unique=unique, num_experts=num_experts),
        ]
        return NodeRow(
            name=plan.node,
            roles=tuple(sorted(plan.roles)),
            weight_format=find_node(cluster, plan.node).weight_format,
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


def _trunk_reasons(plan: NodePlan, cluster: Cluster, footprint: ModelFootprint) -> list[str]:
    if plan.first_layer == plan.last_layer:
        return ["runs no attention, so holds neither trunk nor KV"]
    tokens = plan.kv_blocks * footprint.block_tokens
    role = "answers requests" if DECODE in plan.roles else "prefills for others"
    reasons = [f"{role}, so holds all {plan.last_layer} layers of the trunk"]
    wanted = max(cluster.kv_tokens, context_limit(cluster, footprint))
    short = f" of the {wanted} wanted, all it has room for beside the rest" if tokens < wanted else ""
    reasons.append(f"KV for {tokens} tokens{short}")
    return reasons


def _expert_reason(plan: NodePlan, *, unique: int, num_experts: int) -> str:
    if "experts" not in plan.roles:
        return "does not have the role experts"
    if not plan.experts:
        return "no room left for an expert"
    others = len(plan.experts) - unique
    return f"{len(plan.experts)} of {num_experts} experts: {unique} only here, {others} also elsewhere"
