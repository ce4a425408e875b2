"""Offline batches: every prompt runs once, none below its tier, and a remainder goes where the profile says it is quicker."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.elastic.batching import Flow, Profile, Queue, merges


def linear(fixed: float = 4.0, each: float = 0.1, sizes=(1, 4, 16), tiers=(4, 8, 16)) -> Profile:
    """A batch costs something to begin with, and something for each sub-expert of each prompt."""
    return Profile({(n, k): fixed + each * n * k for n in sizes for k in tiers})


def drained(tiers: list[int], capacity: int, rule="paper", **options) -> list:
    """Batch after batch, each run to its end."""
    queue, batches = Queue(dict(enumerate(tiers)), **options), []
    while queue:
        batches.append(queue.take(capacity, linear(), rule=rule))
    return batches


@given(
    st.lists(st.sampled_from([4, 6, 8, 12, 16]), min_size=1, max_size=40),
    st.integers(1, 9),
    st.sampled_from(["paper", "exact"]),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_prompt_runs_once_and_none_below_its_tier(tiers, capacity, rule, age_cap):
    batches = drained(tiers, capacity, rule=rule, age_cap=age_cap)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(tiers)))
    for batch in batches:
        assert 1 <= len(batch.indices) <= capacity and list(batch.indices) == sorted(batch.indices)
        assert batch.tier == max(tiers[index] for index in batch.indices)
        assert len({tiers[index] for index in batch.indices}) <= 2, "only the next tier is merged with"


def flowed(tiers: list[int], capacity: int, ends: list[int], profile=None, **options) -> list:
    """Everything that ran, (place, how many ran then), where answers end one by one in an order of their own."""
    queue, running, ran = Queue(dict(enumerate(tiers)), **options), [], []
    turn = iter([*ends, *[0] * len(tiers) * 2])
    while queue or running:
        tier = max((tiers[i] for i in running), default=0)
        batch = queue.take(capacity, profile or linear(), num_running=len(running), tier=tier)
        if batch is None:
            assert running, "somebody waits, and nobody runs or begins"
        else:
            running += batch.indices
            assert batch.tier == max(tiers[i] for i in running) and len(running) <= capacity
            ran += [(i, len(running)) for i in batch.indices]
        running.pop(next(turn) % len(running))
    return ran


@given(
    st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=40),
    st.integers(1, 6),
    st.lists(st.integers(0, 5), max_size=80),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_every_prompt_runs_once_where_places_are_taken_as_answers_end(tiers, capacity, ends, age_cap):
    ran = flowed(tiers, capacity, ends, age_cap=age_cap)
    assert sorted(place for place, _ in ran) == list(range(len(tiers)))


def test_the_tier_that_runs_is_filled_up_before_the_next_one_joins_it():
    steep = Profile({(n, k): 0.1 * n * k for n in (1, 4) for k in (4, 16)})  # nothing is gained by company
    ran = flowed([16, 4, 4, 16, 4, 4, 4, 16], 2, [], profile=steep)
    assert [place for place, _ in ran] == [1, 2, 4, 5, 6, 0, 3, 7]
    assert dict(ran)[0] == 2 and dict(ran)[3] == 2, "the next tier waits for the tail, then takes all places"
    flat = Profile({(n, k): 5.0 for n in (1, 4) for k in (4, 16)})  # a batch costs the same whatever runs
    assert all(count == 2 for _, count in flowed([16, 4, 4, 16, 4], 2, [], profile=flat)[1:])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(2, 40), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_tier_is_passed_over_for_ever(capacity, age_cap, num_low, num_tiers):
    """However much of the lowest tier waits, prompts of the others run after so many full batches each."""
    tiers = [4] * num_low * capacity + [8 + 4 * i for i in range(num_tiers)]
    batches = drained(tiers, capacity, age_cap=age_cap)
    for i in range(num_tiers):
        place = len(tiers) - num_tiers + i
        [at] = [n for n, batch in enumerate(batches) if place in batch.indices]
        assert at <= (age_cap + 1) * (num_tiers + 1)


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 10), st.floats(0.01, 1))
def test_the_exact_rule_is_the_better_of_both_orders(now, following, fixed, each):
    profile = linear(fixed, each, sizes=tuple(range(1, 13)), tiers=(4, 8))
    separate = profile.seconds(now, 4) + profile.seconds(following, 8)
    assert merges(now, 4, following, 8, profile, "exact") == (profile.seconds(now + following, 8) < separate)


def test_small_queues_are_drained_in_the_least_time_by_the_exact_rule():
    """Held against every way to cut a queue of two tiers into batches of two."""
    profile = linear(fixed=2.0, each=0.2, sizes=(1, 2), tiers=(4, 16))

    def best(tiers: tuple[int, ...]) -> float:
        if not tiers:
            return 0.0
        return min(
            profile.seconds(n, max(tiers[i] for i in chosen))
            + best(tuple(t for i, t in enumerate(tiers) if i not in chosen))
            for n in (1, 2)
            if n <= len(tiers)
            for chosen in combinations(range(len(tiers)), n)
        )

    for tiers in ((4, 4, 16), (4, 16, 16), (4, 16), (4, 4, 4, 16, 16)):
        queue, spent = Queue(dict(enumerate(tiers))), 0.0
        while queue:
            batch = queue.take(2, profile, rule="exact")
            spent += profile.seconds(len(batch.indices), batch.tier)
        assert spent == pytest.approx(best(tiers))


def test_a_profile_is_what_was_measured_and_straight_between():
    profile = Profile({(1, 4): 1.0, (4, 4): 4.0, (1, 8): 3.0, (4, 8): 6.0})
    assert profile.seconds(1, 4) == 1.0 and profile.seconds(4, 8) == 6.0
    assert profile.seconds(2, 6) == pytest.approx((2.0 + 4.0) / 2)
    assert profile.seconds(8, 4) == pytest.approx(8.0), "beyond what was measured the rate stays"
    with pytest.raises(ValueError, match="found none"):
        Profile({})


def test_a_flow_times_full_batches_of_one_tier_while_they_run():
    """Two tokens an answer, and an answer a second from each of two places: a token of both takes half a second."""
    tiers = [4] * 8 + [16] * 8
    flow = Flow(Queue(dict(enumerate(tiers))), tiers, {(2, 4): 9.0, (2, 16): 9.0}, 2)
    now, began = 0.0, list(flow.next(0.0))
    while flow.running:
        now += 1.0 if flow.tier == 4 else 3.0
        for place in list(flow.running):
            flow.ended(place, 2)
        began += flow.next(now)
    assert began == list(range(16))
    assert flow.measured == {(2, 4): pytest.approx(0.5), (2, 16): pytest.approx(1.5)}
