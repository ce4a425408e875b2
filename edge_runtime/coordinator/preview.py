"""What another topology file would change, as the message that says so. Pure; knows no socket and begins nothing."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from edge_runtime.coordinator.deploy import Plan
from edge_runtime.coordinator.planning import step_seconds
from edge_runtime.protocol import Planned
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.coverage import coverage_of
from topology.diff import ClusterDiff, diff_clusters
from topology.placement import NodePlan, Placement
from topology.speeds import NOTHING_MEASURED, Measured
from topology.traits import ExpertTraits
from topology.units import counted, format_bytes_rounded

FAR_SLOWER = 2.0  # times a step's time, from which on a change gets a warning: predictions lie within 25 %


def preview_of(
    cluster: Cluster,
    placement: Placement,
    present: Collection[str],
    plan: Plan,
    footprint: ModelFootprint,
    traits: ExpertTraits | None = None,
    measured: Measured = NOTHING_MEASURED,
) -> Planned:
    """The difference between what runs, of which the nodes in `present` are there, and `plan`.

    Raises TopologyError if there is no way from one to the other within the nodes' memory.
    """
    held = replace(placement, nodes=tuple(share for share in placement.nodes if share.node in present))
    diff = diff_clusters(
        cluster,
        held,
        plan.cluster,
        plan.placement,
        footprint,
        speeds=measured.speeds,
        links=measured.links,
        cores=measured.cores,
    )
    text, body = diff_text(diff), diff_body(diff)
    body["holds"] = {share.node: holdings(share) for share in plan.placement.nodes}
    if diff.changes_anything:
        shares = [share for share in plan.placement.nodes if share not in held.nodes]
        text += "".join(f"\n{holdings_text(share)}" for share in shares)
    before_s = step_seconds(cluster, held, footprint, measured)
    after_s = step_seconds(plan.cluster, plan.placement, footprint, measured)
    body["predicted"] = [
        {"requests": count, "before_s": before_s.get(count), "after_s": after_s.get(count)}
        for count in sorted(before_s.keys() | after_s.keys())
    ]
    if diff.changes_anything and diff.step_before_s is not None:
        told = ", ".join(
            f"{entry['requests']} requests at once {_ms(entry['before_s'])} now and {_ms(entry['after_s'])} then"
            for entry in body["predicted"]
            if entry["requests"] > 1
        )
        text += f"; with {told}" if told else ""
    body["warning"] = slower_warning(before_s, after_s) if diff.changes_anything else None
    if traits is not None:
        before, after = coverage_of(held, traits), coverage_of(plan.placement, traits)
        body |= {"coverage_before": asdict(before), "coverage_after": asdict(after)}
        if before != after:
            text += (
                f"\nserved where requests live: {before.exact:.1%} exactly now and {after.exact:.1%} then, with "
                f"stand-ins {before.covered:.1%} and {after.covered:.1%}, as predicted"
            )
    if body["warning"]:
        text += f"\n{body['warning']}"
    return Planned(text, body)


def slower_warning(before_s: Mapping[int, float], after_s: Mapping[int, float]) -> str | None:
    """What to say of a change that makes tokens far slower, at the number of requests at once that it hurts most; None if
    none becomes more than `FAR_SLOWER` times as slow.

    before_s, after_s  requests at once -> predicted seconds between two tokens
    """
    times = {count: after_s[count] / before_s[count] for count in before_s if count in after_s}
    worst = max(times, key=times.__getitem__, default=None)
    if worst is None or times[worst] <= FAR_SLOWER:
        return None
    return (
        f"warning: tokens come {times[worst]:.3g} times as slowly after this change: {_ms(before_s[worst])} now and "
        f"{_ms(after_s[worst])} then with {counted(worst, 'request')} at once, as predicted"
    )


def _ms(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds * 1e3:.3g} ms"


def holdings(share: NodePlan) -> dict[str, int]:
    """What a node will have allocated, in bytes: weights and KV within 5 %, buffers and process at most."""
    return {
        "weight_bytes": share.trunk_bytes + share.expert_bytes,
        "kv_bytes": share.kv_bytes,
        "kv_blocks": share.kv_blocks,
        "workspace_bytes": share.workspace_bytes,
        "process_bytes": share.process_bytes,
    }


def holdings_text(share: NodePlan) -> str:
    """The same for people."""
    parts = {
        "weights": share.trunk_bytes + share.expert_bytes,
        "KV": share.kv_bytes,
        "buffers at most": share.workspace_bytes,
        "the interpreter at most": share.process_bytes,
    }
    told = ", ".join(f"{what} {format_bytes_rounded(size)}" for what, size in parts.items() if size)
    planned, memory = map(format_bytes_rounded, (share.planned_bytes, share.memory_bytes))
    return f"{share.node} will hold {told}: {planned} of {memory}"


def diff_text(diff: ClusterDiff) -> str:
    """For people."""
    return str(diff) if diff.changes_anything else "nothing changes"


def diff_body(diff: ClusterDiff) -> dict[str, Any]:
    """For scripts; every value fits in JSON."""
    return {
        "changes_anything": diff.changes_anything,
        "nodes": [
            {
                "name": node.node,
                "kind": node.kind,
                "changes": [str(change) for change in node.changes],
                "load_experts": len(node.load),
                "drop_experts": len(node.drop),
                "load_bytes": node.load_bytes,
                "drop_bytes": node.drop_bytes,
                "source": node.source or None,
                "seconds": round(node.seconds, 6),
            }
            for node in diff.nodes
        ],
        "links": [str(change) for change in diff.links],
        "settings": [str(change) for change in diff.settings],
        "rounds": len(diff.migration.rounds),
        "load_bytes": diff.load_bytes,
        "drop_bytes": diff.drop_bytes,
        "seconds": round(diff.seconds, 6),
        "step_before_s": diff.step_before_s,
        "step_after_s": diff.step_after_s,
    }
