"""Layouts of given groups: stages hold their layers, pins win, slow nodes hold less, and an earlier placement stays."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import ALL, EXPERTS_ONLY, cluster, even_stages, model, needed_bytes, node
from topology import costs
from topology.cluster import Cluster, Node, Pin
from topology.errors import PlacementError
from topology.explain import explain
from topology.ids import ExpertId
from topology.layout import lay_out
from topology.node_plan import GroupPlan, Placement, Stage
from topology.placement import plan_placement
from topology.speeds import NodeSpeed

SMALL = model(layers=4, experts=8, top_k=2, width=128, inner=128, vocab=512)
SIZE = SMALL.expert_bytes["as_stored"][0]
EMPTY = cluster(kv_tokens=512, plan="home")


def room_for(share: float, *, first: int = 0, last: int = 4) -> int:
    return needed_bytes(EMPTY, SMALL, first, last, share)


def host(name: str, num_experts: float, **changes: object) -> Node:
    """An expert host with room for so many experts, a bare process beside."""
    bare = EMPTY.process_reserve_bytes + EMPTY.max_batch_rows * SMALL.expert_row_workspace_bytes
    return node(name, bare + int(num_experts * SIZE), EXPERTS_ONLY, **changes)


TALKER = node("talker", room_for(0), frozenset({"decode"}))


def check(placement: Placement, built: Cluster) -> None:
    assert set(placement.copies()) == set(SMALL.experts())
    assert placement.copies().total() <= max(32, int(built.memory_ratio * 32))
    for plan in placement.nodes:
        assert plan.planned_bytes <= plan.memory_bytes
        assert list(plan.experts) == sorted(set(plan.experts))
        assert plan.expert_bytes == sum(
            costs.expert_bytes(SMALL, plan.weight_format, e.layer) for e in plan.experts
        )


# Groups.


def test_stages_hold_their_own_layers_and_all_of_their_experts() -> None:
    built = replace(EMPTY, nodes=(node("a", room_for(0.6)), node("b", room_for(0.6))), memory_ratio=1.0)
    group = GroupPlan((Stage("b", 0, 2), Stage("a", 2, 4)))
    placement = lay_out(built, SMALL, groups=[group])
    check(placement, built)
    a, b = placement.plan_of("a"), placement.plan_of("b")
    assert (b.layers, a.layers) == (range(2), range(2, 4))
    assert {e.layer for e in b.experts} == {0, 1} and {e.layer for e in a.experts} == {2, 3}
    assert a.trunk_bytes == costs.trunk_bytes(SMALL, 2, 4) and b.trunk_bytes == costs.trunk_bytes(SMALL, 0, 2)
    assert a.kv_blocks == b.kv_blocks == 512 // 16
    assert placement.groups == (group,)


def test_a_stage_that_is_short_of_kv_holds_its_group_to_the_same() -> None:
    built = replace(EMPTY, kv_tokens=4096, nodes=(node("a", room_for(1.0)), node("b", 2**30)))
    placement = lay_out(built, SMALL, groups=[even_stages(("a", "b"), 4)])
    assert placement.plan_of("a").kv_blocks == placement.plan_of("b").kv_blocks < 4096 // 16


def test_a_home_takes_what_it_can_before_helpers_get_any() -> None:
    built = replace(EMPTY, nodes=(node("home", room_for(0.75)), host("h", 100)), memory_ratio=1.0)
    placement = lay_out(built, SMALL, groups=[even_stages(("home",), 4)])
    by_layer = [sum(e.layer == layer for e in placement.plan_of("home").experts) for layer in range(4)]
    assert by_layer == [6, 6, 6, 6] and len(placement.plan_of("h").experts) == 8


def test_a_node_outside_every_group_holds_no_trunk_and_loses_the_role() -> None:
    built = replace(EMPTY, nodes=(node("a", room_for(1.1)), node("b", room_for(0.5))))
    placement = lay_out(built, SMALL, groups=[even_stages(("a",), 4)], hosts={"a"})
    b = placement.plan_of("b")
    assert (b.roles, b.trunk_bytes, b.kv_bytes, b.workspace_bytes, b.experts) == (frozenset(), 0, 0, 0, ())
    helping = lay_out(built, SMALL, groups=[even_stages(("a",), 4)]).plan_of("b")
    assert helping.roles == EXPERTS_ONLY and helping.experts and not helping.trunk_bytes


def test_a_prefill_node_keeps_the_whole_trunk_beside_stages() -> None:
    nodes = (
        node("a", room_for(0.6)),
        node("b", room_for(0.6)),
        node("p", room_for(0.1), frozenset({"prefill"})),
    )
    placement = lay_out(replace(EMPTY, nodes=nodes), SMALL, groups=[even_stages(("a", "b"), 4)])
    assert placement.plan_of("p").layers == range(4) and placement.plan_of("p").kv_blocks


# Speed (FAULTS 36, 37).


def demand_of(hot: Sequence[int]) -> dict[ExpertId, float]:
    return {e: 20.0 if e.index in hot else 1.0 for e in SMALL.experts()}


def test_of_two_nodes_of_equal_memory_the_slower_holds_fewer_experts() -> None:
    built = replace(
        EMPTY, nodes=(TALKER, host("fast", 32, rate=8e9), host("slow", 32, rate=2e9)), memory_ratio=1.0
    )
    placement = plan_placement(built, SMALL)
    check(placement, built)
    fast, slow = (len(placement.plan_of(name).experts) for name in ("fast", "slow"))
    assert fast + slow == 32 and 3 <= fast / slow <= 5


def test_measured_bandwidth_wins_over_the_files() -> None:
    built = replace(EMPTY, nodes=(TALKER, host("a", 32, rate=8e9), host("b", 32, rate=2e9)), memory_ratio=1.0)
    measured = {"a": NodeSpeed(memory_bytes_per_s=1e9), "b": NodeSpeed(memory_bytes_per_s=9e9)}
    placement = plan_placement(built, SMALL, speeds=measured)
    assert len(placement.plan_of("b").experts) > 2 * len(placement.plan_of("a").experts)


def test_where_memory_decides_the_number_the_slower_node_gets_the_cold_ones() -> None:
    built = replace(
        EMPTY, nodes=(TALKER, host("fast", 16.5, rate=8e9), host("slow", 16.5, rate=2e9)), memory_ratio=1.0
    )
    placement = plan_placement(built, SMALL, demand=demand_of([0, 3]))
    check(placement, built)
    hot = {name: sum(e.index in (0, 3) for e in placement.plan_of(name).experts) for name in ("fast", "slow")}
    assert len(placement.plan_of("slow").experts) == 16 and hot == {"fast": 8, "slow": 0}


def test_hot_experts_go_home_and_are_replicated_first() -> None:
    built = replace(
        EMPTY, nodes=(node("home", room_for(0.26)), host("x", 24), host("y", 10)), memory_ratio=1.0
    )
    groups = [even_stages(("home",), 4)]
    placement = lay_out(built, SMALL, groups=groups, demand=demand_of([5, 6]))
    assert {e.index for e in placement.plan_of("home").experts} == {5, 6}
    more = lay_out(replace(built, memory_ratio=1.25), SMALL, groups=groups, demand=demand_of([5, 6]))
    assert {e.index for e, count in more.copies().items() if count > 1} == {5, 6}


# Pins (FAULTS 41).


def test_a_pinned_expert_is_where_it_was_pinned() -> None:
    pins = tuple(Pin(ExpertId(layer, 7), "y") for layer in range(4))
    built = replace(EMPTY, nodes=(TALKER, host("x", 40), host("y", 4)), memory_ratio=1.0, pins=pins)
    placement = plan_placement(built, SMALL)
    check(placement, built)
    assert placement.plan_of("y").experts == tuple(ExpertId(layer, 7) for layer in range(4))


def test_a_pin_without_room_is_refused_with_numbers() -> None:
    pins = tuple(Pin(e, "y") for e in SMALL.experts()[:5])
    built = replace(EMPTY, nodes=(TALKER, host("x", 40), host("y", 4.5)), pins=pins)
    with pytest.raises(PlacementError, match="5 experts pinned to y need") as error:
        plan_placement(built, SMALL)
    assert (error.value.node, error.value.needed_bytes) == ("y", 5 * SIZE)
    assert error.value.available_bytes == int(4.5 * SIZE)


@pytest.mark.parametrize(
    ("expert", "where", "message"),
    [
        (ExpertId(4, 0), "x", "the model has no such expert: 8 in each of its 4 layers with experts, 0 to 3"),
        (ExpertId(0, 8), "x", "the model has no such expert"),
        (ExpertId(0, 0), "z", "there is no such node: talker, x"),
        (ExpertId(0, 0), "talker", "talker may not hold experts"),
    ],
)
def test_a_pin_to_nothing_is_refused(expert: ExpertId, where: str, message: str) -> None:
    built = replace(EMPTY, nodes=(TALKER, host("x", 40)))
    with pytest.raises(PlacementError, match=message):
        plan_placement(built, SMALL, pins={expert: where})


def test_room_for_a_replica_is_never_made_by_moving_a_pinned_expert() -> None:
    pins = {ExpertId(0, index): "small" for index in range(4)}
    built = replace(EMPTY, nodes=(TALKER, host("big", 32), host("small", 4), host("last", 29)))
    placement = plan_placement(built, SMALL, pins=pins)
    check(placement, built)
    assert set(placement.plan_of("small").experts) == set(pins)


# An earlier placement.


@st.composite
def edits(draw: st.DrawFn) -> tuple[Cluster, Cluster]:
    """A cluster, and the same after one edit."""
    nodes = [node("n0", room_for(draw(st.sampled_from([0.3, 0.7, 1.2]))))]
    for index in range(1, draw(st.integers(2, 6))):
        if draw(st.booleans()):
            nodes.append(node(f"n{index}", room_for(draw(st.sampled_from([0.2, 0.5, 1.1])))))
        else:
            nodes.append(host(f"n{index}", draw(st.integers(2, 30))))
    before = replace(EMPTY, nodes=tuple(nodes), memory_ratio=draw(st.sampled_from([1.0, 1.5, 2.0])))
    which = draw(st.integers(0, len(nodes) - 1))
    edit = draw(st.sampled_from(["nothing", "add", "remove", "halve", "roles", "pin", "address"]))
    after = list(nodes)
    if edit == "add":
        after.insert(which, draw(st.sampled_from([host("new", 12), node("new", room_for(0.4))])))
    elif edit == "remove":
        after.pop(which)
    elif edit == "halve":
        spare = nodes[which].memory_bytes - room_for(0)
        after[which] = replace(nodes[which], memory_bytes=nodes[which].memory_bytes - max(0, spare) // 2)
    elif edit == "roles":
        after[which] = replace(nodes[which], roles=EXPERTS_ONLY)
    elif edit == "address":
        after[which] = replace(nodes[which], address="127.0.0.1:7000")
    pins = (Pin(ExpertId(1, 3), after[0].name),) if edit == "pin" else ()
    return before, replace(before, nodes=tuple(after), pins=pins)


def held_bytes(placement: Placement, name: str) -> int:
    return next((plan.expert_bytes for plan in placement.nodes if plan.node == name), 0)


def room_bytes(placement: Placement, name: str) -> int:
    return next(
        (p.memory_bytes - p.reserved_bytes for p in placement.nodes if p.node == name and p.experts), 0
    )


def moved(before: Placement, after: Placement) -> int:
    """Bytes of experts that nodes have to load."""
    had = {plan.node: set(plan.experts) for plan in before.nodes}
    return sum(SIZE * len(set(plan.experts) - had.get(plan.node, set())) for plan in after.nodes)


@settings(max_examples=120, deadline=None)
@given(edits())
def test_a_small_edit_moves_few_bytes(edit: tuple[Cluster, Cluster]) -> None:
    """At most twice the bytes whose room was lost and the room that came anew, and one expert a node."""
    old, new = edit
    try:
        before = plan_placement(old, SMALL)
        fresh = plan_placement(new, SMALL)
    except PlacementError:
        return
    after = plan_placement(new, SMALL, previous=before, epoch=2)
    check(after, new)
    names = [plan.node for plan in (*before.nodes, *after.nodes)]
    lost = sum(max(0, held_bytes(before, n) - room_bytes(fresh, n)) for n in set(names))
    came = sum(max(0, room_bytes(fresh, n) - room_bytes(before, n)) for n in set(names))
    pinned = SIZE * 2 * len(new.pins)
    assert moved(before, after) <= 2 * (lost + came) + pinned + SIZE * len(new.nodes)
    if new == old or [replace(n, address="") for n in new.nodes] == [
        replace(n, address="") for n in old.nodes
    ]:
        assert moved(before, after) <= pinned


@settings(max_examples=60, deadline=None)
@given(edits())
def test_an_edit_that_changes_nothing_keeps_every_expert(edit: tuple[Cluster, Cluster]) -> None:
    try:
        before = plan_placement(edit[0], SMALL)
    except PlacementError:
        return
    assert plan_placement(edit[0], SMALL, previous=before, epoch=9) == replace(before, epoch=9)


def test_a_new_node_gets_its_share_and_the_others_keep_theirs() -> None:
    old = replace(EMPTY, nodes=(TALKER, host("a", 32), host("b", 32)), memory_ratio=1.0)
    before = plan_placement(old, SMALL)
    new = replace(old, nodes=(*old.nodes, host("c", 32)))
    after = plan_placement(new, SMALL, previous=before)
    check(after, new)
    assert 8 <= len(after.plan_of("c").experts) <= 11
    assert moved(before, after) == SIZE * len(after.plan_of("c").experts), "nobody else loads anything"


def test_a_lost_node_costs_only_its_own_experts() -> None:
    old = replace(EMPTY, nodes=(TALKER, host("a", 32), host("b", 32), host("c", 32)), memory_ratio=1.0)
    before = plan_placement(old, SMALL)
    after = plan_placement(replace(old, nodes=old.nodes[:3]), SMALL, previous=before)
    assert moved(before, after) == before.plan_of("c").expert_bytes


def test_a_format_that_changes_makes_a_node_load_everything_again() -> None:
    old = replace(EMPTY, nodes=(TALKER, host("a", 64), host("b", 64)))
    before = plan_placement(old, SMALL)
    new = replace(old, nodes=(TALKER, replace(old.nodes[1], weight_format="float32"), old.nodes[2]))
    after = plan_placement(new, SMALL, previous=before)
    check(after, new)
    assert after.plan_of("a").weight_format == "float32"
    assert set(before.plan_of("b").experts) <= set(after.plan_of("b").experts)


def test_room_that_others_need_is_taken_from_replicas() -> None:
    old = replace(EMPTY, nodes=(TALKER, host("a", 32), host("b", 32)))
    before = plan_placement(old, SMALL)
    new = replace(old, nodes=(TALKER, host("a", 10), host("b", 24)))
    after = plan_placement(new, SMALL, previous=before)
    check(after, new)
    assert moved(before, after) == 0, "what must not be lost lies on one of them already"


def test_explain_says_what_the_plan_uses_each_node_for() -> None:
    nodes = (node("a", room_for(0.6)), node("b", room_for(0.6)), node("c", room_for(0.3)), host("x", 4))
    built = replace(EMPTY, nodes=nodes, pins=(Pin(ExpertId(2, 1), "c"),))
    placement = lay_out(built, SMALL, groups=[even_stages(("a", "b"), 4)], hosts={"a", "b", "c"})
    why = {row.name: row.why for row in explain(placement, built, SMALL)}
    assert why["a"].startswith(
        "answers requests together with b layers 2-3, so holds the trunk of layers 0 to 1 of 4"
    )
    assert "runs no layers in this plan, though its roles allow it" in why["c"]
    assert "pinned here: layer 2: 1" in why["c"]
    assert why["x"].endswith("hosts no experts in this plan")


def test_kv_stays_as_it_is_where_it_could_only_grow_a_little() -> None:
    built = replace(EMPTY, kv_tokens=2048, nodes=(node("a", room_for(1.0)),), memory_ratio=1.0)
    before = plan_placement(built, SMALL)
    roomier = replace(built, nodes=(node("a", room_for(1.1)),))
    assert plan_placement(roomier, SMALL).plan_of("a").kv_blocks > before.plan_of("a").kv_blocks
    assert (
        plan_placement(roomier, SMALL, previous=before).plan_of("a").kv_blocks
        == before.plan_of("a").kv_blocks
    )
    ample = replace(built, nodes=(node("a", room_for(3)),))
    assert plan_placement(ample, SMALL, previous=before).plan_of("a").kv_blocks == 2048 // 16


def test_node_roles_follow_the_file_in_the_plan_of_homes() -> None:
    placement = plan_placement(replace(EMPTY, nodes=(node("a", room_for(1.1)), host("x", 4))), SMALL)
    assert [plan.roles for plan in placement.nodes] == [ALL, EXPERTS_ONLY]
