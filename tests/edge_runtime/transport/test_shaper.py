import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.transport.shaper import (
    BROKEN_AFTER_S,
    MAX_HELD,
    Held,
    Link,
    LinkChange,
    LinkState,
    Shaper,
)

links = st.builds(
    Link,
    delay_s=st.floats(0, 0.5),
    jitter_s=st.floats(0, 0.2),
    rate_bps=st.floats(1e4, 1e10) | st.just(math.inf),
    loss=st.floats(0, 0.5),
)
sends = st.lists(st.tuples(st.floats(0, 2), st.integers(0, 200_000)), min_size=1, max_size=20)


def state(seed=1, *, is_stream=True, **link):
    return LinkState(Link(**link), random.Random(seed), is_stream=is_stream)


def test_a_message_takes_its_time_on_the_wire_and_the_delay():
    link = state(delay_s=0.005, rate_bps=100e6)
    assert link.release_time(10.0, 1_000_000) == pytest.approx(10.0 + 0.08 + 0.005)


def test_a_message_waits_for_those_before_it_and_not_for_their_delay():
    link = state(delay_s=1.0, rate_bps=8e6)
    assert [link.release_time(0.0, 1_000_000) for _ in range(3)] == [2.0, 3.0, 4.0]
    assert link.release_time(10.0, 1_000_000) == 12.0


def test_a_link_without_limits_costs_nothing():
    assert state().release_time(7.0, 10**9) == 7.0


@given(links, sends, st.integers(0, 99))
def test_a_stream_keeps_its_order_and_comes_no_sooner_than_rate_and_delay_allow(link, sends, seed):
    link_state, now, bits, last = LinkState(link, random.Random(seed)), 0.0, 0, 0.0
    for gap, num_bytes in sends:
        now += gap
        release_s = link_state.release_time(now, num_bytes)
        bits += num_bytes * 8
        # The sum is rounded in another order than there: a billionth of a second is not "sooner".
        assert release_s >= max(last, now + link.delay_s + num_bytes * 8 / link.rate_bps - 1e-9)
        assert release_s >= bits / link.rate_bps + link.delay_s - 1e-6
        last = release_s


@given(links, sends, st.integers(0, 99))
def test_the_same_seed_gives_the_same_times(link, sends, seed):
    def times():
        link_state = LinkState(link, random.Random(seed))
        return [link_state.release_time(gap, num_bytes) for gap, num_bytes in sends]

    assert times() == times()


def test_jitter_spreads_evenly_over_its_width():
    late = [state(seed, jitter_s=0.01).release_time(0.0, 100) for seed in range(1000)]
    assert 0 <= min(late) < 0.0005
    assert 0.0095 < max(late) <= 0.01
    assert sum(late) / 1000 == pytest.approx(0.005, rel=0.05)


def test_datagrams_vanish_as_often_as_asked_and_overtake_one_another():
    link = state(is_stream=False, jitter_s=1.0, loss=0.25)
    times = [link.release_time(0.0, 100) for _ in range(2000)]
    came = [each for each in times if each is not None]
    assert 0.22 < 1 - len(came) / 2000 < 0.28
    assert came != sorted(came)


def test_packets_of_a_stream_are_lost_as_often_as_asked():
    late = sum(state(seed, loss=0.01).release_time(0.0, 1000) > 0 for seed in range(10_000))
    assert 70 < late < 130
    late = sum(state(seed, loss=0.01, delay_s=0.01).release_time(0.0, 144_800) > 0.02 for seed in range(1000))
    assert late / 1000 == pytest.approx(1 - 0.99**100, abs=0.05)


def test_a_loss_that_more_packets_follow_costs_a_round_trip_and_the_last_one_a_timeout():
    first_lost, last_lost = set(), set()
    for seed in range(2000):
        first_lost.add(round(state(seed, delay_s=0.05, loss=0.001).release_time(0.0, 144_800), 3))
        last_lost.add(round(state(seed, delay_s=0.05, loss=0.02).release_time(0.0, 1000), 3))
    assert {0.05, 0.15} <= first_lost
    assert {0.05, 0.25} <= last_lost
    assert min(first_lost) == min(last_lost) == 0.05


def test_what_nobody_may_see_yet_is_counted():
    link = state(rate_bps=8.0)
    for _ in range(5):
        link.release_time(0.0, 1)
    assert [link.num_waiting(now) for now in (0.0, 1.0, 2.5, 5.0)] == [5, 4, 3, 0]


def test_a_cut_ends_when_it_was_said_to_or_when_it_is_healed():
    link = state()
    link.cut(10.0, 15.0)
    assert [link.is_cut(now) for now in (10.0, 14.9, 15.0)] == [True, True, False]
    link.cut(20.0)
    assert link.opens_s(21.0) == math.inf
    link.heal(22.0)
    assert not link.is_cut(22.0)
    assert link.opens_s(22.5) == 22.5


def test_a_short_cut_leaves_connections_and_a_long_one_ends_those_that_there_were():
    link = state()
    assert link.connection(0.0, 100.0) == "up"
    link.cut(100.0, 100.0 + BROKEN_AFTER_S - 0.1)
    assert [link.connection(50.0, now) for now in (101.0, 200.0)] == ["up", "up"]
    link.cut(200.0)
    assert link.connection(50.0, 200.0 + BROKEN_AFTER_S - 0.1) == "up"
    assert link.connection(50.0, 200.0 + BROKEN_AFTER_S) == "lost"
    assert link.connection(203.0, 300.0) == "down"
    link.heal(301.0)
    assert [link.connection(opened, 400.0) for opened in (50.0, 203.0, 302.0)] == ["lost", "up", "up"]
    link.cut(500.0, 501.0)
    assert link.connection(50.0, 600.0) == "lost"
    assert link.connection(302.0, 600.0) == "up"


def test_a_cut_that_is_made_longer_counts_from_its_start():
    link = state()
    for now in range(0, 10, 2):
        link.cut(float(now), now + 3.0)
    assert link.connection(-1.0, BROKEN_AFTER_S) == "lost"


class Links:
    def __init__(self, *names):
        self.states = {name: state() for name in names}
        self.held = Held(self.states.__getitem__)

    def put(self, name, release_s, item, now=0.0, key=None):
        return self.held.put(key or name, name, release_s, now, item)


def test_what_is_held_comes_at_its_time_and_no_peer_waits_for_another():
    links = Links("a", "b")
    links.put("a", 9.0, "a1")
    links.put("b", 2.0, "b1")
    links.put("b", 2.0, "b2")
    assert links.held.due_s(0.0) == 2.0
    assert links.held.take(1.9) is None
    assert [links.held.take(2.0) for _ in range(3)] == ["b1", "b2", None]
    assert links.held.due_s(2.0) == 9.0
    assert links.held.take(9.0) == "a1"
    assert links.held.due_s(9.0) == math.inf
    assert len(links.held) == 0


def test_what_is_held_on_a_cut_link_comes_when_it_heals_and_holds_up_nobody():
    links = Links("a", "b")
    links.put("a", 1.0, "a1")
    links.put("b", 5.0, "b1")
    links.states["a"].cut(0.5, 4.0)
    assert links.held.take(3.9) is None
    assert links.held.due_s(2.0) == 4.0
    assert links.held.take(4.0) == "a1"
    links.states["b"].cut(4.5)
    assert links.held.due_s(5.0) == math.inf
    assert links.held.take(7.0) is None
    links.states["b"].heal(8.0)
    assert links.held.take(8.0) == "b1"


def test_what_a_cut_has_ended_never_comes():
    links = Links("a")
    links.put("a", 1.0, "old", now=0.0)
    links.put("a", 9.0, "sent in the cut", now=3.0)
    links.states["a"].cut(0.5, 20.0)
    links.put("a", 0.0, "of a new connection", now=15.0, key="again")
    assert [links.held.take(20.0) for _ in range(2)] == ["of a new connection", None]


def test_a_peer_that_lies_about_times_fills_only_its_own_queue():
    links = Links("a", "b")
    assert all(links.put("a", 1e18, "x") for _ in range(MAX_HELD))
    assert not links.put("a", 1e18, "x")
    assert links.put("b", 0.0, "y")
    assert links.held.take(0.0) == "y"


def test_changes_keep_what_they_do_not_name_and_a_reset_goes_back_to_the_start():
    shaper = Shaper("n1", lambda source, target: Link(delay_s=0.001, rate_bps=1e9))
    changed = shaper.change("n1", "n5", LinkChange(rate_bps=1e7, loss=0.01, cut_s=0.0), now=3.0)
    assert changed.link == Link(delay_s=0.001, rate_bps=1e7, loss=0.01)
    assert changed.is_cut(1e9)
    assert not shaper.state("n5", "n1").is_cut(4.0)
    changed = shaper.change("n1", "n5", LinkChange(reset=True, delay_s=0.5), now=5.0)
    assert changed.link == Link(delay_s=0.5, rate_bps=1e9)
    assert not changed.is_cut(5.0)


def test_either_direction_ends_a_connection():
    shaper = Shaper("n1", lambda source, target: Link())
    shaper.change("n5", "n1", LinkChange(cut_s=10.0), now=0.0)
    assert shaper.connection("n5", -1.0, 5.0) == "up"
    assert shaper.connection("n5", -1.0, 7.0) == "lost"
    assert shaper.connection("n5", 7.0, 8.0) == "down"
    assert shaper.connection("n2", -1.0, 8.0) == "up"


def test_links_are_random_each_for_itself():
    def times(seed, source):
        shaper = Shaper("n1", lambda source, target: Link(jitter_s=1.0), seed)
        return [shaper.state(source, "n5").release_time(0.0, 1) for _ in range(5)]

    assert times(1, "n1") == times(1, "n1")
    assert times(1, "n1") != times(2, "n1")
    assert times(1, "n1") != times(1, "n2")
