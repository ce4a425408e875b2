import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.transport.heartbeat import HeartbeatMonitor

SETTINGS = {"interval_s": 1.0, "suspect_after_s": 3.0, "lost_after_s": 10.0, "beats_to_return": 3}


def monitor():
    return HeartbeatMonitor(0.0, **SETTINGS)


def test_one_missed_beat_changes_nothing():
    watched = monitor()
    watched.heard(1.0)
    assert watched.state(2.99) == "alive"
    watched.heard(3.0)
    assert watched.state(5.0) == "alive"


def test_silence_is_first_suspect_then_lost():
    watched = monitor()
    assert [watched.state(t) for t in (2.9, 3.0, 9.9, 10.0, 1e9)] == [
        "alive",
        "suspect",
        "suspect",
        "lost",
        "lost",
    ]


def test_a_suspect_is_cleared_by_one_beat():
    watched = monitor()
    assert watched.state(5.0) == "suspect"
    watched.heard(5.0)
    assert watched.state(5.0) == "alive"


def test_a_lost_peer_returns_after_three_beats_without_a_gap():
    watched = monitor()
    states = []
    for now in (12.0, 13.0, 14.0):
        watched.heard(now)
        states.append(watched.state(now))
    assert states == ["lost", "lost", "alive"]


def test_a_flickering_peer_does_not_return():
    watched = monitor()
    for now in range(20, 200, 5):
        watched.heard(now)
        assert watched.state(now) == "lost"


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_one_beat_in_five_dropped_at_random_phase_never_loses_a_peer(seed, jitter_s):
    seeded = random.Random(seed)
    watched, phase = monitor(), seeded.randrange(5)
    for beat in range(1, 300):
        if beat % 5 != phase:
            now = beat + seeded.random() * jitter_s
            watched.heard(now)
            assert watched.state(now) == "alive"
        assert watched.state(beat + 0.99) == "alive"


@given(st.integers(1, 50))
def test_all_beats_dropped_is_lost_exactly_in_time(num_beats):
    watched = monitor()
    for beat in range(num_beats):
        watched.heard(float(beat))
    last = float(num_beats - 1)
    assert watched.state(last + 9.999) == "suspect"
    assert watched.state(last + 10.0) == "lost"


@given(st.lists(st.floats(0.01, 30.0), max_size=40))
def test_the_state_changes_exactly_when_foretold(gaps):
    watched, now = monitor(), 0.0
    for gap in gaps:
        now += gap
        watched.heard(now)
        state, change_s = watched.state(now), watched.next_change_s(now)
        if change_s is None:
            assert state == "lost"
            assert watched.state(now + 1e6) == "lost"
        else:
            assert watched.state(now + (change_s - now) * 0.999) == state
            assert watched.state(change_s + 1e-6) != state


@given(st.lists(st.floats(0.0, 30.0), max_size=40))
def test_asking_changes_nothing(gaps):
    asked, quiet, now = monitor(), monitor(), 0.0
    for gap in gaps:
        now += gap
        asked.state(now + 5)
        asked.heard(now)
        quiet.heard(now)
        assert asked.state(now) == quiet.state(now)


def test_times_that_would_lose_a_peer_for_one_missed_beat_are_our_own_fault():
    with pytest.raises(AssertionError):
        HeartbeatMonitor(0.0, interval_s=1.0, suspect_after_s=1.5, lost_after_s=10.0)
