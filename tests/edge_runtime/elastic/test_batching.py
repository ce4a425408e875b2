"""Offline batches: every prompt runs once, none below its tier, and a remainder goes where the profile says it is quicker."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.elastic.batching import Profile, Prompt, after, merges, next_batch


def linear(fixed: float = 4.0, each: float = 0.1, sizes=(1, 4, 16), tiers=(4, 8, 16)) -> Profile:
    """A batch costs something to begin with, and something for each sub-expert of each prompt."""
    return Profile({(n, k): fixed + each * n * k for n in sizes for k in tiers})


def drained(tiers: list[int], capacity: int, **options) -> list:
    waiting = [Prompt(i, tier) for i, tier in enumerate(tiers)]
    batches = []
    while waiting:
        batch = next_batch(waiting, capacity, linear(), **options)
        batches.append(batch)
        waiting = after(waiting, batch)
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


@given(st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_nobody_is_passed_over_for_ever(tiers, capacity, age_cap):
    left_after = {
        index: i
        for i, batch in enumerate(drained(tiers, capacity, age_cap=age_cap))
        for index in batch.indices
    }
    for index in range(len(tiers)):
        older = sum(1 for other in range(len(tiers)) if other != index)
        assert left_after[index] <= age_cap + older


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
        waiting, spent = [Prompt(i, tier) for i, tier in enumerate(tiers)], 0.0
        while waiting:
            batch = next_batch(waiting, 2, profile, rule="exact")
            spent += profile.seconds(len(batch.indices), batch.tier)
            waiting = after(waiting, batch)
        assert spent == pytest.approx(best(tiers))


def test_a_profile_is_what_was_measured_and_straight_between():
    profile = Profile({(1, 4): 1.0, (4, 4): 4.0, (1, 8): 3.0, (4, 8): 6.0})
    assert profile.seconds(1, 4) == 1.0 and profile.seconds(4, 8) == 6.0
    assert profile.seconds(2, 6) == pytest.approx((2.0 + 4.0) / 2)
    assert profile.seconds(8, 4) == pytest.approx(8.0), "beyond what was measured the rate stays"
    with pytest.raises(ValueError, match="found none"):
        Profile({})
