"""Speeds corrected by what work takes: least squares over heartbeats find the costs, and restarts begin anew."""

import random
from dataclasses import replace

import pytest

from edge_runtime.coordinator.speed_book import (
    COUNTERS,
    HAND_OUT_STEP_S,
    HAND_OUT_TOKEN_S,
    SERVE_TIMES,
    STEP_EXTRA_S,
    Costs,
    Observed,
    corrected,
    look,
    measured_of,
    promised_s,
)
from edge_runtime.protocol import NodeReport
from tests.support.planning import DEMO, MIB, cluster, node
from topology.node_plan import NodePlan
from topology.placement import plan_placement
from topology.speeds import ExpertSpeed, LinkSpeed, NodeSpeed

SPEED = NodeSpeed(
    memory_bytes_per_s=30e9,
    flops=100e9,
    call_work_s=100e-6,
    serve_work_s=100e-6,
    call_overhead_s=250e-6,
    experts=ExpertSpeed(bytes_per_s=40e9, flops=90e9, overhead_s=20e-6),
)


@pytest.fixture
def plan() -> NodePlan:
    one = cluster(node("a", 512 * MIB), plan="home")
    return plan_placement(one, DEMO).plan_of("a")


def lived(plan: NodePlan, costs: Costs, seed: int = 1, beats: int = 12) -> Observed:
    """Heartbeats of a node whose work costs so much, from one request at a time to sixteen."""
    rng, totals, found = (
        random.Random(seed),
        dict.fromkeys((*COUNTERS, "calls_served", "tokens"), 0.0),
        Observed(),
    )
    for _ in range(beats):
        rows, steps, calls, served = rng.choice((1, 3, 16)), 100, rng.randrange(400), rng.randrange(400)
        done = dict.fromkeys(totals, 0.0) | {
            "step_steps": float(steps),
            "step_rows_computed": float(steps * rows),
            "tokens": float(steps * rows),
            "step_attended_tokens": float(steps * rows * 80),
            "calls_made": float(calls),
            "calls_served": float(served),
            "pairs_sent": float(calls),
            "pairs_served": float(served),
        }
        arithmetic = promised_s(done, SPEED, DEMO, plan)
        done["control_s"] = costs.hand_out * steps * (HAND_OUT_STEP_S + rows * HAND_OUT_TOKEN_S)
        done["processor_s"] = done["control_s"] + (
            costs.factor * arithmetic + steps * costs.step_s + calls * costs.call_s + served * costs.serve_s
        )
        totals = {name: value + done[name] for name, value in totals.items()}
        found = look(found, 7, told(totals), DEMO, plan)
    return found


def told(totals: dict[str, float], speed: NodeSpeed | None = SPEED) -> NodeReport:
    return NodeReport(
        calls_served=int(totals["calls_served"]),
        tokens_generated=int(totals["tokens"]),
        numbers={name: totals[name] for name in COUNTERS},
        speed=speed,
        cores=2.0,
    )


@pytest.mark.parametrize(
    "costs",
    [
        Costs(1.0, 200e-6, 100e-6, 250e-6),
        Costs(1.6, 500e-6, 150e-6, 600e-6, 3.0),
        Costs(2.5, 1e-4, 5e-5, 2e-4),
    ],
)
def test_what_work_takes_is_found_from_heartbeats(plan, costs) -> None:
    found = lived(plan, costs).costs
    assert found is not None
    for rows, calls, served in ((1, 0, 0), (1, 8, 0), (1, 0, 8), (16, 0, 0), (16, 4, 4), (4, 2, 1)):
        step = dict.fromkeys((*COUNTERS, "calls_served", "tokens"), 0.0)
        step |= {"step_steps": 1.0, "step_rows_computed": float(rows), "tokens": float(rows)}
        step |= {"calls_made": float(calls), "calls_served": float(served)}
        arithmetic = promised_s(step, SPEED, DEMO, plan)
        true, told_ = (
            c.factor * arithmetic + c.step_s + calls * c.call_s + served * c.serve_s for c in (costs, found)
        )
        assert told_ == pytest.approx(true, rel=0.2), (rows, calls, served)
    assert found.hand_out == pytest.approx(costs.hand_out), "what another thread does is no part of a step"


def test_a_little_work_teaches_nothing_and_a_restart_begins_anew(plan) -> None:
    first = look(Observed(), 7, told(dict.fromkeys((*COUNTERS, "calls_served", "tokens"), 0.0)), DEMO, plan)
    little = dict.fromkeys((*COUNTERS, "calls_served", "tokens"), 0.0) | {
        "step_steps": 3.0,
        "processor_s": 9.0,
    }
    assert look(first, 7, told(little), DEMO, plan).costs is None
    known = lived(plan, Costs(2.0, 1e-4, 1e-4, 2e-4))
    again = look(known, 8, told(dict.fromkeys(little, 0.0)), DEMO, plan)
    assert again.costs is None and again.pid == 8
    smaller = look(known, 7, told(dict.fromkeys(little, 0.0)), DEMO, plan)
    assert smaller.costs == known.costs, "another engine counts anew; what is known stays"
    assert look(first, 7, told(little, None), DEMO, plan).costs is None


def test_costs_are_added_to_what_was_measured() -> None:
    plain = corrected(SPEED, None)
    assert plain == replace(
        SPEED,
        step_overhead_s=SPEED.step_overhead_s + STEP_EXTRA_S,
        hand_out_step_s=HAND_OUT_STEP_S,
        hand_out_token_s=HAND_OUT_TOKEN_S,
        serve_work_s=SERVE_TIMES * SPEED.serve_work_s,
        call_overhead_s=pytest.approx(50e-6 + SERVE_TIMES * SPEED.serve_work_s),
    )
    slow = corrected(SPEED, Costs(2.0, 1e-3, 300e-6, 700e-6, 3.0))
    assert slow.hand_out_token_s == pytest.approx(3 * HAND_OUT_TOKEN_S)
    assert slow.memory_bytes_per_s == SPEED.memory_bytes_per_s / 2
    assert slow.step_overhead_s == pytest.approx(2 * SPEED.step_overhead_s + 1e-3)
    assert (slow.call_work_s, slow.serve_work_s) == (300e-6, 700e-6)
    assert slow.call_overhead_s == pytest.approx(750e-6), "what an echo waits beyond its work comes on top"


def test_links_are_the_mean_of_what_both_ends_say_and_only_who_reported_is_measured() -> None:
    reports = {
        "a": NodeReport(links={"b": LinkSpeed(rtt_s=0.002, bandwidth_bps=1e8)}, speed=SPEED, cores=2.0),
        "b": NodeReport(links={"a": LinkSpeed(rtt_s=0.004, bandwidth_bps=3e8)}),
    }
    found = measured_of(reports, {}, ("a", "b", "c"))
    assert found.links == {("a", "b"): LinkSpeed(rtt_s=0.003, bandwidth_bps=2e8)}
    assert found.speeds.keys() == {"a"} and found.cores == {"a": 2.0}


def test_of_two_ends_that_see_a_rate_and_a_bound_the_rate_counts_and_of_two_bounds_the_higher() -> None:
    def seen(*ends: LinkSpeed) -> LinkSpeed:
        reports = {
            own: NodeReport(links={peer: link}) for own, peer, link in zip("ab", "ba", ends, strict=True)
        }
        return measured_of(reports, {}, "ab").links["a", "b"]

    rate = LinkSpeed(rtt_s=0.001, bandwidth_bps=1e9)
    low, high = (LinkSpeed(rtt_s=0.001, bandwidth_bps=bps, rate_is_bound=True) for bps in (2e9, 8e9))
    assert seen(low, rate) == rate
    assert seen(low, high) == high
