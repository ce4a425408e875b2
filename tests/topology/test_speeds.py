"""Speeds: measured before declared before typical, and a fit that few or disturbed samples do not lead astray."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import cluster, node
from topology.cluster import Link
from topology.speeds import LinkSpeed, NodeSpeed, SpeedSample, fit_speed, machines_of, slower

TRUE = NodeSpeed(
    memory_bytes_per_s=20e9, flops=200e9, step_overhead_s=1e-3, layer_overhead_s=50e-6, call_overhead_s=30e-6
)


def measured(speed: NodeSpeed, size: float, work: float, *, noise: float = 1.0, **counts: int) -> SpeedSample:
    seconds = (
        size / speed.memory_bytes_per_s
        + work / speed.flops
        + counts.get("steps", 0) * speed.step_overhead_s
        + counts.get("layers", 0) * speed.layer_overhead_s
        + counts.get("calls", 0) * speed.call_overhead_s
    )
    return SpeedSample(size, work, seconds * noise, **counts)


def samples(speed: NodeSpeed, *, noise: float = 0.0, seed: int = 0) -> list[SpeedSample]:
    """Calls, layers and steps of several sizes, as a start-up measurement would make them."""
    rng = random.Random(seed)
    made = []
    for size in (1e5, 1e6, 1e7):
        for work in (0.0, 1e7, 1e9):
            for counts in ({"calls": 1}, {"layers": 1}, {"layers": 6}, {"steps": 1, "layers": 6}):
                made.append(measured(speed, size, work, noise=1 + rng.uniform(-noise, noise), **counts))
    return made


def assert_near(found: NodeSpeed, wanted: NodeSpeed, tolerance: float) -> None:
    for name in ("memory_bytes_per_s", "flops", "step_overhead_s", "layer_overhead_s", "call_overhead_s"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=tolerance), name


def test_exact_samples_give_the_speed_back() -> None:
    assert_near(fit_speed(samples(TRUE)), TRUE, 0.05)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.2, 30), st.integers(0, 2**31))
def test_noise_of_ten_percent_moves_the_speed_little(factor: float, seed: int) -> None:
    speed = slower(TRUE, factor)
    assert_near(fit_speed(samples(speed, noise=0.1, seed=seed)), speed, 0.35)


def test_a_neighbour_that_disturbs_some_samples_changes_little() -> None:
    disturbed = [
        sample._replace(seconds=sample.seconds * (8 if index % 7 == 3 else 1))
        for index, sample in enumerate(samples(TRUE))
    ]
    assert_near(fit_speed(disturbed), TRUE, 0.3)


def test_without_samples_the_prior_comes_back() -> None:
    assert fit_speed([]) == NodeSpeed()
    assert fit_speed([SpeedSample(1e6, 0, 0.0)], prior=TRUE) == TRUE


def test_what_samples_do_not_tell_stays_as_it_was_believed() -> None:
    only_reads = [measured(TRUE, size, 0.0) for size in (1e6, 1e7, 1e8)]
    found = fit_speed(only_reads, prior=NodeSpeed())
    assert found.memory_bytes_per_s == pytest.approx(TRUE.memory_bytes_per_s, rel=0.05)
    assert found.flops == pytest.approx(NodeSpeed().flops)
    assert found.step_overhead_s == pytest.approx(NodeSpeed().step_overhead_s)


def test_one_sample_is_enough_to_learn_that_a_node_is_slow() -> None:
    slow = slower(NodeSpeed(), 4)
    found = fit_speed([measured(slow, 1e8, 0.0)])
    assert found.memory_bytes_per_s == pytest.approx(slow.memory_bytes_per_s, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            SpeedSample,
            st.floats(0, 1e9),
            st.floats(0, 1e11),
            st.floats(0, 10),
            st.integers(0, 2),
            st.integers(0, 48),
            st.integers(0, 9),
            st.floats(0, 1e9),
        ),
        max_size=6,
    )
)
def test_any_samples_give_a_speed_that_is_positive_and_finite(found: list[SpeedSample]) -> None:
    speed = fit_speed(found)
    for name in ("memory_bytes_per_s", "flops", "step_overhead_s", "layer_overhead_s", "call_overhead_s"):
        assert 0 < getattr(speed, name) < math.inf
    assert 0 < speed.attended_bytes_per_s < math.inf


def test_measured_wins_over_declared_and_declared_over_typical() -> None:
    built = cluster(
        node("a", 1, rate=5e9),
        node("b", 1),
        replace(node("c", 1), threads=4),
        links=(Link("a", "b", 0.5, 1e6), Link("b", "c", 0.25, 2e6)),
    )
    machines = machines_of(built, {"b": TRUE}, {("b", "a"): LinkSpeed(rtt_s=0.1, bandwidth_bps=3e6)})
    assert machines.speed("a").memory_bytes_per_s == 5e9
    assert machines.speed("b") == TRUE
    assert machines.speed("c").flops == 4 * NodeSpeed().flops
    assert machines.link("a", "b") == LinkSpeed(rtt_s=0.1, bandwidth_bps=3e6)
    assert machines.link("c", "b") == LinkSpeed(rtt_s=0.25, bandwidth_bps=2e6)
    assert machines.link("a", "c") == LinkSpeed(rtt_s=0.001, bandwidth_bps=1e9)


def test_a_measured_bound_leaves_a_declared_rate_that_it_does_not_contradict() -> None:
    plain = cluster(node("a", 1), node("b", 1), default_link=Link("*", "*", 0.002, 1e9))
    for bound_bps, expected in ((1e8, 1e9), (2e10, 2e10)):
        found = machines_of(
            plain, links={("a", "b"): LinkSpeed(rtt_s=0.001, bandwidth_bps=bound_bps, rate_is_bound=True)}
        )
        assert found.link("a", "b").bandwidth_bps == expected and found.link("a", "b").rtt_s == 0.001
