"""What a placement is predicted to do under so many requests, on machines of their own and on one that all share."""

from dataclasses import replace

import pytest

from tests.support.planning import DEMO, MIB, cluster, needed_bytes, node
from topology.placement import plan_placement
from topology.serving import default_counts, predict_serving
from topology.speeds import ExpertSpeed, NodeSpeed, machines_of


@pytest.fixture
def homes():
    """Two homes that hold everything."""
    plain = cluster(plan="home", memory_ratio=2.0)
    size = needed_bytes(plain, DEMO, 0, 6) + MIB
    found = replace(plain, nodes=(node("a", size), node("b", size, port=6001)))
    return found, plan_placement(found, DEMO)


def test_requests_are_shared_out_evenly_and_rates_add_up(homes) -> None:
    found, placement = homes
    one, four, five = predict_serving(DEMO, machines_of(found), placement, (1, 4, 5))
    assert [count for _, count, _ in one.groups] == [1]
    assert [count for _, count, _ in five.groups] == [3, 2]
    assert four.tokens_per_s == pytest.approx(4 / four.seconds)
    assert one.seconds < four.seconds < five.seconds


def test_homes_on_one_machine_share_its_processors(homes) -> None:
    found, placement = homes
    [apart] = predict_serving(DEMO, machines_of(found), placement, (8,))
    [alike] = predict_serving(DEMO, machines_of(found, cores={"a": 4.0}), placement, (8,))
    [tight] = predict_serving(DEMO, machines_of(found, cores={"a": 1.0}), placement, (8,))
    [busy] = predict_serving(DEMO, machines_of(found, cores={"a": 1.0}, busy=2.0), placement, (8,))
    assert alike.seconds == pytest.approx(apart.seconds, rel=0.05)
    assert 1.8 * apart.seconds < tight.seconds < 0.8 * busy.seconds


def test_what_was_measured_counts_before_what_the_file_says(homes) -> None:
    found, placement = homes
    measured = NodeSpeed(
        memory_bytes_per_s=80e9,
        experts=ExpertSpeed(bytes_per_s=80e9, flops=600e9, overhead_s=1e-6),
        row_overhead_s=1e-5,
    )
    [typical] = predict_serving(DEMO, machines_of(found), placement, (1,))
    [fast] = predict_serving(DEMO, machines_of(found, {"a": measured}), placement, (1,))
    assert fast.seconds < typical.seconds


def test_a_model_of_unknown_shape_is_not_predicted(homes) -> None:
    found, placement = homes
    assert predict_serving(replace(DEMO, width=0), machines_of(found), placement, (1,)) == ()
    assert predict_serving(DEMO, machines_of(found), replace(placement, groups=()), (1,)) == ()
    assert default_counts(16) == (1, 4, 16) and default_counts(1) == (1,)


def test_a_speed_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_bytes_per_s is 0"):
        NodeSpeed(memory_bytes_per_s=0)
    with pytest.raises(ValueError, match="step_overhead_s is inf"):
        NodeSpeed(step_overhead_s=float("inf"))
