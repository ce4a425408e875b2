"""What a placement becomes when nodes go and come back: it moves little, but does not stay what it was without them."""

from dataclasses import replace

from edge_runtime.coordinator.deploy import Plan, plan_for
from edge_runtime.coordinator.planning import Ask, loaded_bytes, step_seconds, work_out
from tests.support.planning import DEMO, cluster, needed_bytes, node
from topology.cluster import Cluster
from topology.placement import Placement
from topology.speeds import NOTHING_MEASURED

ROOMY = needed_bytes(cluster(), DEMO, 0, 6, 1.05)
SMALL = needed_bytes(cluster(), DEMO, 0, 6, 0.35)
FAR = cluster(
    node("tower", ROOMY),
    *(node(name, SMALL, port=6001 + place) for place, name in enumerate(("desk", "laptop", "mini"))),
    rtt_s=0.005,
    bandwidth_bps=200e6,
)


class Life:
    """One cluster's placements, as its nodes go and come."""

    def __init__(self, found: Cluster) -> None:
        self.cluster = found
        self.here = set(found.node_names)
        self.fresh = self.placement = plan_for(found, DEMO, found.node_names)

    def ask(self, **kind: bool) -> Ask:
        names = tuple(name for name in self.cluster.node_names if name in self.here)
        origin, epoch = Plan(self.cluster, self.placement), self.placement.epoch + 1
        return Ask(self.cluster, names, frozenset(names), origin, epoch, NOTHING_MEASURED, **kind)

    def lose(self, name: str) -> None:
        self.here.remove(name)
        self.placement = work_out(self.ask(is_urgent=True), DEMO, None, None).rounds[-1].placement

    def back(self, name: str) -> Ask:
        self.here.add(name)
        ask = self.ask(is_return=True)
        self.placement = work_out(ask, DEMO, None, None).rounds[-1].placement
        return ask

    def seconds(self, placement: Placement) -> dict[int, float]:
        return step_seconds(self.cluster, placement, DEMO, NOTHING_MEASURED)


def test_after_the_machine_that_had_room_for_all_was_lost_and_is_back_all_is_as_it_was() -> None:
    life = Life(FAR)
    assert life.fresh.groups[0].nodes == ("tower",)
    life.lose("tower")
    assert all("tower" not in group.nodes for group in life.placement.groups)
    ask = life.back("tower")
    assert life.placement.groups == life.fresh.groups
    found, wanted = life.seconds(life.placement), life.seconds(life.fresh)
    assert all(found[count] <= 1.1 * wanted[count] for count in wanted)
    one_copy = sum(sum(sizes) for sizes in [DEMO.expert_bytes["as_stored"]]) * DEMO.experts_per_layer
    assert loaded_bytes(ask, life.placement, DEMO) <= 2 * one_copy


def test_several_losses_and_returns_in_any_order_leave_nothing_much_slower_than_a_new_start() -> None:
    for losses, returns in (
        (("desk", "mini"), ("desk", "mini")),
        (("tower", "desk"), ("desk", "tower")),
        (("mini", "tower"), ("tower", "mini")),
    ):
        life = Life(FAR)
        for name in losses:
            life.lose(name)
        for name in returns:
            life.back(name)
        found, wanted = life.seconds(life.placement), life.seconds(life.fresh)
        assert all(found[count] <= 1.2 * wanted[count] for count in wanted), (losses, returns, found, wanted)


def test_a_return_to_a_placement_that_is_as_good_moves_no_more_than_it_must() -> None:
    homes = replace(FAR, plan="home")
    life = Life(homes)
    life.lose("mini")
    life.here.add("mini")
    ask = life.ask(is_return=True)
    names = homes.node_names
    kept = plan_for(homes, DEMO, names, life.placement, ask.epoch)
    assert work_out(ask, DEMO, None, None).plan.placement == kept
