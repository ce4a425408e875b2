"""What `status` shows, as a plain map: the cluster, the coordinator and every node. Pure; knows no socket."""

from typing import Any

import msgspec

from edge_runtime.coordinator.deploy import experts_without_host
from edge_runtime.coordinator.state import ClusterState, NodeRecord
from edge_runtime.coordinator.streams import Streams
from topology.cluster import Cluster, find_node
from topology.placement import Placement


def status_body(
    cluster: Cluster,
    placement: Placement,
    state: ClusterState,
    streams: Streams,
    *,
    coordinator: dict[str, Any],
    now: float,
) -> dict[str, Any]:
    """The body of a StatusReply; every value fits in JSON."""
    return {
        "cluster": cluster.name,
        "epoch": placement.epoch,
        "ready": state.is_ready,
        "numerics": state.numerics,
        "waiting_for": state.waiting_for(),
        "experts_without_host": experts_without_host(placement, set(state.alive)),
        "coordinator": coordinator,
        "requests": {
            "in_flight": len(streams),
            "finished": streams.num_finished,
            "failed": streams.num_failed,
        },
        "nodes": [_node_body(cluster, placement, record, streams, now) for record in state.nodes.values()],
    }


def _node_body(
    cluster: Cluster, placement: Placement, record: NodeRecord, streams: Streams, now: float
) -> dict[str, Any]:
    node, plan = find_node(cluster, record.name), placement.plan_of(record.name)
    report = msgspec.to_builtins(record.report) if record.report is not None else {}
    return {
        "name": record.name,
        "roles": sorted(node.roles),
        "address": node.address,
        "pid": record.pid or None,
        "state": record.phase,
        "fault": record.fault or None,
        "numerics": record.numerics or None,
        "last_heard_s": round(now - record.last_heard_s, 3) if record.incarnation else None,
        "memory_limit_bytes": plan.memory_bytes,
        "memory_planned_bytes": plan.planned_bytes,
        "memory_used_bytes": report.get("rss_bytes", 0),
        "weight_bytes": record.weight_bytes,
        "loaded_bytes": record.bytes_done,
        "experts": len(plan.experts),
        "in_flight": streams.in_flight(record.name),
        "report": report,
    }
