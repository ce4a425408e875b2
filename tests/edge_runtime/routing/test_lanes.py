"""Lanes: clear tiers keep to theirs, the border moves only after a while and never to the edge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.lanes import Lanes, LaneSettings, adapt, eligible, new_lanes

SETTINGS = LaneSettings(full_tier=16)
LANES = Lanes(8, ("a", "b"), ("c", "d"))
FREE = dict.fromkeys("abcd", True)


@pytest.mark.parametrize(
    ("tier", "homes"), [(4, "ab"), (5, "ab"), (6, "abcd"), (8, "abcd"), (10, "abcd"), (11, "cd"), (0, "cd")]
)
def test_clear_tiers_have_a_lane_and_those_near_the_border_both(tier, homes):
    assert eligible(LANES, SETTINGS, tier, FREE) == (tuple(homes), False)


def test_a_full_lane_is_left_only_if_the_other_has_room():
    full = FREE | {"a": False, "b": False}
    assert eligible(LANES, SETTINGS, 4, full | {"c": False}) == (("d",), True)
    assert eligible(LANES, SETTINGS, 4, dict.fromkeys("abcd", False)) == (("a", "b"), False)
    assert eligible(LANES, SETTINGS, 4, {"c": True}) == (("c",), True), "homes that are gone are no lane"
    assert eligible(LANES, SETTINGS, 4, {}) == ((), False)


def run(pressure, until: float, lanes: Lanes = LANES, step: float = 0.1, start: float = 0.0) -> Lanes:
    now = start
    while now < until:
        lanes = adapt(lanes, SETTINGS, pressure, now)
        now += step
    return lanes


HEAVY_LOW = {"a": 9.0, "b": 9.0, "c": 2.0, "d": 2.0}


def test_the_border_moves_one_tier_after_the_dwell_and_then_rests():
    assert run(HEAVY_LOW, 1.9).border == 8
    assert run(HEAVY_LOW, 2.5).border == 7
    assert run(HEAVY_LOW, 6.9).border == 7, "frozen for five seconds"
    assert run(HEAVY_LOW, 8.0).border == 6
    assert run({name: 11 - value for name, value in HEAVY_LOW.items()}, 2.5).border == 9


def test_a_break_in_the_imbalance_starts_the_dwell_anew():
    lanes = run(HEAVY_LOW, 1.5)
    lanes = adapt(lanes, SETTINGS, dict.fromkeys("abcd", 3.0), 1.6)
    assert run(HEAVY_LOW, 3.5, lanes, start=1.7).border == 8


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=60))
def test_no_lane_ever_loses_all_its_tiers(loads):
    lanes, now = LANES, 0.0
    for low, high in loads:
        lanes = adapt(lanes, SETTINGS, {"a": low, "b": low, "c": high, "d": high}, now)
        now += 1.5
        assert 1 <= lanes.border <= 15 and lanes.low and lanes.high


def test_lanes_need_two_homes():
    assert new_lanes(["a"], SETTINGS) is None
    lanes = new_lanes(["a", "b", "c"], SETTINGS, low_share=0.9)
    assert lanes is not None and lanes.low == ("a", "b") and lanes.high == ("c",)
