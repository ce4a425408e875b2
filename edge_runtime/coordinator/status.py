"""What `status` shows, as a plain map: the cluster, the coordinator and every node. Pure; knows no socket."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from edge_runtime.coordinator.deploy import experts_without_host
from edge_runtime.coordinator.epochs import Outcome
from edge_runtime.coordinator.state import ClusterState, NodeRecord
from edge_runtime.coordinator.streams import Streams
from topology.cluster import Cluster
from topology.placement import Placement
from topology.speeds import NOTHING_MEASURED, Measured


def status_body(
    cluster: Cluster,
    placement: Placement,
    state: ClusterState,
    streams: Streams,
    *,
    coordinator: dict[str, Any],
    routing: dict[str, Any] | None = None,
    change: str = "",
    leaving: Collection[str] = (),
    outcomes: Sequence[Outcome] = (),
    measured: Measured = NOTHING_MEASURED,
    now: float,
) -> dict[str, Any]:
    """The body of a StatusReply; every value fits in JSON."""
    return {
        "cluster": cluster.name,
        "epoch": placement.epoch,
        "ready": state.is_ready,
        "state": service_state(placement, state),
        "numerics": state.numerics,
        "waiting_for": state.waiting_for(),
        "to_start": state.to_start(),
        "change": change or None,
        "last_change": outcomes[-1].detail if outcomes else None,
        "changes": [msgspec.to_builtins(outcome) for outcome in outcomes],
        "experts_without_host": experts_without_host(placement, set(state.alive)),
        "coordinator": coordinator,
        "routing": routing,
        "requests": {
            "in_flight": len(streams),
            "finished": streams.num_finished,
            "failed": streams.num_failed,
            "refused": streams.num_refused,
        },
        "groups": [
            {
                "stages": [
                    {"node": stage.node, "first_layer": stage.first_layer, "last_layer": stage.last_layer - 1}
                    for stage in group.stages
                ],
                "serves": set(state.alive).issuperset(group.nodes),
                "in_flight": streams.in_flight(group.nodes[0]),
            }
            for group in placement.groups
        ],
        "nodes": [
            _node_body(cluster, placement, record, streams, now, is_leaving=record.name in leaving)
            | {"speed": _speed_body(cluster, record.name, measured)}
            for record in state.nodes.values()
        ],
        "links": _links_body(cluster, measured),
    }


def service_state(placement: Placement, state: ClusterState) -> Literal["ready", "degraded", "waiting"]:
    """Whether requests are answered: by all that is in the file, by some group that has all it needs, or not now."""
    if state.is_ready:
        return "ready"
    alive = set(state.alive)
    some_group = any(alive.issuperset(group.nodes) for group in placement.groups)
    return "degraded" if some_group and not experts_without_host(placement, alive) else "waiting"


def _speed_body(cluster: Cluster, name: str, measured: Measured) -> dict[str, Any]:
    """What the file says of a node's speed, and what was measured; None for what nobody says."""
    node = next((node for node in cluster.nodes if node.name == name), None)
    found = measured.speeds.get(name)
    return {
        "declared": {
            "memory_bytes_per_s": node.memory_bytes_per_s if node else None,
            "flops": node.flops if node else None,
        },
        "measured": msgspec.to_builtins(found) if found is not None else None,
        "cores": measured.cores.get(name),
    }


def _links_body(cluster: Cluster, measured: Measured) -> list[dict[str, Any]]:
    """Links that were measured, beside what the file says of them."""
    names = set(cluster.node_names)
    return [
        {
            "between": [a, b],
            "declared": {
                "rtt_s": cluster.link(a, b).rtt_s,
                "bandwidth_bps": cluster.link(a, b).bandwidth_bps,
            },
            "measured": msgspec.to_builtins(link),
        }
        for (a, b), link in sorted(measured.links.items())
        if {a, b} <= names
    ]


def _node_body(
    cluster: Cluster,
    placement: Placement,
    record: NodeRecord,
    streams: Streams,
    now: float,
    *,
    is_leaving: bool,
) -> dict[str, Any]:
    node = next((node for node in cluster.nodes if node.name == record.name), None)
    plan = next((plan for plan in placement.nodes if plan.node == record.name), None)
    report = msgspec.to_builtins(record.report) if record.report is not None else {}
    for told_elsewhere in ("speed", "links", "cores"):
        report.pop(told_elsewhere, None)
    return {
        "name": record.name,
        "roles": sorted(node.roles) if node else [],
        "used_for": sorted(plan.roles) if plan else [],
        "layers": [plan.first_layer, plan.last_layer - 1] if plan and plan.last_layer else None,
        "address": node.address if node else None,
        "pid": record.pid or None,
        "state": "draining" if is_leaving and record.serves else record.phase,
        "fault": record.fault or None,
        "whose_fault": record.whose if record.fault else None,
        "numerics": record.numerics or None,
        "last_heard_s": round(now - record.last_heard_s, 3) if record.incarnation else None,
        "memory_limit_bytes": node.memory_bytes if node else 0,
        "memory_planned_bytes": plan.planned_bytes if plan else 0,
        "memory_used_bytes": report.get("rss_bytes", 0),
        "weight_bytes": record.weight_bytes,
        "loaded_bytes": record.bytes_done,
        "loading": record.progress if record.phase == "loading" and record.progress else None,
        "experts": len(plan.experts) if plan else 0,
        "in_flight": streams.in_flight(record.name),
        "in_prefill": streams.in_flight(record.name, "prefill"),
        "report": report,
    }
