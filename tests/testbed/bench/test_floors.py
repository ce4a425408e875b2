"""The arithmetic of floors, against numbers worked out by hand and against the weights of real folders."""

import json

import pytest

from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from testbed.bench.floors import Cost, decode_cost, limit_of, prefill_cost, sizes_of
from testbed.carried import DEMO_MODEL
from testbed.medium import Shape

TINY = sizes_of(Shape(D=10, L=2, H=3, G=1, P=4, E=5, K=2, F=7, V=100).config())


def test_sizes_are_counted_as_by_hand():
    assert TINY.trunk == 2 * 10 * (2 * 12 + 2 * 4 + 5)
    assert TINY.head == TINY.embedding == 1000
    assert TINY.expert == 3 * 10 * 7
    assert TINY.kv_per_token == 2 * 2 * 4
    assert TINY.attention_flops == 4 * 2 * 12
    assert sizes_of(Shape().config()).total == pytest.approx(1.3136e9, rel=1e-4)


def test_sizes_of_the_demo_model_are_what_the_runtime_holds_of_it():
    found = sizes_of(json.loads((DEMO_MODEL / "config.json").read_text()))
    parts = footprint(Checkpoint.open(DEMO_MODEL))
    assert found.expert * 2 == parts.expert_bytes["as_stored"][0]
    assert found.head * 2 == parts.embed_bytes
    assert found.embedding == 0
    assert found.trunk * 2 == pytest.approx(
        sum(parts.layer_bytes), rel=0.02
    )  # that has norms too, in float32
    assert found.kv_per_token * 4 == sum(parts.kv_bytes_per_token)


def test_a_decode_step_reads_trunk_and_head_once_and_each_used_expert_once():
    cost = decode_cost(TINY, 3, 20, 4.5, trunk_bytes=2, expert_bytes=1, kv_bytes=4)
    assert cost.bytes == (740 + 1000) * 2 + 2 * 4.5 * 210 + 3 * 20 * 16 * 4
    assert cost.flops == 3 * (2 * (740 + 1000 + 2 * 2 * 210) + 20 * 96)


def test_a_prefill_needs_the_head_for_its_last_row_alone():
    cost = prefill_cost(TINY, 10, trunk_bytes=2, expert_bytes=2)
    assert cost.bytes == 2 * (740 + 1000 + 2 * 5 * 210)
    assert cost.flops == 2 * 10 * (740 + 2 * 2 * 210) + 2 * 1000 + 96 * 55


def test_the_floor_is_the_larger_of_both_times():
    cost = Cost(bytes=10e9, flops=300e9)
    assert cost.floor_s(10e9, 100e9) == 3
    assert cost.floor_s(2e9, 100e9) == 5


@pytest.mark.parametrize(
    ("seconds", "name"), [(1.1, "arithmetic"), (10.0, "overhead")], ids=["near the floor", "far from it"]
)
def test_what_explains_most_of_the_time_is_the_limit(seconds, name):
    assert limit_of(Cost(5e9, 100e9), seconds, 10e9, 100e9).name == name


def test_bandwidth_is_the_limit_where_bytes_take_longest():
    limit = limit_of(Cost(10e9, 10e9), 1.25, 10e9, 100e9)
    assert limit.name == "bandwidth"
    assert limit.bandwidth == pytest.approx(0.8)
    assert limit.arithmetic == pytest.approx(0.08)
