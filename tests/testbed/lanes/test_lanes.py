"""`testbed lanes`: costs that fall with K, replays in which nobody is lost, and rows for every load."""

import csv

import numpy as np
import pytest
from click.testing import CliRunner

from edge_runtime.routing.lanes import LaneSettings
from testbed.lanes.cli import lanes
from testbed.lanes.costs import A6000, GEOMETRIES, Geometry, StepCosts, measured_machine
from testbed.lanes.replay import capacity, replay, workload

OLMOE = GEOMETRIES["olmoe"]
COSTS = StepCosts(OLMOE, A6000)


def test_a_step_costs_less_at_lower_k_and_what_the_dearest_costs_where_all_run_it():
    for rows in (1, 8, 200):
        seconds = [COSTS.seconds([tier], [rows], rows) for tier in (1, 8, 16, 24, 31)]
        assert seconds == sorted(seconds)
        mixed = COSTS.seconds([8, 32], [rows, rows], 2 * rows)
        assert mixed < COSTS.seconds([8, 32], [rows, rows], 2 * rows, batch_max=True)
    alone = COSTS.seconds([32], [4], 4), COSTS.seconds([8], [4], 4)
    together = [COSTS.seconds([8, 32], [2, 2], 4)] * 2
    assert sum(alone) < sum(together), "rows of one tier share more slices"


def test_touched_slices_are_those_of_whole_experts_at_the_full_tier():
    from topology.step_time import distinct_experts

    nothing = StepCosts(OLMOE, A6000._replace(flops=1e30, call_s=0.0), overhead_s=0.0, layer_s=0.0, row_s=0.0)
    for rows in (1, 5, 40):
        read = nothing.seconds([32], [rows], 0) * A6000.bytes_per_s / OLMOE.layers / 2
        experts = distinct_experts(64, 8, rows) * 3 * 2048 * 1024
        assert read == pytest.approx(OLMOE.attention_weights + experts, rel=1e-6)


@pytest.mark.parametrize("batch_max", [False, True])
@pytest.mark.parametrize("with_lanes", [False, True])
def test_every_request_is_answered_and_the_same_seed_gives_the_same(batch_max, with_lanes):
    arrivals = workload(120, 60.0, (12, 32), np.random.default_rng(3))
    settings = LaneSettings(32) if with_lanes else None
    first, again = (
        replay(arrivals, COSTS, num_homes=3, lanes=settings, slots=4, batch_max=batch_max) for _ in range(2)
    )
    assert len(first.ttft_ms) == 96 and (first.ttft_ms > 0).all()
    assert (first.ttft_ms == again.ttft_ms).all() and first.crossings == again.crossings
    assert (first.over_served > 0) == batch_max, "nobody is over-served where rows run their own tier"
    if not with_lanes:
        assert first.crossings == first.moves == 0


def test_lanes_keep_tiers_apart_so_that_less_is_over_served():
    rate = 0.9 * capacity(COSTS, (12, 32), 2, slots=4, batch_max=True)
    arrivals = workload(200, rate, (12, 32), np.random.default_rng(1))
    without, with_lanes = (
        replay(arrivals, COSTS, num_homes=2, lanes=each, slots=4, batch_max=True)
        for each in (None, LaneSettings(32))
    )
    assert with_lanes.over_served < without.over_served


def test_costs_of_this_machine_are_measured():
    small = Geometry("small", 2, 8, 2, 64, 64, 4 * 64 * 64, 100)
    machine = measured_machine(small, rounds=1)
    assert machine.flops != 0 and machine.bytes_per_s != 0 and "timed" in machine.about


def test_the_command_writes_a_table_a_csv_and_says_what_it_cannot_read(tmp_path):
    few = ["--geometry", "olmoe", "--seeds", "2", "--requests", "60", "--loads", "0.5,0.9", "--homes", "2"]
    done = CliRunner().invoke(lanes, [*few, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and "by its data sheet" in done.output
    with (tmp_path / "lanes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rows run"], row["load"]) for row in rows] == [
        (way, load) for way in ("own tiers", "batch maximum") for load in ("0.5", "0.9")
    ]
    for row in rows:
        assert float(row["p99 % least"]) <= float(row["p99 % median"]) <= float(row["p99 % most"])
    for option, value, told in (
        ("--tiers", "0,32", "allowed is 1 to 32"),
        ("--tiers", "a", "numbers with commas"),
        ("--loads", "3", "above 0, at most 2"),
        ("--geometry", "llama", "there are olmoe"),
    ):
        with pytest.raises(Exception, match=told):
            CliRunner().invoke(lanes, [option, value], catch_exceptions=False)
