"""What a placement is worked out from, as a value, and the working out. Pure.

It takes from milliseconds to seconds, so the coordinator has it done beside its loop; whether the answer still fits by
then is for whoever asked.
"""

import contextlib
import math
import statistics
from collections.abc import Collection
from typing import NamedTuple

from edge_runtime.coordinator.deploy import Joint, Plan, plan_for
from edge_runtime.coordinator.journey import rounds_to
from topology import costs
from topology.cluster import DECODE, Cluster
from topology.costs import ModelFootprint
from topology.errors import TopologyError
from topology.placement import Placement
from topology.serving import default_counts, predict_serving
from topology.speeds import Measured, machines_of
from topology.traits import ExpertTraits

WORTH_STARTING_ANEW = 1.1  # times quicker


class Ask(NamedTuple):
    """A placement that is wanted.

    cluster    the file that it is of
    names      nodes that may get a share
    present    nodes that are there: what the others have counts for nothing on the way
    origin     what counts now
    epoch      of the first round that leads to it
    goal       the placement, where it is known and only the way is not
    is_urgent  somebody waits for what it loads: all in one round, beside what is there
    is_return  nodes are back: what was made to get along without them is given up where that is much better
    """

    cluster: Cluster
    names: tuple[str, ...]
    present: frozenset[str]
    origin: Plan
    epoch: int
    measured: Measured
    goal: Placement | None = None
    is_urgent: bool = False
    is_return: bool = False


class Found(NamedTuple):
    """What came of an Ask. rounds: the placements to load one after another, the last of them what was asked for."""

    ask: Ask
    plan: Plan
    rounds: tuple[Plan, ...]


def work_out(ask: Ask, footprint: ModelFootprint, traits: ExpertTraits | None, joint: Joint | None) -> Found:
    """Place, and find the way there. Raises TopologyError if the nodes' memory allows the one or the other not."""
    if ask.is_return:
        return _after_return(ask, footprint, traits, joint)
    return _way_to(ask, ask.goal or _placed(ask, footprint, traits, joint, ask.origin.placement), footprint)


def _way_to(ask: Ask, placement: Placement, footprint: ModelFootprint) -> Found:
    plan = Plan(ask.cluster, placement)
    if ask.is_urgent or (
        plan.cluster == ask.origin.cluster and placement.nodes == ask.origin.placement.nodes
    ):
        return Found(ask, plan, (plan,))
    return Found(ask, plan, tuple(rounds_to(ask.origin, ask.present, plan, footprint)))


def _after_return(
    ask: Ask, footprint: ModelFootprint, traits: ExpertTraits | None, joint: Joint | None
) -> Found:
    """The placement that moves little, or one made from scratch: groups that were made one loss after another are lopsided.

    Four machines, 5 ms apart, of which one has room for all: after its loss and return the plan that moves little takes
    26 ms from token to token with 4 requests, a fresh one 5 (`far_rooms`, predicted).
    """
    kept = _placed(ask, footprint, traits, joint, ask.origin.placement)
    with contextlib.suppress(TopologyError):
        fresh = _placed(ask, footprint, traits, joint, None)
        extra = loaded_bytes(ask, fresh, footprint) - loaded_bytes(ask, kept, footprint)
        one_copy = sum(
            costs.expert_bytes(footprint, costs.AS_STORED, expert.layer) for expert in footprint.experts()
        )
        if extra <= one_copy and _speed_up(ask, kept, fresh, footprint) >= WORTH_STARTING_ANEW:
            return _way_to(ask, fresh, footprint)
    try:
        return _way_to(ask, kept, footprint)
    except TopologyError:  # no way in rounds: beside what is there, as after a loss
        return _way_to(ask._replace(is_urgent=True), kept, footprint)._replace(ask=ask)


def loaded_bytes(ask: Ask, placement: Placement, footprint: ModelFootprint) -> int:
    """Bytes of experts that nodes lack for it."""
    held = {
        share.node: set(share.experts) for share in ask.origin.placement.nodes if share.node in ask.present
    }
    return sum(
        costs.expert_bytes(footprint, share.weight_format, expert.layer)
        for share in placement.nodes
        for expert in set(share.experts) - held.get(share.node, set())
    )


def step_seconds(
    cluster: Cluster, placement: Placement, footprint: ModelFootprint, measured: Measured
) -> dict[int, float]:
    """Requests at once -> predicted seconds between two tokens."""
    machines = machines_of(cluster, measured.speeds, measured.links, measured.cores)
    found = predict_serving(footprint, machines, placement, default_counts(cluster.max_requests))
    return {one.requests: one.seconds for one in found if math.isfinite(one.seconds)}


def _speed_up(ask: Ask, kept: Placement, fresh: Placement, footprint: ModelFootprint) -> float:
    """By what factor `fresh` is quicker, as a mean over numbers of requests at once; 0 if that cannot be told."""
    before = step_seconds(ask.cluster, kept, footprint, ask.measured)
    after = step_seconds(ask.cluster, fresh, footprint, ask.measured)
    ratios = [before[count] / after[count] for count in before.keys() & after.keys() if after[count] > 0]
    return statistics.geometric_mean(ratios) if ratios else 0.0


def _placed(
    ask: Ask,
    footprint: ModelFootprint,
    traits: ExpertTraits | None,
    joint: Joint | None,
    previous: Placement | None,
) -> Placement:
    refuse_nobody(ask.cluster, ask.names)
    return plan_for(
        ask.cluster,
        footprint,
        ask.names,
        previous,
        ask.epoch,
        traits,
        ask.measured,
        joint,
    )


def refuse_nobody(cluster: Cluster, names: Collection[str]) -> None:
    """Raise TopologyError if none of these nodes may answer."""
    if not any(DECODE in node.roles for node in cluster.nodes if node.name in names):
        raise TopologyError(
            f"no node is left that may answer requests; {', '.join(names) or 'nobody'} is there"
        )
