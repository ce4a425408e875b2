"""How fast homes are against one another."""

from dataclasses import replace

import pytest

from edge_runtime.coordinator.home_speeds import home_speeds
from tests.support.coordinators import cluster, footprint
from topology.placement import plan_placement
from topology.speeds import Measured, NodeSpeed

PARTS = footprint(width=64, top_k=2)
HOMES = cluster("a", "b", "c", memory_ratio=3.0)
FAST = NodeSpeed(memory_bytes_per_s=8e9, flops=2e10)
SLOW = NodeSpeed(memory_bytes_per_s=2e9, flops=5e9)


def speeds(**measured: NodeSpeed) -> dict[str, float]:
    return home_speeds(HOMES, PARTS, plan_placement(HOMES, PARTS), Measured(speeds=measured))


def test_homes_that_are_alike_have_one_speed():
    assert speeds() == {"a": 1.0, "b": 1.0, "c": 1.0}
    slightly = replace(FAST, memory_bytes_per_s=1.02 * FAST.memory_bytes_per_s)
    assert speeds(a=FAST, b=slightly, c=FAST) == {"a": 1.0, "b": 1.0, "c": 1.0}, (
        "what a measurement varies by"
    )


def test_a_slow_home_counts_less_and_what_the_file_says_counts_until_it_is_measured():
    found = speeds(a=FAST, b=SLOW, c=FAST)
    assert found["a"] == found["c"] > 1 > found["b"]
    assert found["a"] / found["b"] == pytest.approx(4, rel=0.15)
    nodes = (
        tuple(replace(node, memory_bytes_per_s=2e9, flops=5e9) for node in HOMES.nodes[:1]) + HOMES.nodes[1:]
    )
    declared = replace(HOMES, nodes=nodes)
    placement = plan_placement(declared, PARTS)
    told = home_speeds(declared, PARTS, placement, Measured())
    assert told["a"] < told["b"] == told["c"]
    corrected = home_speeds(declared, PARTS, placement, Measured(speeds=dict.fromkeys("abc", FAST)))
    assert set(corrected.values()) == {1.0}


def test_there_is_nothing_to_compare_with_one_home_or_an_unknown_model():
    alone = cluster("a")
    assert home_speeds(alone, PARTS, plan_placement(alone, PARTS), Measured()) == {}
    assert home_speeds(HOMES, footprint(), plan_placement(HOMES, footprint()), Measured()) == {}
