import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.transport.heartbeat import (
    BeatRule,
    Beats,
    beat_rule,
    given_up,
    heard,
    liveness,
    looked,
    next_change_s,
)

RULE = BeatRule(interval_s=1.0, suspect_after_s=3.0, lost_after_s=10.0, return_after_s=1.5)


def states(beats, *times):
    return [liveness(beats, now, RULE) for now in times]


def test_one_missed_beat_changes_nothing():
    beats = heard(Beats(0.0), 1.0, RULE)
    assert states(beats, 2.99) == ["alive"]
    assert states(heard(beats, 3.0, RULE), 5.0) == ["alive"]


def test_silence_is_first_suspect_then_lost():
    expected = ["alive", "suspect", "suspect", "lost", "lost"]
    assert states(Beats(0.0), 2.9, 3.0, 9.9, 10.0, 1e9) == expected


def test_a_suspect_is_cleared_by_one_beat():
    assert states(heard(looked(Beats(0.0), 5.0, RULE), 5.0, RULE), 5.0) == ["alive"]


def test_a_lost_peer_returns_after_three_beats_without_a_gap():
    beats, found = looked(Beats(0.0), 11.0, RULE), []
    for now in (12.0, 13.0, 14.0):
        beats = heard(beats, now, RULE)
        found += states(beats, now)
    assert found == ["lost", "lost", "alive"]
    assert beats == Beats(14.0)


def test_a_peer_given_up_before_its_silence_showed_returns_in_the_same_way():
    beats, found = given_up(Beats(0.0)), []
    for now in (0.5, 1.5, 2.5):
        beats = heard(beats, now, RULE)
        found += states(beats, now)
    assert found == ["lost", "lost", "alive"]


def test_a_gap_in_its_return_starts_it_over():
    beats, found = looked(Beats(0.0), 11.0, RULE), []
    for now in (12.0, 13.0, 16.0, 17.0, 18.0):
        beats = heard(beats, now, RULE)
        found += states(beats, now)
    assert found == ["lost", "lost", "lost", "lost", "alive"]


def test_a_flickering_peer_does_not_return():
    beats = looked(Beats(0.0), 10.0, RULE)
    for now in range(20, 200, 5):
        beats = heard(looked(beats, float(now), RULE), float(now), RULE)
        assert states(beats, now) == ["lost"]


def test_many_beats_at_once_as_after_a_cut_are_not_enough():
    beats = looked(Beats(0.0), 11.0, RULE)
    for _ in range(9):
        beats = heard(beats, 12.0, RULE)
    assert states(beats, 12.0) == ["lost"]
    assert states(heard(heard(beats, 13.0, RULE), 14.0, RULE), 14.0) == ["alive"]


def test_a_watcher_that_slept_hears_before_it_looks_and_loses_nobody():
    beats = heard(Beats(0.0), 60.0, RULE)
    assert looked(beats, 60.0, RULE) == Beats(60.0)


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_one_beat_in_five_dropped_at_random_phase_never_loses_a_peer(seed, jitter_s):
    seeded = random.Random(seed)
    beats, phase = Beats(0.0), seeded.randrange(5)
    for beat in range(1, 300):
        if beat % 5 != phase:
            now = beat + seeded.random() * jitter_s
            beats = heard(beats, now, RULE)
            assert states(beats, now) == ["alive"]
        beats = looked(beats, beat + 0.99, RULE)
        assert states(beats, beat + 0.99) == ["alive"]


@given(st.integers(1, 50))
def test_all_beats_dropped_is_lost_exactly_in_time(num_beats):
    beats = Beats(0.0)
    for beat in range(num_beats):
        beats = heard(beats, float(beat), RULE)
    last = float(num_beats - 1)
    assert states(beats, last + 9.999, last + 10.0) == ["suspect", "lost"]


events = st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), max_size=40)


@given(events)
def test_what_is_found_changes_exactly_when_foretold(steps):
    beats, now = Beats(0.0), 0.0
    for gap, is_beat in steps:
        now += gap
        beats = (heard if is_beat else looked)(beats, now, RULE)
        state, change_s = liveness(beats, now, RULE), next_change_s(beats, now, RULE)
        if change_s is None:
            assert state == "lost"
            assert states(beats, now + 1e6) == ["lost"]
        else:
            assert states(beats, now + (change_s - now) * 0.999) == [state]
            assert states(beats, change_s + 1e-6) != [state]


@given(st.lists(st.tuples(st.floats(0.01, 4.0), st.booleans()), max_size=60))
def test_who_was_found_lost_stays_so_until_it_was_heard_without_a_gap_for_long_enough(steps):
    beats, now, times = looked(Beats(0.0), 20.0, RULE), 20.0, []
    for gap, is_beat in steps:
        now += gap
        beats = (heard if is_beat else looked)(beats, now, RULE)
        times += [now] * is_beat
        if not beats.is_lost:
            gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
            unbroken = [at for index, at in enumerate(times) if all(gap < 3.0 for gap in gaps[index:])]
            assert unbroken[-1] - unbroken[0] >= RULE.return_after_s
            return


@given(st.floats(0.01, 100.0), st.floats(2.001, 50.0))
def test_a_files_heartbeat_and_loss_always_make_a_rule(interval_s, ratio):
    rule = beat_rule(interval_s, interval_s * ratio)
    assert rule.suspect_after_s <= 2.5 * interval_s


def test_times_that_would_lose_a_peer_for_one_missed_beat_are_our_own_fault():
    with pytest.raises(AssertionError):
        BeatRule(interval_s=1.0, suspect_after_s=1.5, lost_after_s=10.0, return_after_s=1.5)
