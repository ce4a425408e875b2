"""Changes that memory allows only in rounds: all are carried out, no node ever holds more than it may, failures lead back."""

from dataclasses import replace

import pytest

from edge_runtime.coordinator.deploy import Plan
from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.coordinator.journey import rounds_to
from edge_runtime.coordinator.state import Joined, Unreachable
from tests.edge_runtime.coordinator.test_epochs import (
    PARTS,
    World,
    cluster_of,
    last_announcement,
    node,
    process,
    unhosted,
)
from topology.cluster import MIB, Cluster, Pin
from topology.errors import TopologyError
from topology.placement import plan_placement

TIGHT = cluster_of(node("n1", 359), node("n2", 352, "experts"), node("n3", 352, "experts"))
LOOSE = cluster_of(node("n1", 400), node("n2", 400, "experts"), node("n3", 400, "experts"))


def exchanged(cluster: Cluster) -> Cluster:
    """The file in which n2 and n3 change an expert each."""
    placement = plan_placement(cluster, PARTS)
    first, second = (placement.plan_of(name).experts[0] for name in ("n2", "n3"))
    return replace(cluster, pins=(Pin(first, "n3"), Pin(second, "n2")))


class Tight(World):
    """Three nodes, two of which are full; looks at what each has in memory whenever something was loaded."""

    def __init__(self) -> None:
        super().__init__(TIGHT)
        self.placements = {1: self.epochs.placement}

    def loaded(self, found, epoch, counts_now):
        for number, plan in self.epochs.plans.items():
            self.placements[number] = plan.placement
        held = {
            expert
            for number in {*found.shares, epoch}
            for share in self.placements[number].nodes
            if share.node == found.name
            for expert in share.experts
        }
        share = next(s for s in self.placements[epoch].nodes if s.node == found.name)
        assert share.reserved_bytes + len(held) * MIB <= share.memory_bytes, found.name
        super().loaded(found, epoch, counts_now)


@pytest.fixture
def tight() -> Tight:
    world = Tight()
    for name in TIGHT.node_names:
        world.start(name)
    world.settle(1.0)
    return world


def first_round(world: World) -> None:
    """Everybody does what is asked until the second round has begun."""
    while "round 1 of" in world.epochs.change.why:
        for found in world.able():
            if "round 1 of" in world.epochs.change.why and (found.inbox or found.loads):
                world.take(found)
        world.pass_time(0.2)
    assert world.epochs.change.phase == "loading"


def test_a_change_without_room_beside_the_old_is_made_in_rounds(tight) -> None:
    wanted = exchanged(TIGHT)
    goal = tight.change(wanted)
    assert goal > 2 and "round 1 of" in tight.epochs.change.why
    hosted = []
    while tight.epochs.change is not None:
        for found in tight.able():
            if found.inbox or found.loads:
                tight.take(found)
                tight.check()
                hosted.append(unhosted(tight))
        tight.pass_time(0.2)
    assert set(hosted) == {0}, "an expert was without a host on the way"
    tight.settle(2.0)
    tight.check_settled()
    assert tight.epochs.active == goal and tight.epochs.cluster == wanted
    for pin in wanted.pins:
        assert pin.expert in tight.epochs.placement.plan_of(pin.node).experts
    assert [outcome.epoch for outcome in tight.epochs.outcomes if outcome.is_done] == [goal], (
        "one change, told once"
    )


def test_a_later_round_that_fails_leads_back_to_where_it_began(tight) -> None:
    before = tight.epochs.placement
    goal = tight.change(exchanged(TIGHT))
    first_round(tight)
    tight.call("cannot_load", "n2", tight.epochs.change.epoch, "its disk is broken")
    failed = tight.epochs.outcomes[-1]
    assert (failed.epoch, failed.is_done) == (goal, False) and "its disk is broken" in failed.detail
    tight.settle(10.0)
    tight.check_settled()
    assert tight.epochs.placement.nodes == before.nodes and tight.epochs.cluster == TIGHT
    assert tight.epochs.outcomes[-1].is_done and "back to what was before" in tight.epochs.outcomes[-1].detail


def test_whoever_asked_gives_the_whole_change_up_by_the_epoch_it_knows(tight) -> None:
    before = tight.epochs.placement
    goal = tight.change(exchanged(TIGHT))
    tight.call("give_up", goal, "never mind")
    tight.settle(2.0)
    assert tight.epochs.placement == before and not tight.epochs.outcomes[-1].is_done


def test_a_node_lost_on_the_way_ends_the_journey_and_what_is_left_is_mended(tight) -> None:
    tight.change(exchanged(TIGHT))
    first_round(tight)
    process(tight, "n2").is_over = True
    tight.pass_time(9.0)
    assert tight.epochs._journey is None or "lost" in tight.epochs._journey.why
    tight.start("n2")
    tight.settle(30.0)
    tight.check_settled()
    assert not unhosted(tight)


def test_a_node_lost_while_the_others_switch_is_not_waited_for_by_the_next_round(tight) -> None:
    tight.change(exchanged(TIGHT))
    while tight.epochs.change.phase == "loading":
        for found in tight.able():
            if tight.epochs.change.phase == "loading" and (found.inbox or found.loads):
                tight.take(found)
    process(tight, "n2").is_over = True
    tight.call("apply", Unreachable("n2"))
    assert unhosted(tight) and last_announcement(tight).replacing, "mending begins when the change is over"
    for found in tight.able():
        while found.inbox or found.loads:
            tight.take(found)
    assert tight.epochs.change is None, "n2 is gone, and a round that needs it would wait in vain"
    tight.start("n2")
    tight.settle(30.0)
    tight.check_settled()
    assert not unhosted(tight)


def test_room_enough_needs_one_round_and_no_way_is_refused_with_bytes() -> None:
    placement = plan_placement(LOOSE, PARTS)
    wanted = exchanged(LOOSE)
    new = Plan(wanted, plan_placement(wanted, PARTS, previous=placement, epoch=2))
    assert rounds_to(Plan(LOOSE, placement), set(LOOSE.node_names), new, PARTS) == [new]
    full = cluster_of(node("n1", 356), node("n2", 353, "experts"), node("n3", 353, "experts"))
    stuck = Epochs(full, PARTS, plan_placement(full, PARTS), 0.0)
    for name in full.node_names:
        stuck.apply(Joined(name, name.encode(), "one", 1), 0.0)
    with pytest.raises(TopologyError, match="cannot be exchanged.*needs [0-9.]+ [KM]iB"):
        stuck.work_out(stuck.ask(exchanged(full)))
    assert stuck.change is None and stuck.plans.keys() == {1}
