"""What another topology file would change, as the message that says so. Pure; knows no socket and begins nothing."""

import math
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
from topology.serving import default_counts, predict_serving
from topology.speeds import NOTHING_MEASURED, Measured, machines_of
from topology.traits import ExpertTraits


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
    before_s = _steps(cluster, held, footprint, measured)
    after_s = _steps(plan.cluster, plan.placement, footprint, measured)
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
    if traits is not None:
        before, after = coverage_of(held, traits), coverage_of(plan.placement, traits)
        body |= {"coverage_before": asdict(before), "coverage_after": asdict(after)}
        if before != after:
            text += (
                f"\nserved where requests live: {before.exact:.1%} exactly now and {after.exact:.1%} then, with "
                f"stand-ins {before.covered:.1%} and {after.covered:.1%}, as predicted"
            )
    return Planned(text, body)


def _steps(
    cluster: Cluster, placement: Placement, footprint: ModelFootprint, measured: Measured
) -> dict[int, float]:
    """Requests at once -> predicted seconds between two tokens."""
    machines = machines_of(cluster, measured.speeds, measured.links, measured.cores)
    counts = default_counts(cluster.max_requests)
    found = predict_serving(footprint, machines, placement, counts)
    return {one.requests: one.seconds for one in found if math.isfinite(one.seconds)}


def _ms(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds * 1e3:.3g} ms"


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
