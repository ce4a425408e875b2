"""From a topology file to a placement, and from that to what each node is told. Pure.

Knows the file, the model's bytes and who is there; nothing of what is loaded or running.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_runtime.coordinator.routes import counts_wanted, homes_of
from edge_runtime.protocol import Deploy, PeerAddress, Share
from topology.cluster import Cluster, find_node
from topology.costs import ModelFootprint, context_limit
from topology.errors import TopologyError
from topology.node_plan import Stage
from topology.placement import Placement, plan_placement
from topology.speeds import NOTHING_MEASURED, Measured
from topology.traits import ExpertTraits, Traffic

Joint = Callable[[Sequence[str], ExpertTraits | None], tuple[ExpertTraits | None, Traffic | None]]
"""Homes, and what is known of the experts -> that with the demand of each cluster of requests, and who gets which."""


class Plan(NamedTuple):
    """A topology file and what its nodes hold; nodes that are away have no share."""

    cluster: Cluster
    placement: Placement

    def holds(self, name: str) -> bool:
        """Whether that node has a share."""
        return any(share.node == name for share in self.placement.nodes)

    @property
    def homes(self) -> list[str]:
        """Nodes with a share that run attention."""
        return [share.node for share in self.placement.nodes if share.last_layer > share.first_layer]


def plan_for(
    cluster: Cluster,
    footprint: ModelFootprint,
    present: Collection[str],
    previous: Placement | None = None,
    epoch: int = 1,
    traits: ExpertTraits | None = None,
    measured: Measured = NOTHING_MEASURED,
    joint: Joint | None = None,
) -> Placement:
    """Place the model on the nodes of the file that are present, moving as little as may be.

    traits    what calibration found of the experts, for files whose `placement` looks at it
    measured  of the nodes, as far as they have reported; it counts before what the file says
    joint     what each home will be asked for, where a router sends like to like

    Raises PlacementError if they cannot hold it.
    """
    there = replace(
        cluster,
        nodes=tuple(node for node in cluster.nodes if node.name in present),
        pins=tuple(pin for pin in cluster.pins if pin.node in present),
    )
    traffic = None
    if joint is not None:
        traits, traffic = joint(homes_of(there), traits)
    return plan_placement(
        there,
        footprint,
        epoch=epoch,
        speeds=measured.speeds,
        links=measured.links,
        cores=measured.cores,
        previous=previous,
        traits=traits,
        traffic=traffic,
    )


def refuse_unchangeable(running: Cluster, wanted: Cluster, context_tokens: int) -> None:
    """Raise TopologyError if `wanted` changes what only a new start can change.

    context_tokens  that the running cluster can have at most
    """
    faults = []
    if wanted.context_tokens is not None and wanted.context_tokens > context_tokens:
        faults.append(
            f"[cluster] context_tokens: found {wanted.context_tokens}, the running cluster was started with {context_tokens}"
        )
    keys = (
        "name",
        "model",
        "coordinator",
        "keys",
        "calibration",
        "sub_experts",
        "split_tiers",
        "gate",
        "heartbeat_s",
        "lost_after_s",
    )
    for key in (*keys, "weights_rate_bps"):
        found, expected = getattr(wanted, key), getattr(running, key)
        if found != expected:
            faults.append(
                f"[cluster] {key.removesuffix('_s').removesuffix('_bps')}: found {found}, the running cluster has {expected}"
            )
    by_name = {node.name: node for node in running.nodes}
    for node in wanted.nodes:
        known = by_name.get(node.name)
        for key in ("address", "threads", "device") if known is not None else ():
            found, expected = getattr(node, key), getattr(known, key)
            if found != expected:
                faults.append(f"{node.name}, {key}: found {found}, the running node has {expected}")
    if faults:
        raise TopologyError(f"{wanted.source}: {'; '.join(faults)}; stop it and start it anew to change that")


def deploy_for(
    name: str,
    cluster: Cluster,
    footprint: ModelFootprint,
    placement: Placement,
    *,
    model_hash: str,
    public_keys: dict[str, str],
    counts_now: bool = True,
) -> Deploy:
    """The message that makes node `name` load its share of `placement`.

    counts_now   the placement is the one being served already
    public_keys  node -> its CURVE key, for peers to check whom they call; empty without keys
    """
    plan = placement.plan_of(name)
    node = find_node(cluster, name)
    stages = _stages_of(name, placement)
    experts: list[list[int]] = [[] for _ in range(footprint.num_layers)]
    for expert in plan.experts:
        experts[expert.layer].append(expert.index)
    return Deploy(
        epoch=placement.epoch,
        share=Share(plan.first_layer, plan.last_layer, experts, plan.kv_blocks),
        hosts=hosts_table(cluster, footprint, placement),
        peers=[
            PeerAddress(peer.name, peer.address, public_keys.get(peer.name, "")) for peer in cluster.nodes
        ],
        settings={
            "context_tokens": context_limit(cluster, footprint),
            "max_batch_rows": cluster.max_batch_rows,
            "max_requests": cluster.max_requests,
            "call_deadline_s": cluster.call_deadline_s,
            "weight_format": node.weight_format,
            "trunk_format": node.trunk_format,
            "selector": cluster.selector,
            "drop": cluster.drop,
            "defer": cluster.defer,
            "look_ahead": cluster.look_ahead,
            "counts_experts": counts_wanted(cluster, node.roles),
            "planned_bytes": plan.planned_bytes,
        },
        model_hash=model_hash,
        counts_now=counts_now,
        stages=[cluster.node_names.index(stage.node) for stage in stages],
        first_layers=[stage.first_layer for stage in stages],
    )


def _stages_of(name: str, placement: Placement) -> Sequence[Stage]:
    """The stages of its decode group, if that has several."""
    for group in placement.groups:
        if name in group.nodes and len(group.stages) > 1:
            return group.stages
    return ()


def hosts_table(cluster: Cluster, footprint: ModelFootprint, placement: Placement) -> list[list[list[int]]]:
    """By layer, by expert: indices of its hosts in the file's order of nodes; an empty list for a dense layer."""
    index_of = {node.name: index for index, node in enumerate(cluster.nodes)}
    table: list[list[list[int]]] = [[] for _ in range(footprint.num_layers)]
    for layer in footprint.moe_layers:
        table[layer] = [[] for _ in range(footprint.experts_per_layer)]
    for (layer, index), nodes in placement.hosts().items():
        table[layer][index] = [index_of[node] for node in nodes]
    return table


def experts_without_host(placement: Placement, alive: set[str]) -> int:
    """How many experts no living node holds."""
    return sum(not alive.intersection(nodes) for nodes in placement.hosts().values())
