"""Lanes: clear tiers keep to theirs, the border moves only after a while and never to the edge."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.base import HomeLoad
from edge_runtime.routing.lane_book import LaneBook
from edge_runtime.routing.lanes import Lanes, LaneSettings, adapt, eligible, new_lanes, settled

SETTINGS = LaneSettings(full_tier=16)
LANES = Lanes(8, ("a", "b"), ("c", "d"))
FREE = dict.fromkeys("abcd", True)


@pytest.mark.parametrize(
    ("tier", "homes", "lane"),
    [
        (4, "ab", "low"),
        (5, "ab", "low"),
        (6, "abcd", "either"),
        (8, "abcd", "either"),
        (10, "abcd", "either"),
        (11, "cd", "high"),
        (0, "cd", "high"),
    ],
)
def test_clear_tiers_have_a_lane_and_those_near_the_border_both(tier, homes, lane):
    assert eligible(LANES, SETTINGS, tier, FREE) == (tuple(homes), lane, False)


def test_a_full_lane_is_left_for_a_slot_in_the_other_or_where_all_wait():
    full = FREE | {"a": False, "b": False}
    assert eligible(LANES, SETTINGS, 4, full | {"c": False}) == (("d",), "low", True)
    assert eligible(LANES, SETTINGS, 4, dict.fromkeys("abcd", False)) == (tuple("abcd"), "low", True)
    assert eligible(LANES, SETTINGS, 4, {"c": True}) == (("c",), "low", True), (
        "homes that are gone are no lane"
    )
    assert eligible(LANES, SETTINGS, 4, {}) == ((), "low", False)


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
    lanes = new_lanes(["a", "b", "c"], LaneSettings(full_tier=16, low_share=0.9))
    assert lanes is not None and lanes.low == ("a", "b") and lanes.high == ("c",)
    least = new_lanes(["a", "b", "c"], LaneSettings(full_tier=16, low_share=1e-300))
    assert least is not None and least.low == ("a",) and least.high == ("b", "c")


@pytest.mark.parametrize(
    ("homes", "low", "high"),
    [
        ("abcd", "ab", "cd"),
        ("bcd", "bd", "c"),
        ("cd", "d", "c"),
        ("abcdef", "abe", "cdf"),
        ("abef", "ab", "ef"),
        ("ab", "a", "b"),
    ],
)
def test_whoever_stays_keeps_its_lane_and_a_lost_homes_place_is_filled(homes, low, high):
    lanes = settled(LANES, homes, SETTINGS)
    assert lanes is not None and ("".join(lanes.low), "".join(lanes.high)) == (low, high)
    assert lanes.border == LANES.border


@given(
    st.floats(0.01, 0.99), st.lists(st.lists(st.sampled_from("abcdefg"), unique=True), min_size=1, max_size=8)
)
def test_every_home_that_serves_has_one_lane_and_no_lane_is_empty(low_share, serving):
    settings, lanes = LaneSettings(full_tier=16, low_share=low_share), None
    for homes in serving:
        lanes = settled(lanes, homes, settings)
        if lanes is None:
            assert len(homes) < 2
            continue
        assert sorted(lanes.low + lanes.high) == sorted(homes) and lanes.low and lanes.high
        assert settled(lanes, homes, settings) == lanes


def loads(**in_flight: int) -> list[HomeLoad]:
    return [HomeLoad(name, count, 2) for name, count in in_flight.items()]


def test_a_book_knows_who_may_take_a_tier_and_counts_what_crossed():
    book = LaneBook(SETTINGS)
    assert len(book.allowed(4, loads(a=0, b=0))) == 2, "nobody was seen to serve yet"
    book.follow(loads(a=0, b=0), 0.0)
    assert [load.node for load in book.allowed(4, loads(a=1, b=0))] == ["a"]
    assert [load.node for load in book.allowed(4, loads(a=2, b=0))] == ["b"]
    assert [load.node for load in book.allowed(0, loads(a=0, b=1))] == ["b"]
    assert [load.node for load in book.allowed(0, loads(c=0))] == ["c"], "it has come this moment"
    for tier, home in ((4, "a"), (4, "b"), (0, "b"), (8, "a")):
        book.sent(tier, home)
    body = book.body()
    assert body["requests"] == {"low": 2, "either": 1, "high": 1}
    assert body["crossings"] == {"low": 1, "high": 0}
    book.follow(loads(b=0), 1.0)
    assert book.lanes is None and book.body()["border"] is None
    assert [load.node for load in book.allowed(4, loads(b=2))] == ["b"]


def test_a_book_moves_the_border_as_time_goes_by():
    book = LaneBook(SETTINGS)
    for tick in range(25):
        book.follow(loads(a=6, b=1), tick / 10)
    assert book.lanes is not None and book.lanes.border == 7 and book.body()["moves"] == 1
