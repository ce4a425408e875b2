"""The step-time model: DESIGN's figures, a simulation of the gate it has to agree with, and what must only grow."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import DEMO, model
from topology.ids import ExpertId
from topology.node_plan import Stage
from topology.speeds import LinkSpeed, Machines, NodeSpeed, slower
from topology.step_time import (
    ExpertShares,
    chances_of,
    distinct_experts,
    expert_shares,
    predict_home_step,
    predict_stages,
    trunk_seconds,
)

EVERYWHERE = dict.fromkeys(DEMO.experts(), ("a",))


def machines(**speeds: NodeSpeed) -> Machines:
    return Machines(
        {name: speeds.get(name, NodeSpeed()) for name in "abcd"},
        default_link=LinkSpeed(rtt_s=0.005, bandwidth_bps=200e6),
    )


def hosts(local: int, *peers: str, experts: int = 32, layers: int = 6) -> dict[ExpertId, tuple[str, ...]]:
    """The first `local` experts of each layer at a, the rest dealt out to peers."""
    return {
        ExpertId(layer, index): ("a",) if index < local else (peers[index % len(peers)],)
        for layer in range(layers)
        for index in range(experts)
    }


def step(found: dict[ExpertId, tuple[str, ...]], batch: int = 1, footprint=DEMO, demand=None):
    shares = expert_shares(footprint, found, home="a", demand=demand)
    return predict_home_step(footprint, machines(), home="a", shares=shares, batch=batch)


def test_different_experts_of_a_batch_are_as_design_says() -> None:
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(32, 4, 16) == pytest.approx(32 * (1 - 0.875**16))
    assert distinct_experts(8, 8, 3) == pytest.approx(8)
    assert distinct_experts(0, 0, 3) == 0


@pytest.mark.parametrize(("local", "layers"), [(0.9, 27), (0.99, 4)])
def test_locality_leaves_the_hops_that_design_counts(local: float, layers: int) -> None:
    footprint = model(layers=48, experts=128, top_k=8, width=64, inner=64)
    mass = np.tile([8 * local, 8 * (1 - local)], (48, 1))
    shares = ExpertShares(("b",), mass, 16 * mass)
    found = predict_home_step(footprint, machines(), home="a", shares=shares)
    assert found.hit_rate == pytest.approx(local)
    assert found.calls == pytest.approx(layers, abs=1)
    assert found.remote_layers == pytest.approx(layers, abs=1)


def test_a_home_with_everything_reads_trunk_touched_experts_and_head_once() -> None:
    speed = NodeSpeed()
    found = step(EVERYWHERE)
    touched = 6 * 4 * DEMO.expert_bytes["as_stored"][0]
    read = sum(DEMO.layer_bytes) + DEMO.head_bytes + DEMO.embed_bytes + touched
    work = (
        sum(DEMO.layer_bytes) + DEMO.head_bytes + DEMO.embed_bytes + touched
    )  # 2 operations a weight of 2 bytes
    assert found.seconds == pytest.approx(
        speed.step_overhead_s
        + 6 * speed.layer_overhead_s
        + read / speed.memory_bytes_per_s
        + 256 * sum(DEMO.kv_bytes_per_token) / speed.attended_bytes_per_s
        + work / speed.flops
    )
    assert (found.calls, found.wait_s, found.hit_rate) == (0, 0, 1)


def test_handing_tokens_out_takes_a_processor_and_no_time_of_the_step() -> None:
    shares = expert_shares(DEMO, EVERYWHERE, home="a")
    plain, handing = (
        predict_home_step(DEMO, machines(a=speed), home="a", shares=shares, batch=4)
        for speed in (NodeSpeed(), NodeSpeed(hand_out_step_s=3e-4, hand_out_token_s=5e-5))
    )
    assert handing.seconds == plain.seconds and handing.home_s == plain.home_s
    assert handing.work_s["a"] == pytest.approx(plain.work_s["a"] + 5e-4)


def test_a_home_without_experts_waits_a_round_trip_in_every_layer() -> None:
    found = step(hosts(0, "b"))
    assert found.hit_rate == 0 and found.local_s == 0
    assert found.calls == pytest.approx(6)
    assert found.wait_s > 6 * 0.005
    rows = 256 * 4 * 5 * 8 / 200e6  # one out, four back, 1 KB each
    expert = 4 * DEMO.expert_bytes["as_stored"][0]
    one = 0.005 + 2 * 50e-6 + rows + expert / 8e9 + expert / 60e9
    assert found.wait_s == pytest.approx(6 * one)


def test_a_layer_waits_for_the_slowest_peer_not_for_the_sum() -> None:
    one, two = step(hosts(0, "b")), step(hosts(0, "b", "c"))
    assert two.calls > 1.9 * one.calls * 0.9
    assert two.wait_s < 1.1 * one.wait_s


def test_own_experts_are_hidden_behind_the_wait() -> None:
    found = step(hosts(16, "b"), batch=16)
    nothing_local = step(hosts(0, "b"), batch=16)
    assert found.seconds < nothing_local.seconds
    assert found.local_s + found.wait_s < nothing_local.wait_s


def simulated_layer(local: int, peers: tuple[str, ...], batch: int, rounds: int = 4000) -> float:
    """Mean seconds of one MoE layer with a uniform gate, drawn instead of reckoned."""
    rng = np.random.default_rng(1)
    speed, link = NodeSpeed(), LinkSpeed(rtt_s=0.005, bandwidth_bps=200e6)
    owner = np.array([0 if i < local else 1 + i % len(peers) for i in range(32)])
    size, total = DEMO.expert_bytes["as_stored"][0], 0.0
    for _ in range(rounds):
        chosen = np.stack([rng.choice(32, 4, replace=False) for _ in range(batch)])
        times, calls = [], 0
        for column in range(len(peers) + 1):
            mine = owner[chosen] == column
            touched = len(set(chosen[mine].tolist()))
            compute = touched * size / speed.memory_bytes_per_s + mine.sum() * size / speed.flops
            if column == 0:
                times.append(compute)
            elif mine.any():
                rows = mine.any(axis=1).sum() + mine.sum()
                wire = rows * DEMO.width * 4 * 8 / link.bandwidth_bps
                times.append(link.rtt_s + speed.call_overhead_s + wire + compute)
                calls += 1
        total += max(times) + calls * speed.call_overhead_s
    return total / rounds


@pytest.mark.parametrize(
    ("local", "peers", "batch"), [(0, ("b",), 1), (20, ("b", "c"), 1), (8, ("b", "c", "d"), 4)]
)
def test_the_expectation_agrees_with_drawing_what_the_gate_chooses(
    local: int, peers: tuple[str, ...], batch: int
) -> None:
    found = step(hosts(local, *peers), batch=batch)
    assert (found.local_s + found.wait_s) / 6 == pytest.approx(simulated_layer(local, peers, batch), rel=0.05)


def test_demand_makes_hot_experts_at_the_home_count_for_more() -> None:
    demand = {expert: 10.0 if expert.index < 8 else 1.0 for expert in DEMO.experts()}
    plain, skewed = step(hosts(8, "b")), step(hosts(8, "b"), demand=demand)
    assert plain.hit_rate == pytest.approx(0.25)
    assert skewed.hit_rate == pytest.approx(80 / 104)
    assert skewed.seconds < plain.seconds


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=32, max_size=32), st.integers(1, 32))
def test_chances_are_probabilities_that_sum_to_k(wanted: list[float], top_k: int) -> None:
    footprint = replace(DEMO, top_k=top_k)
    demand = {ExpertId(0, index): value for index, value in enumerate(wanted)}
    found = chances_of(footprint, [0], demand)[0]
    assert found.min() >= 0 and found.max() <= 1 + 1e-9
    assert found.sum() == pytest.approx(top_k, rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 32), st.integers(1, 3), st.integers(1, 32), st.floats(1.1, 20))
def test_a_step_only_grows_with_batch_and_with_slower_nodes(
    local: int, peers: int, batch: int, factor: float
) -> None:
    found = hosts(local, *"bcd"[:peers])
    shares = expert_shares(DEMO, found, home="a")
    base = predict_home_step(DEMO, machines(), home="a", shares=shares, batch=batch).seconds
    assert predict_home_step(DEMO, machines(), home="a", shares=shares, batch=batch + 1).seconds > base
    for name in "abcd":
        slow = machines(**{name: slower(NodeSpeed(), factor)})
        again = predict_home_step(DEMO, slow, home="a", shares=shares, batch=batch).seconds
        assert again > base if name == "a" else again >= base - 1e-12


def test_an_expert_without_a_host_means_the_step_never_ends() -> None:
    found = dict(EVERYWHERE)
    found.pop(ExpertId(3, 7))
    assert expert_shares(DEMO, found, home="a") is None
    assert step(found).seconds == float("inf")
    lost = hosts(8, "b")
    assert expert_shares(DEMO, lost, home="a", alive={"c"}) is None


def test_stages_split_the_work_and_pay_their_hops() -> None:
    whole = step(EVERYWHERE)
    stages = (Stage("a", 0, 2), Stage("b", 2, 6))
    shares = [
        expert_shares(
            DEMO,
            {expert: (s.node,) for expert in DEMO.experts() if expert.layer in s.layers},
            home=s.node,
            first_layer=s.first_layer,
            last_layer=s.last_layer,
        )
        for s in stages
    ]
    found = predict_stages(DEMO, machines(), stages, shares)
    assert found.hops_s == pytest.approx(2 * (0.0025 + 50e-6) + (1024 + 4) * 8 / 200e6)
    assert sum(s.seconds for s in found.stages) == pytest.approx(whole.seconds + NodeSpeed().step_overhead_s)
    assert found.latency_s == pytest.approx(whole.seconds + NodeSpeed().step_overhead_s + found.hops_s)
    assert found.tokens_per_s == pytest.approx(1 / found.slowest_s)
    assert found.stages[0].seconds < found.stages[1].seconds, "two layers against four and the head"


def test_a_single_stage_is_a_plain_home() -> None:
    shares = expert_shares(DEMO, EVERYWHERE, home="a")
    found = predict_stages(DEMO, machines(), (Stage("a", 0, 6),), [shares], batch=3)
    assert found.hops_s == 0 and found.latency_s == step(EVERYWHERE, 3).seconds
    assert found.tokens_per_s == pytest.approx(3 / found.latency_s)


def test_a_dense_model_has_a_step_time_too() -> None:
    dense = replace(DEMO, moe_layers=(), experts_per_layer=0, top_k=0, width=0)
    found = predict_home_step(dense, machines(), home="a", shares=None)
    assert 0 < found.seconds < 1 and found.hit_rate == 1


def test_a_model_of_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="width and top_k, found 0 and 4"):
        step(EVERYWHERE, footprint=replace(DEMO, width=0))


def test_the_typical_speed_gives_the_demo_model_what_was_measured() -> None:
    """One node, batch 1: 2.0 ms a step on a busy 2-core x86, of it 56 us a layer for experts; batch 16: 660 us."""
    assert step(EVERYWHERE).seconds == pytest.approx(2.0e-3, rel=0.35)
    assert step(EVERYWHERE).local_s / 6 == pytest.approx(56e-6, rel=0.6)
    assert step(EVERYWHERE, 16).local_s / 6 == pytest.approx(660e-6, rel=0.25)


def test_the_batch_attends_to_its_kv_slower_than_memory_is_read() -> None:
    short, _ = trunk_seconds(DEMO, NodeSpeed(), 4, 10)
    long, _ = trunk_seconds(DEMO, NodeSpeed(), 4, 1010)
    assert (long - short)[0] == pytest.approx(4 * 1000 * DEMO.kv_bytes_per_token[0] / 5e9)


def test_predictions_are_the_same_whatever_the_order_of_hosts() -> None:
    found = hosts(10, "b", "c", "d")
    shuffled = dict(random.Random(3).sample(sorted(found.items()), len(found)))
    assert step(found) == step(shuffled)
