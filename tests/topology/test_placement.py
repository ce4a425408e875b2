"""Placement: every expert somewhere, no node above its memory, for any unequal nodes."""

import dataclasses
import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from topology import costs
from topology.cluster import GPU_RESERVE_BYTES, Cluster, Node
from topology.costs import ModelFootprint
from topology.errors import PlacementError
from topology.explain import explain
from topology.ids import ExpertId
from topology.placement import Placement, plan_placement

MIB = 2**20
ALL = frozenset({"prefill", "decode", "experts"})
EXPERTS_ONLY = frozenset({"experts"})


def footprint(
    *, layers: int = 3, experts: int = 8, expert_bytes: int = 1000, **changes: object
) -> ModelFootprint:
    values: dict = {
        "num_layers": layers,
        "moe_layers": tuple(range(layers)),
        "experts_per_layer": experts,
        "expert_bytes": {"as_stored": (expert_bytes,) * layers, "float32": (2 * expert_bytes,) * layers},
        "embed_bytes": 700,
        "head_bytes": 300,
        "layer_bytes": (500,) * layers,
        "kv_bytes_per_token": (8,) * layers,
        "context_tokens": 64,
        "row_workspace_bytes": 3,
        "request_workspace_bytes": 5,
        "expert_row_workspace_bytes": 2,
    }
    return ModelFootprint(**{**values, **changes})


def cluster(*nodes: Node, **changes: object) -> Cluster:
    values: dict = {
        "name": "test",
        "model": "model",
        "process_reserve_bytes": 10_000,
        "kv_tokens": 128,
        "max_batch_rows": 10,
        "max_requests": 2,
    }
    return Cluster(nodes=nodes, **{**values, **changes})


def node(name: str, memory_bytes: int, roles: frozenset[str] = ALL, weight_format: str = "as_stored") -> Node:
    return Node(
        name=name,
        address="127.0.0.1:5551",
        memory_bytes=memory_bytes,
        roles=roles,
        weight_format=weight_format,
    )


HOME_RESERVE = 10_000 + 700 + 300 + 3 * 500 + 10 * 3 + 2 * 5 + 10 * 2  # process, trunk, workspace
CONTEXT_KV = 64 * 8 * 3
WANTED_KV = 128 * 8 * 3
HOST_RESERVE = 10_000 + 10 * 2


def check(placement: Placement, cluster: Cluster, model: ModelFootprint) -> None:
    """What must hold of every placement."""
    assert [plan.node for plan in placement.nodes] == list(cluster.node_names)
    copies = placement.copies()
    assert set(copies) == set(model.experts()), "every expert has a host"
    assert sum(copies.values()) <= max(len(model.experts()), cluster.memory_ratio * len(model.experts()))
    for plan, node in zip(placement.nodes, cluster.nodes, strict=True):
        assert len(set(plan.experts)) == len(plan.experts) and list(plan.experts) == sorted(plan.experts)
        assert plan.expert_bytes == sum(
            costs.expert_bytes(model, node.weight_format, expert.layer) for expert in plan.experts
        )
        assert plan.planned_bytes <= plan.memory_bytes == node.memory_bytes
        assert all(isinstance(value, int) for value in (plan.planned_bytes, plan.kv_bytes, plan.trunk_bytes))
        assert bool(plan.experts) <= node.hosts_experts
        if node.holds_trunk:
            assert (plan.first_layer, plan.last_layer) == (0, model.num_layers)
            assert plan.kv_blocks * model.block_tokens >= costs.context_limit(cluster, model)
        else:
            assert (plan.first_layer, plan.last_layer, plan.kv_bytes, plan.trunk_bytes) == (0, 0, 0, 0)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    num_nodes = draw(st.sampled_from([1, 2, 3, 5, 8, 20]))
    roles = [
        draw(st.sampled_from([ALL, EXPERTS_ONLY, frozenset({"decode"}), frozenset({"prefill", "experts"})]))
    ]
    roles = [ALL] + [
        draw(st.sampled_from([ALL, EXPERTS_ONLY, frozenset({"decode"}), roles[0]])) for _ in range(19)
    ]
    nodes = [
        node(
            f"node{index}",
            HOME_RESERVE + CONTEXT_KV + draw(st.integers(0, 30_000)),
            roles[index],
            draw(st.sampled_from(["as_stored", "as_stored", "float32"])),
        )
        for index in range(num_nodes)
    ]
    return cluster(*nodes, memory_ratio=draw(st.sampled_from([1.0, 1.3, 2.0, 3.5])))


@settings(max_examples=150, deadline=None)
@given(clusters(), st.integers(1, 4), st.integers(1, 32))
def test_every_placement_covers_all_experts_within_memory(
    cluster: Cluster, layers: int, experts: int
) -> None:
    model = footprint(layers=layers, experts=experts)
    try:
        placement = plan_placement(cluster, model)
    except PlacementError as error:
        assert error.needed_bytes > error.available_bytes
        for clause in str(error).split("; "):
            assert len(set(re.findall(r"[0-9] ([KMGT]?i?B)\b", clause))) <= 1, f"two units in {clause!r}"
        return
    check(placement, cluster, model)


@settings(max_examples=60, deadline=None)
@given(clusters(), st.integers(0, 2**31))
def test_the_order_of_nodes_in_the_file_changes_nothing_but_the_order(cluster: Cluster, seed: int) -> None:
    model = footprint()
    shuffled = dataclasses.replace(
        cluster, nodes=tuple(random.Random(seed).sample(cluster.nodes, len(cluster.nodes)))
    )
    try:
        placement = plan_placement(cluster, model)
    except PlacementError as error:
        with pytest.raises(PlacementError) as again:
            plan_placement(shuffled, model)
        assert again.value.needed_bytes == error.needed_bytes
        return
    again = plan_placement(shuffled, model)
    assert plan_placement(cluster, model) == placement
    assert {plan.node: plan for plan in again.nodes} == {plan.node: plan for plan in placement.nodes}


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 10))
def test_experts_are_refused_exactly_when_the_nodes_cannot_hold_them(rooms: list[int], experts: int) -> None:
    """With one size of expert the greedy spread is exact: it fails only where no placement exists."""
    nodes = [
        node(f"node{index}", HOST_RESERVE + 1000 * room + 999, EXPERTS_ONLY)
        for index, room in enumerate(rooms)
    ]
    home = node("home", 2 * HOME_RESERVE + CONTEXT_KV, frozenset({"decode"}))
    built, model = cluster(home, *nodes), footprint(layers=3, experts=experts)
    if sum(rooms) >= 3 * experts:
        check(plan_placement(built, model), built, model)
    else:
        with pytest.raises(PlacementError, match=f"{3 * experts} experts need"):
            plan_placement(built, model)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=8))
def test_first_copies_follow_the_room_and_spread_over_every_layer(rooms: list[int]) -> None:
    model = footprint(layers=4, experts=16)
    assume(sum(rooms) >= 64)
    nodes = [
        node(f"node{index}", HOST_RESERVE + 1000 * room, EXPERTS_ONLY) for index, room in enumerate(rooms)
    ]
    home = node("home", 2 * HOME_RESERVE + CONTEXT_KV, frozenset({"decode"}))
    placement = plan_placement(cluster(home, *nodes, memory_ratio=1.0), model)
    for plan, room in zip(placement.nodes[1:], rooms, strict=True):
        fair = 64 * room / sum(rooms)
        assert len(plan.experts) >= 1 and abs(len(plan.experts) - fair) < len(rooms)
        by_layer = [sum(expert.layer == layer for expert in plan.experts) for layer in range(4)]
        assert all(abs(count - fair / 4) < len(rooms) for count in by_layer)


def test_one_node_with_room_holds_everything_once() -> None:
    built, model = cluster(node("only", HOME_RESERVE + WANTED_KV + 100_000)), footprint()
    placement = plan_placement(built, model, epoch=7)
    check(placement, built, model)
    assert placement.epoch == 7
    assert placement.hosts() == dict.fromkeys(model.experts(), ("only",))


def test_the_kv_that_was_asked_for_comes_before_replicas() -> None:
    memory = HOME_RESERVE + WANTED_KV + 24_000
    placement = plan_placement(cluster(node("a", memory), node("b", memory)), footprint())
    assert [plan.kv_bytes for plan in placement.nodes] == [WANTED_KV, WANTED_KV]
    assert set(placement.copies().values()) == {2}


def test_kv_shrinks_only_as_far_as_the_first_copies_need() -> None:
    memory = HOME_RESERVE + CONTEXT_KV + 24_000 + 16 * 8 * 3  # all experts, one context and one block more
    placement = plan_placement(cluster(node("only", memory)), footprint())
    assert placement.plan_of("only").kv_blocks == 64 // 16 + 1
    assert len(placement.plan_of("only").experts) == 24


def test_a_decode_node_without_experts_keeps_its_kv_when_others_shrink() -> None:
    talker = node("talker", HOME_RESERVE + WANTED_KV, frozenset({"decode"}))
    full = node("full", HOME_RESERVE + CONTEXT_KV + 24_000)
    placement = plan_placement(cluster(talker, full), footprint())
    assert placement.plan_of("talker").kv_bytes == WANTED_KV - WANTED_KV % (16 * 8 * 3)
    assert placement.plan_of("full").kv_bytes == CONTEXT_KV


def test_a_context_cap_lowers_the_least_kv() -> None:
    memory = HOME_RESERVE + CONTEXT_KV // 2 + 24_000
    with pytest.raises(PlacementError):
        plan_placement(cluster(node("only", memory)), footprint())
    placement = plan_placement(cluster(node("only", memory), context_tokens=32), footprint())
    assert placement.plan_of("only").kv_blocks == 2


def test_a_node_too_small_for_its_trunk_is_named_with_needed_and_available_bytes() -> None:
    with pytest.raises(PlacementError, match="node desk needs") as error:
        plan_placement(cluster(node("desk", HOME_RESERVE), node("big", 10 * HOME_RESERVE)), footprint())
    assert (error.value.node, error.value.needed_bytes, error.value.available_bytes) == (
        "desk",
        HOME_RESERVE + CONTEXT_KV,
        HOME_RESERVE,
    )


def test_all_nodes_that_are_too_small_are_named_at_once_and_the_worst_gives_the_numbers() -> None:
    with pytest.raises(PlacementError, match=r"node a needs .*; node b needs ") as error:
        plan_placement(
            cluster(node("a", HOME_RESERVE), node("b", HOME_RESERVE - 5, EXPERTS_ONLY | {"decode"})),
            footprint(),
        )
    assert error.value.node == "b"


def test_experts_that_do_not_fit_are_refused_with_the_bytes_missing() -> None:
    built = cluster(
        node("home", HOME_RESERVE + CONTEXT_KV + 5_500), node("attic", HOST_RESERVE + 3_999, EXPERTS_ONLY)
    )
    with pytest.raises(
        PlacementError, match=r"15.625 KiB short .*an expert takes 0.977 KiB, the most left .* is 0.976 KiB"
    ) as error:
        plan_placement(built, footprint())
    assert (error.value.node, error.value.needed_bytes, error.value.available_bytes) == (None, 24_000, 8_000)


def test_a_node_that_keeps_float32_pays_double_for_each_expert() -> None:
    wide = node("wide", HOST_RESERVE + 100_000, EXPERTS_ONLY, "float32")
    home = node("home", 2 * HOME_RESERVE + CONTEXT_KV, frozenset({"decode"}))
    placement = plan_placement(cluster(home, wide, memory_ratio=1.0), footprint())
    assert placement.plan_of("wide").expert_bytes == 2 * 24_000


def test_large_experts_are_placed_before_small_ones() -> None:
    model = footprint(layers=2, experts=2, expert_bytes=0)
    model = dataclasses.replace(model, expert_bytes={"as_stored": (100, 1000)}, layer_bytes=(500, 500))
    home = node("home", 2 * HOME_RESERVE + CONTEXT_KV, frozenset({"decode"}))
    hosts = [node(name, HOST_RESERVE + 1100, EXPERTS_ONLY) for name in ("x", "y")]
    check(plan_placement(built := cluster(home, *hosts), model), built, model)


def test_no_replicas_at_ratio_one_and_the_ratio_rounds_down() -> None:
    nodes = [node(name, HOME_RESERVE + WANTED_KV + 100_000) for name in "abc"]
    for ratio, total in ((1.0, 24), (1.1, 26), (2.0, 48), (2.99, 71), (9.0, 72)):
        placement = plan_placement(cluster(*nodes, memory_ratio=ratio), footprint())
        assert placement.copies().total() == total


def test_replicas_go_to_decode_nodes_first() -> None:
    home = node("home", HOME_RESERVE + WANTED_KV + 24_000)
    hosts = [node(name, HOST_RESERVE + 24_000, EXPERTS_ONLY) for name in ("x", "y")]
    placement = plan_placement(cluster(home, *hosts, memory_ratio=1.5), footprint())
    assert len(placement.plan_of("home").experts) == 8 + 12


def test_demand_decides_who_is_replicated_first() -> None:
    hot = [ExpertId(2, 5), ExpertId(0, 1)]
    nodes = [node(name, HOME_RESERVE + WANTED_KV + 100_000) for name in "abc"]
    some = plan_placement(cluster(*nodes, memory_ratio=1.1), footprint(), demand=dict.fromkeys(hot, 9.0))
    assert sorted(expert for expert, copies in some.copies().items() if copies == 2) == sorted(hot)
    more = plan_placement(cluster(*nodes, memory_ratio=2.1), footprint(), demand=dict.fromkeys(hot, 9.0))
    assert sorted(expert for expert, copies in more.copies().items() if copies == 3) == sorted(hot)
    assert min(more.copies().values()) == 2, "a second copy for all comes before a third for some"


def test_the_last_room_is_used_by_moving_another_expert() -> None:
    """Room left only where an expert already is: somebody else's expert moves there, and it takes the place."""
    home = node("home", HOME_RESERVE + WANTED_KV, frozenset({"decode"}))
    big = node("big", HOST_RESERVE + 24_000, EXPERTS_ONLY)
    small = [node(name, HOST_RESERVE + 12_000, EXPERTS_ONLY) for name in ("x", "y")]
    placement = plan_placement(cluster(home, big, *small), footprint())
    assert set(placement.copies().values()) == {2}


def test_a_prefill_node_holds_the_trunk_too() -> None:
    nodes = [
        node("d", HOME_RESERVE + WANTED_KV + 24_000),
        node("p", HOME_RESERVE + WANTED_KV, frozenset({"prefill"})),
    ]
    plan = plan_placement(cluster(*nodes), footprint()).plan_of("p")
    assert plan.trunk_bytes > 0 and plan.kv_bytes == WANTED_KV and not plan.experts


def test_layers_without_experts_are_held_but_not_placed() -> None:
    model = footprint(moe_layers=(1, 2), expert_bytes=1000)
    placement = plan_placement(cluster(node("only", HOME_RESERVE + WANTED_KV + 24_000)), model)
    assert {expert.layer for expert in placement.hosts()} == {1, 2}


def test_explain_adds_up_and_says_why() -> None:
    home = node("home", HOME_RESERVE + CONTEXT_KV + 20_000)
    attic = node("attic", HOST_RESERVE + 6_500, EXPERTS_ONLY)
    talker = node("talker", HOME_RESERVE + WANTED_KV, frozenset({"decode"}))
    built, model = cluster(home, attic, talker), footprint()
    placement = plan_placement(built, model)
    rows = explain(placement, built, model)
    for row in rows:
        parts = row.process_bytes + row.trunk_bytes + row.kv_bytes + row.workspace_bytes + row.expert_bytes
        assert parts == row.planned_bytes == row.memory_bytes - row.free_bytes
    by_name = {row.name: row.why for row in rows}
    assert "neither trunk nor KV" in by_name["attic"] and "only here" in by_name["attic"]
    assert "answers requests" in by_name["home"]
    assert "does not have the role experts" in by_name["talker"]


def test_a_gpu_keeps_room_for_what_is_no_tensor() -> None:
    model = footprint()
    pair = [
        dataclasses.replace(node(name, 2 * GPU_RESERVE_BYTES), device=device)
        for name, device in (("a", "cpu"), ("b", "cuda:1"))
    ]
    on_processor, on_gpu = plan_placement(cluster(*pair), model).nodes
    assert on_gpu.process_bytes - on_processor.process_bytes == GPU_RESERVE_BYTES
    assert on_gpu.planned_bytes <= on_gpu.memory_bytes


def test_a_model_of_real_size_is_planned_on_twenty_nodes() -> None:
    model = footprint(layers=48, experts=128, expert_bytes=9_437_184)
    nodes = [
        node(f"n{index:02}", 6_000 * MIB + index * 500 * MIB, ALL if index % 2 else EXPERTS_ONLY)
        for index in range(20)
    ]
    built = cluster(*nodes, process_reserve_bytes=350 * MIB)
    check(placement := plan_placement(built, model), built, model)
    assert placement.copies().total() > 2 * 48 * 128 * 0.99
