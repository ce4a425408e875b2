"""The way from the placement that counts to another one, as the rounds that memory allows. Pure.

Most changes are one round: everything is loaded beside what is there. Where a node's memory has no room for both, experts go
elsewhere first, or are dropped where others have them: `topology/migration.py` says how, and here its rounds become plans.
"""

from collections.abc import Collection
from dataclasses import replace

import msgspec

from edge_runtime.coordinator.deploy import Plan
from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.migration import plan_migration


class Journey(msgspec.Struct, frozen=True):
    """A change under way.

    goal     epoch of its last round, under which people know it
    rest     rounds after the one that is being loaded
    origin   what counted when it began: where it goes back to if a later round fails
    leaving  nodes that are drained with the last round
    num_done rounds that are over
    """

    goal: int
    rest: tuple[Plan, ...]
    origin: Plan
    why: str
    began_s: float
    leaving: frozenset[str] = frozenset()
    num_done: int = 0
    is_way_back: bool = False


def rounds_to(old: Plan, present: Collection[str], new: Plan, footprint: ModelFootprint) -> list[Plan]:
    """The placements to load one after another, `new` the last; their epochs begin with that of `new`.

    present  nodes that are there; the others hold nothing
    Raises MigrationError if there is no way within the nodes' memory.
    """
    nodes = tuple(share for share in old.placement.nodes if share.node in present)
    rounds = plan_migration(replace(old.placement, nodes=nodes), new.placement, footprint).rounds
    first, found = new.placement.epoch, []
    has_switched = False
    for index, one in enumerate(rounds[:-1]):
        has_switched = has_switched or one.switches_trunks
        base, other = (new.cluster, old.cluster) if has_switched else (old.cluster, new.cluster)
        found.append(Plan(_with_nodes_of(base, other), replace(one.placement, epoch=first + index)))
    return [*found, Plan(new.cluster, replace(new.placement, epoch=first + len(found)))]


def _with_nodes_of(base: Cluster, other: Cluster) -> Cluster:
    """A file as it is on the way: with the nodes that come, or those that have still to go."""
    more = tuple(node for node in other.nodes if node.name not in base.node_names)
    return replace(base, nodes=(*base.nodes, *more))
