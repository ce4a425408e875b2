"""What another topology file would change, as the message that says so. Pure; knows no socket and begins nothing."""

from collections.abc import Collection
from dataclasses import asdict, replace
from typing import Any

from edge_runtime.coordinator.deploy import Plan
from edge_runtime.protocol import Planned
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.coverage import coverage_of
from topology.diff import ClusterDiff, diff_clusters
from topology.placement import Placement
from topology.traits import ExpertTraits


def preview_of(
    cluster: Cluster,
    placement: Placement,
    present: Collection[str],
    plan: Plan,
    footprint: ModelFootprint,
    traits: ExpertTraits | None = None,
) -> Planned:
    """The difference between what runs, of which the nodes in `present` are there, and `plan`.

    Raises TopologyError if there is no way from one to the other within the nodes' memory.
    """
    held = replace(placement, nodes=tuple(share for share in placement.nodes if share.node in present))
    diff = diff_clusters(cluster, held, plan.cluster, plan.placement, footprint)
    text, body = diff_text(diff), diff_body(diff)
    if traits is not None:
        before, after = coverage_of(held, traits), coverage_of(plan.placement, traits)
        body |= {"coverage_before": asdict(before), "coverage_after": asdict(after)}
        if before != after:
            text += (
                f"\nserved where requests live: {before.exact:.1%} exactly now and {after.exact:.1%} then, with "
                f"stand-ins {before.covered:.1%} and {after.covered:.1%}, as predicted"
            )
    return Planned(text, body)


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
