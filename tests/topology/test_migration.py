"""From placement to placement: replayed round by round, no expert is ever without a host and no node over its memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import ALL, EXPERTS_ONLY, cluster, even_stages, model, needed_bytes, node
from topology import costs
from topology.cluster import Cluster, Node
from topology.errors import MigrationError, PlacementError
from topology.ids import ExpertId
from topology.layout import every_home, lay_out
from topology.migration import MigrationPlan, plan_migration
from topology.node_plan import NodePlan, Placement

SMALL = model(layers=4, experts=8, top_k=2, width=128, inner=128, vocab=512)
SIZE = SMALL.expert_bytes["as_stored"][0]
EMPTY = cluster(kv_tokens=512, plan="home")
BARE = EMPTY.process_reserve_bytes + EMPTY.max_batch_rows * SMALL.expert_row_workspace_bytes


def host(name: str, num_experts: float, **changes: object) -> Node:
    return node(name, BARE + int(num_experts * SIZE), EXPERTS_ONLY, **changes)


def home(name: str, share: float, *, kv_blocks_spare: int = 0) -> Node:
    spare = kv_blocks_spare * costs.kv_block_bytes(SMALL, 0, 4)
    return node(name, needed_bytes(EMPTY, SMALL, 0, 4, share) + spare)


def replay(plan: MigrationPlan, old: Placement, new: Placement) -> None:
    """Carry a plan out on sets, and look at every moment of it."""
    held = {p.node: set(p.experts) for p in old.nodes}
    formats = {p.node: p.weight_format for p in old.nodes}
    limits = {
        name: max(p.memory_bytes for p in (*old.nodes, *new.nodes) if p.node == name)
        for name in {p.node for p in (*old.nodes, *new.nodes)}
    }
    hosted = {e for experts in held.values() for e in experts}
    for number, one in enumerate(plan.rounds, start=1):
        assert one.placement.epoch == old.epoch + number
        for name, size in one.peak_bytes.items():
            assert size <= limits[name], f"{name} in round {number}"
        for name, experts in one.loads.items():
            there = held.setdefault(name, set())
            in_place = formats.get(name) == one.placement.plan_of(name).weight_format
            assert not (there & set(experts) and in_place), "nothing is loaded that is there"
        arrived = {name: held[name] | set(one.loads.get(name, ())) for name in held}
        before = {p.node: p for p in (plan.rounds[number - 2].placement if number > 1 else old).nodes}
        for p in one.placement.nodes:  # reckoned again from what stands before and after the switch
            was = before.get(p.node)
            parts = costs.trunk_parts(SMALL, was.first_layer, was.last_layer) if was else {}
            parts |= costs.trunk_parts(SMALL, p.first_layer, p.last_layer)
            experts = sum(
                costs.expert_bytes(SMALL, formats.get(p.node, p.weight_format), e.layer)
                for e in held.get(p.node, ())
            )
            experts += sum(
                costs.expert_bytes(SMALL, p.weight_format, e.layer) for e in one.loads.get(p.node, ())
            )
            kv = max(p.kv_bytes, was.kv_bytes if was else 0)
            changes = was is not None and (was.kv_blocks, was.layers) != (p.kv_blocks, p.layers)
            if was is not None and changes and max(was.first_layer, p.first_layer) > 0:
                kv = p.kv_bytes + was.kv_bytes
            least = p.process_bytes + sum(parts.values()) + kv + p.workspace_bytes + experts
            assert one.peak_bytes[p.node] >= least
        assert hosted <= {e for experts in arrived.values() for e in experts}
        for name in held:
            reloaded = (
                set(one.loads.get(name, ())) if formats.get(name) != _format(one.placement, name) else set()
            )
            held[name] = (arrived[name] - set(one.drops.get(name, ()))) | reloaded
        assert hosted <= {e for experts in held.values() for e in experts}, f"after round {number}"
        for p in one.placement.nodes:
            assert set(p.experts) == held.get(p.node, set())
            assert p.planned_bytes <= limits[p.node]
            formats[p.node] = p.weight_format
    if plan.rounds:
        assert plan.rounds[-1].placement == replace(new, epoch=old.epoch + len(plan.rounds))
        assert sum(one.switches_trunks for one in plan.rounds) <= 1
    else:
        assert old.nodes == new.nodes and old.groups == new.groups


def _format(placement: Placement, name: str) -> str | None:
    return next((p.weight_format for p in placement.nodes if p.node == name), None)


def placed(built: Cluster, **given: object) -> Placement:
    return lay_out(built, SMALL, **given)


def hand_made(**nodes: tuple[float, list[ExpertId]]) -> Placement:
    """Expert hosts with room for so many experts, holding these."""
    return Placement(
        1,
        tuple(
            NodePlan(
                node=name,
                roles=EXPERTS_ONLY,
                first_layer=0,
                last_layer=0,
                experts=tuple(sorted(experts)),
                trunk_bytes=0,
                expert_bytes=SIZE * len(experts),
                kv_blocks=0,
                kv_bytes=0,
                workspace_bytes=100,
                process_bytes=1000,
                memory_bytes=1100 + int(room * SIZE),
            )
            for name, (room, experts) in nodes.items()
        ),
    )


A, B, C, D = (ExpertId(0, index) for index in range(4))


def test_nothing_to_do_takes_no_round() -> None:
    old = hand_made(x=(2, [A, B]))
    assert plan_migration(old, replace(old, epoch=7), SMALL).rounds == ()


def test_where_memory_allows_both_one_round_does() -> None:
    old, new = hand_made(x=(2, [A]), y=(2, [B])), hand_made(x=(2, [B]), y=(2, [A]))
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert len(plan.rounds) == 1 and plan.load_bytes == 2 * SIZE
    assert plan.rounds[0].loads == {"x": (B,), "y": (A,)} and plan.rounds[0].drops == {"x": (A,), "y": (B,)}


def test_one_free_place_lets_two_full_nodes_exchange() -> None:
    old = hand_made(x=(1, [A]), y=(1, [B]), z=(1, []))
    new = hand_made(x=(1, [B]), y=(1, [A]), z=(1, []))
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert plan.load_bytes == 3 * SIZE, "one expert is parked on z for a while"


def test_a_replica_lends_its_place() -> None:
    old = hand_made(x=(2, [A, C]), y=(2, [B, C]))
    new = hand_made(x=(2, [B, C]), y=(2, [A, C]))
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert plan.load_bytes == 3 * SIZE, "C is dropped on one node and loaded again"


def test_an_exchange_without_any_free_place_is_refused_with_numbers() -> None:
    old, new = hand_made(x=(1.5, [A]), y=(1.25, [B])), hand_made(x=(1.5, [B]), y=(1.25, [A]))
    with pytest.raises(MigrationError, match="cannot be exchanged") as error:
        plan_migration(old, new, SMALL)
    assert error.value.needed_bytes == SIZE and error.value.available_bytes == SIZE // 2
    assert "needs 96.0 KiB on x, which has 48.0 KiB free" in str(error.value)


def test_a_ring_of_full_nodes_turns_through_one_free_place() -> None:
    names = "uvwxy"
    experts = [ExpertId(layer, 0) for layer in range(4)] + [A]
    experts[4] = ExpertId(0, 1)
    old = hand_made(**{n: (1, [e]) for n, e in zip(names, experts, strict=True)}, z=(1, []))
    new = hand_made(**{n: (1, [e]) for n, e in zip(names, experts[1:] + experts[:1], strict=True)}, z=(1, []))
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert plan.load_bytes <= 6 * SIZE


def test_a_node_that_leaves_gives_everything_away_first() -> None:
    old = placed(replace(EMPTY, nodes=(home("h", 0.2), host("a", 32), host("b", 32)), memory_ratio=1.0))
    new = placed(replace(EMPTY, nodes=(home("h", 0.2), host("a", 32)), memory_ratio=1.0))
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert {p.node for p in plan.rounds[-1].placement.nodes} == {"h", "a"}


def test_stages_are_loaded_beside_the_home_they_replace() -> None:
    built = replace(EMPTY, nodes=(home("a", 0.9, kv_blocks_spare=64), home("b", 0.9, kv_blocks_spare=64)))
    old = placed(built, groups=every_home(built, SMALL))
    new = placed(built, groups=[even_stages(("a", "b"), 4)])
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    replay(plan_migration(new, old, SMALL), new, old)
    assert any(one.switches_trunks for one in plan.rounds)
    back = next(one for one in plan_migration(new, old, SMALL).rounds if one.switches_trunks)
    assert back.load_bytes["a"] >= 2 * SMALL.layer_bytes[0] + SMALL.head_bytes
    switch = next(one for one in plan.rounds if one.switches_trunks)
    assert switch.peak_bytes["b"] >= old.plan_of("b").kv_bytes + new.plan_of("b").kv_bytes
    assert switch.load_bytes.get("a", 0) == 0, "its layers of the trunk are there already"


def test_room_for_a_second_trunk_is_made_by_moving_experts_away_before_the_switch() -> None:
    built = replace(EMPTY, nodes=(home("a", 1.0), home("b", 1.0), host("c", 40)))
    old = placed(built, groups=[even_stages(("a", "b"), 4)])
    new = placed(built, groups=[even_stages(("b", "a"), 4)])
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)


def on_gpus(placement: Placement) -> Placement:
    return replace(placement, nodes=tuple(replace(plan, device="cuda") for plan in placement.nodes))


def test_a_second_trunk_that_can_have_no_room_is_refused_with_numbers() -> None:
    thin = node("a", needed_bytes(EMPTY, SMALL, 0, 4, 0), frozenset({"decode"}))
    built = replace(EMPTY, nodes=(thin, host("x", 64)))
    old = on_gpus(placed(built))
    new = on_gpus(placed(replace(built, context_tokens=256, kv_tokens=256)))
    with pytest.raises(MigrationError, match="a needs .* beside the old ones") as error:
        plan_migration(old, new, SMALL)
    assert (
        error.value.node == "a"
        and error.value.needed_bytes > error.value.available_bytes == thin.memory_bytes
    )


@pytest.mark.parametrize("device, times", [("cpu", 1), ("cuda", 2)])
def test_a_home_gives_its_pages_back_before_it_takes_others_and_a_gpu_does_not(
    device: str, times: int
) -> None:
    built = replace(EMPTY, nodes=(home("h", 2.0, kv_blocks_spare=64),))
    old = placed(built)
    [plan] = old.nodes
    old = replace(old, nodes=(replace(plan, device=device),))
    new = replace(old, nodes=(replace(plan, device=device, workspace_bytes=plan.workspace_bytes + 1),))
    [switch] = plan_migration(old, new, SMALL).rounds
    others = plan.process_bytes + plan.trunk_bytes + plan.expert_bytes
    assert switch.peak_bytes["h"] == others + times * (plan.kv_bytes + plan.workspace_bytes) + 1


def test_a_format_changes_with_both_formats_side_by_side() -> None:
    built = replace(EMPTY, nodes=(home("h", 0.1), host("a", 120), host("b", 120)))
    new_built = replace(
        built, nodes=(built.nodes[0], replace(built.nodes[1], weight_format="float32"), built.nodes[2])
    )
    old = placed(built)
    new = placed(new_built, previous=old)
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    assert sum(one.load_bytes.get("a", 0) for one in plan.rounds) == new.plan_of("a").expert_bytes


def test_experts_of_a_lost_node_are_loaded_though_nobody_has_them() -> None:
    built = replace(EMPTY, nodes=(home("h", 0.2), host("a", 40), host("b", 40)), memory_ratio=1.0)
    whole = placed(built)
    left = replace(built, nodes=built.nodes[:2])
    survivors = replace(whole, nodes=whole.nodes[:2])
    new = lay_out(left, SMALL, previous=survivors)
    plan = plan_migration(survivors, new, SMALL)
    replay(plan, survivors, new)
    lost = set(whole.plan_of("b").experts)
    assert lost and lost <= {e for one in plan.rounds for experts in one.loads.values() for e in experts}


def test_seconds_add_up_over_rounds_and_not_over_nodes() -> None:
    old, new = hand_made(x=(2, [A]), y=(2, [B])), hand_made(x=(2, [B]), y=(2, [A]))
    plan = plan_migration(old, new, SMALL)
    assert plan.seconds(lambda name: {"x": SIZE, "y": SIZE / 4}[name]) == pytest.approx(4)


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, Placement]:
    """Two placements of the same kind of cluster: memory, roles, groups and nodes may all have changed."""

    def one(names: list[str]) -> Cluster:
        nodes = []
        for index, name in enumerate(names):
            if index == 0 or draw(st.booleans()):
                nodes.append(
                    home(
                        name,
                        draw(st.sampled_from([0.3, 0.6, 1.1])),
                        kv_blocks_spare=draw(st.sampled_from([0, 40, 80])),
                    )
                )
            else:
                nodes.append(host(name, draw(st.integers(3, 30))))
        return replace(EMPTY, nodes=tuple(nodes), memory_ratio=draw(st.sampled_from([1.0, 1.5, 2.0])))

    names = ["a", "b", "c", "d"]
    found = []
    for _ in range(2):
        chosen = sorted(draw(st.sets(st.sampled_from(names), min_size=2)))
        built = one(chosen)
        decode = tuple(n.name for n in built.nodes if n.roles == ALL)
        groups = draw(st.sampled_from([None, [even_stages(decode[:2], 4)], [even_stages(decode[:1], 4)]]))
        previous = found[0] if found and draw(st.booleans()) else None
        try:
            found.append(lay_out(built, SMALL, groups=groups, previous=previous))
        except PlacementError:
            found.append(lay_out(replace(EMPTY, nodes=(home("a", 1.2, kv_blocks_spare=80),)), SMALL))
    return found[0], found[1]


@settings(max_examples=150, deadline=None)
@given(placements())
def test_any_placement_leads_to_any_other_or_is_refused_with_numbers(
    pair: tuple[Placement, Placement],
) -> None:
    old, new = pair
    try:
        plan = plan_migration(old, new, SMALL)
    except MigrationError as error:
        assert error.needed_bytes > error.available_bytes
        return
    replay(plan, old, new)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), st.integers(0, 2**31))
def test_full_nodes_can_always_exchange_through_one_free_place(num_nodes: int, seed: int) -> None:
    import random

    rng = random.Random(seed)
    experts = SMALL.experts()[: 3 * num_nodes]
    deals = []
    for _ in range(2):
        shuffled = rng.sample(experts, len(experts))
        deals.append({f"n{i}": (3, shuffled[3 * i : 3 * i + 3]) for i in range(num_nodes)})
    old, new = (hand_made(**deal, spare=(1, [])) for deal in deals)
    plan = plan_migration(old, new, SMALL)
    replay(plan, old, new)
    moving = sum(len(set(new.plan_of(n).experts) - set(old.plan_of(n).experts)) for n in deals[0])
    assert plan.load_bytes <= 2 * moving * SIZE
