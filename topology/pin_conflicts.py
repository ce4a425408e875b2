"""Say where pins keep the members of a similarity group from standing apart. Knows no placement; decides nothing.

Pins are always obeyed. A group whose members are held on one node, though there are nodes enough for each, serves no other
node: there nobody can stand in for them, and nothing is left of them when that node goes.
"""

from collections import defaultdict

from topology.cluster import Cluster
from topology.traits import ExpertTraits

APART_BY = ("similarity",)
"""Rules of placement that set members of a group apart."""


def pin_conflicts(cluster: Cluster, traits: ExpertTraits) -> list[str]:
    """A sentence for each group of which pins put several members on one node, by layer and node."""
    if cluster.placement not in APART_BY:
        return []
    row_of = {layer: row for row, layer in enumerate(traits.layers)}
    num_hosts = sum(node.hosts_experts for node in cluster.nodes)
    pinned: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for pin in cluster.pins:
        layer, index = pin.expert
        if layer in row_of and index < traits.frequency.shape[1]:
            group = int(traits.groups.group_of[row_of[layer], index])
            pinned[layer, group, pin.node].add(index)
    found = []
    for (layer, group, node), indices in sorted(pinned.items()):
        members = traits.groups.members(row_of[layer])[group]
        if len(indices) < 2 or num_hosts < 2:
            continue
        all_of = "all" if len(indices) == len(members) else str(len(indices))
        found.append(
            f"layer {layer}: experts {_listed(members)} are one similarity group, and pins put {all_of} of them "
            f"({_listed(sorted(indices))}) on {node}, where they cannot stand in for one another; pin at most one of them "
            f"to {node}, or take another placement than {cluster.placement}"
        )
    return found


def _listed(indices: list[int]) -> str:
    return ", ".join(map(str, indices[:-1])) + f" and {indices[-1]}" if len(indices) > 1 else str(indices[0])
