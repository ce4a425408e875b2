"""What a coordinator tells its planner of where requests live."""

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.coordinator.traffic_book import ENOUGH, MOST, STEP, TrafficBook

HOMES = ("a", "b", "c")


def book(**counts: int) -> TrafficBook:
    found = TrafficBook()
    for home, count in counts.items():
        for _ in range(count):
            found.sent(home)
    return found


def test_nothing_is_said_of_too_few_or_of_homes_that_are_alike():
    assert book(a=ENOUGH - 1).shares(HOMES) == {}
    assert book(a=200, b=210, c=190).shares(HOMES) == {}
    assert book(a=ENOUGH, b=1).shares(["a"]) == {}


def test_shares_are_of_the_mean_and_a_new_home_counts_as_one():
    assert book(a=300, b=100).shares(HOMES) == {"a": 1.5, "b": 0.5}
    assert book(a=1000, b=1).shares(HOMES)["b"] == STEP


def test_a_few_more_requests_change_nothing():
    assert book(a=300, b=100).shares(HOMES) == book(a=310, b=101).shares(HOMES)


def test_what_was_long_ago_counts_less():
    found = book(a=MOST, b=MOST)
    assert sum(found.counts.values()) <= MOST and found.shares(HOMES)["b"] > found.shares(HOMES)["a"]


@given(st.lists(st.sampled_from(HOMES), max_size=700))
def test_the_next_coordinator_says_the_same(sent):
    first = TrafficBook()
    for home in sent:
        first.sent(home)
    assert TrafficBook(first.counts).shares(HOMES) == first.shares(HOMES)
