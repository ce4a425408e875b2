"""Placement by similarity groups and its baselines: what must hold of all, and what each is good at."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import ALL, EXPERTS_ONLY, cluster, model, needed_bytes, node
from tests.support.traits import traits_of
from topology import costs
from topology.cluster import PLACEMENTS, Cluster, Node, Pin
from topology.coverage import coverage_of
from topology.errors import PlacementError, TopologyError
from topology.ids import ExpertId
from topology.placement import Placement, plan_placement
from topology.traits import Traffic

SMALL = model(layers=4, experts=8, top_k=2, width=128, inner=128, vocab=512)
SIZE = SMALL.expert_bytes["as_stored"][0]
EMPTY = cluster(kv_tokens=512, plan="home")
LAYERS = (0, 1, 2, 3)
TRAITS = traits_of(LAYERS, 8)


def home(name: str, num_experts: float, **changes: object) -> Node:
    return node(name, needed_bytes(EMPTY, SMALL, 0, 4, 0.0) + int(num_experts * SIZE), ALL, **changes)


def host(name: str, num_experts: float, **changes: object) -> Node:
    bare = EMPTY.process_reserve_bytes + EMPTY.max_batch_rows * SMALL.expert_row_workspace_bytes
    return node(name, bare + int(num_experts * SIZE), EXPERTS_ONLY, **changes)


def built(rule: str, nodes: Sequence[Node], ratio: float = 2.0, **changes: object) -> Cluster:
    return replace(EMPTY, placement=rule, nodes=tuple(nodes), memory_ratio=ratio, **changes)


def check(placement: Placement, found: Cluster) -> None:
    assert set(placement.copies()) == set(SMALL.experts()), "every expert has a host"
    assert placement.copies().total() <= max(32, int(found.memory_ratio * 32))
    assert placement.rule == found.placement
    for plan in placement.nodes:
        assert plan.planned_bytes <= plan.memory_bytes
        assert list(plan.experts) == sorted(set(plan.experts))
        assert plan.expert_bytes == sum(
            costs.expert_bytes(SMALL, plan.weight_format, expert.layer) for expert in plan.experts
        )
    for pin in found.pins:
        assert pin.expert in placement.plan_of(pin.node).experts


@st.composite
def machines(draw: st.DrawFn) -> list[Node]:
    rooms = draw(st.lists(st.floats(1, 30), min_size=1, max_size=7))
    kinds = draw(st.lists(st.booleans(), min_size=len(rooms), max_size=len(rooms)))
    formats = ["as_stored", "as_stored", "float32"]
    return [
        (home if is_home or not at else host)(f"n{at}", room, weight_format=draw(st.sampled_from(formats)))
        for at, (room, is_home) in enumerate(zip(rooms, kinds, strict=True))
    ]


@settings(max_examples=60)
@given(machines(), st.sampled_from(PLACEMENTS), st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.data())
def test_every_rule_places_all_experts_within_memory_and_heeds_pins(nodes, rule, ratio, data):
    pins = tuple(
        Pin(ExpertId(layer, 1), data.draw(st.sampled_from([node.name for node in nodes]))) for layer in (0, 2)
    )
    found = built(rule, nodes, ratio, pins=pins if data.draw(st.booleans()) else ())
    traffic = Traffic({node.name: data.draw(st.sampled_from([0.0, 1.0, 3.0])) for node in nodes})
    try:
        plan_placement(replace(found, placement="spread"), SMALL)
    except PlacementError as error:
        with pytest.raises(PlacementError) as refused:
            plan_placement(found, SMALL, traits=TRAITS, traffic=traffic)
        assert refused.value.needed_bytes == error.needed_bytes, "no rule finds more or less room"
        return
    placement = plan_placement(found, SMALL, traits=TRAITS, traffic=traffic)
    check(placement, found)
    again = plan_placement(found, SMALL, traits=TRAITS, traffic=traffic, previous=placement)
    assert again.nodes == placement.nodes, "what has not changed is not moved"


@settings(max_examples=30)
@given(machines(), st.sampled_from(PLACEMENTS), st.floats(0, 12))
def test_more_memory_on_one_node_moves_little_and_only_to_it(nodes, rule, more):
    found = built(rule, nodes)
    try:
        before = plan_placement(found, SMALL, traits=TRAITS)
    except PlacementError:
        return
    grown = [replace(nodes[0], memory_bytes=nodes[0].memory_bytes + int(more * SIZE)), *nodes[1:]]
    after = plan_placement(replace(found, nodes=tuple(grown)), SMALL, traits=TRAITS, previous=before)
    check(after, replace(found, nodes=tuple(grown)))
    moved = {
        plan.node: len(set(plan.experts) - set(before.plan_of(plan.node).experts)) for plan in after.nodes
    }
    assert sum(moved.values()) <= 2 * more + 2, moved


FOUR = [home("a", 9), home("b", 9), home("c", 9), home("d", 9)]


def coverage(rule: str, nodes: Sequence[Node] = FOUR, ratio: float = 1.0, traffic: Traffic | None = None):
    found = built(rule, nodes, ratio)
    placement = plan_placement(found, SMALL, traits=TRAITS, traffic=traffic)
    check(placement, found)
    return coverage_of(placement, TRAITS, traffic)


def test_members_of_a_group_stand_on_different_nodes_and_cover_more_groups_than_elsewise():
    found = coverage("similarity")
    assert found.apart == 1.0
    assert found.covered > max(coverage(rule).covered for rule in ("spread", "random", "eplb")) + 0.05


def test_coverage_never_falls_as_memory_grows():
    roomy = [home(name, 33) for name in "abcd"]
    found = [coverage("similarity", roomy, ratio).covered for ratio in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)]
    assert found == sorted(found) and found[-1] == pytest.approx(1.0)
    exact = [coverage("similarity", roomy, ratio).exact for ratio in (1.0, 2.0, 4.0)]
    assert exact == sorted(exact) and exact[-1] == pytest.approx(1.0)


def test_popularity_hits_more_exactly_and_similarity_covers_more():
    nodes = [home("a", 14), home("b", 14), host("x", 20), host("y", 20)]
    similar, popular = coverage("similarity", nodes, 2.0), coverage("popularity", nodes, 2.0)
    assert popular.exact >= similar.exact and similar.covered > popular.covered


def test_copies_go_to_where_requests_live():
    nodes = [home("busy", 20), home("idle", 20), host("x", 32)]
    placement = plan_placement(
        built("similarity", nodes, 1.5), SMALL, traits=TRAITS, traffic=Traffic({"busy": 9.0, "idle": 0.0})
    )
    copies = placement.copies()
    extra = {plan.node: sum(copies[expert] > 1 for expert in plan.experts) for plan in placement.nodes}
    assert extra["busy"] > extra["idle"]
    lone = coverage("similarity", nodes, 1.5, Traffic({"busy": 9.0, "idle": 0.0}))
    even = coverage("similarity", nodes, 1.5, Traffic())
    assert lone.exact > even.exact, "it is the busy node's hits that count"


def test_each_home_holds_what_its_own_cluster_of_requests_chooses():
    traits = traits_of(LAYERS, 8, num_clusters=2)
    nodes = [home("first", 10), home("second", 10), host("x", 32)]
    mixes = Traffic(mix={"first": (1, 0), "second": (0, 1)})
    placed = plan_placement(built("similarity", nodes, 1.4), SMALL, traits=traits, traffic=mixes)
    crossed = Traffic(mix={"first": (0, 1), "second": (1, 0)})
    assert coverage_of(placed, traits, mixes).exact > coverage_of(placed, traits, crossed).exact + 0.05


def test_a_placement_of_another_rule_is_not_kept():
    before = plan_placement(built("spread", FOUR, 1.0), SMALL)
    after = plan_placement(built("similarity", FOUR, 1.0), SMALL, traits=TRAITS, previous=before)
    fresh = plan_placement(built("similarity", FOUR, 1.0), SMALL, traits=TRAITS)
    assert after.nodes == fresh.nodes != before.nodes


def test_load_is_even_where_load_decides():
    demand = TRAITS.demand()
    nodes = [home(name, 18) for name in "abcd"]

    def spread_of(rule: str) -> float:
        placement = plan_placement(built(rule, nodes, 1.5), SMALL, traits=TRAITS)
        copies = placement.copies()
        loads = [sum(demand[e] / copies[e] for e in plan.experts) for plan in placement.nodes]
        return max(loads) / np.mean(loads)

    assert spread_of("eplb") < min(1.1, spread_of("random"))


def test_a_rule_that_needs_an_artifact_says_so_and_a_foreign_one_is_refused():
    with pytest.raises(TopologyError, match="no artifact: run `edge-runtime calibrate"):
        plan_placement(built("similarity", FOUR), SMALL)
    with pytest.raises(TopologyError, match=r"layers \[0, 1\] of 8 experts, the model has"):
        plan_placement(built("eplb", FOUR), SMALL, traits=traits_of((0, 1), 8))


def test_pins_that_leave_a_group_on_one_node_are_heeded_and_can_be_told():
    group = next(members for members in TRAITS.groups.members(3) if len(members) > 1)
    pins = tuple(Pin(ExpertId(3, index), "a") for index in group)
    placement = plan_placement(built("similarity", FOUR, 1.0, pins=pins), SMALL, traits=TRAITS)
    check(placement, built("similarity", FOUR, 1.0, pins=pins))
    assert coverage_of(placement, TRAITS).apart < 1.0
