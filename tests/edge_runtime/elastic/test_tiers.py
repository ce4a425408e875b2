"""What a request asks for becomes a tier, or one sentence that says what is allowed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.elastic.tiers import FULL, Elasticity, over_serving, split_tier, tier_asked, tier_of
from edge_runtime.errors import RequestError

DEMO = Elasticity(num_parts=4, top_k=4)


@pytest.mark.parametrize(
    ("asked", "tier"),
    [
        ({}, FULL),
        ({"k": 2.25}, 9),
        ({"k": 2.2}, 9),
        ({"k": 0.25}, 1),
        ({"k": 4}, FULL),
        ({"sub_experts": 6}, 6),
        ({"sub_experts": 16}, FULL),
        ({"service": "half"}, 8),
        ({"service": "economy"}, 4),
        ({"service": "full"}, FULL),
    ],
)
def test_what_is_asked_becomes_a_tier(asked, tier):
    assert tier_of(DEMO, **asked) == tier


@given(st.floats(0.25, 4))
def test_no_request_gets_less_than_it_asked_nor_a_whole_sub_expert_more(k):
    tier = tier_of(DEMO, k=k) or DEMO.full_tier
    assert 4 * k - 1e-6 <= tier < 4 * k + 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"k": 0.2},
            "k is 0.2; allowed is 0.25 to 4 experts per token, rounded up to whole sub-experts of 0.25",
        ),
        ({"k": 4.5}, "k is 4.5; allowed is 0.25 to 4"),
        ({"k": math.nan}, "k is nan"),
        ({"sub_experts": 0}, "sub_experts is 0; allowed is 1 to 16, which is 4 of each of 4 experts"),
        ({"sub_experts": 17}, "sub_experts is 17; allowed is 1 to 16"),
        ({"service": "gold"}, "service is 'gold'; allowed is one of full, half, economy"),
        ({"k": 2.0, "service": "economy"}, "one of k, sub_experts and service, found k, service"),
    ],
)
def test_what_is_not_there_is_refused_in_a_sentence(asked, words):
    with pytest.raises(RequestError, match=words):
        tier_of(DEMO, **asked)


def test_a_model_whose_experts_are_whole_serves_the_full_tier_alone():
    assert tier_of(None) == tier_of(None, service="full") == FULL
    with pytest.raises(RequestError, match="k needs experts that are split.*calibrate prism"):
        tier_of(None, k=2.0)


@pytest.mark.parametrize(
    ("sampling", "tier"),
    [
        ({"k": 2.25, "temperature": 0.5}, 9),
        ({"service": "economy"}, 4),
        ({}, FULL),
        ({"k": 99}, FULL),
        ({"k": "2"}, FULL),
        ({"k": 10**400}, FULL),
        ({"sub_experts": [9]}, FULL),
        ({"service": {}}, FULL),
        ({"k": 1, "service": "economy"}, FULL),
    ],
)
def test_what_nobody_has_checked_is_a_tier_or_the_full_one(sampling, tier):
    assert tier_asked(DEMO, sampling) == tier
    assert tier_asked(None, sampling) == FULL


def test_over_serving_counts_what_ran_beyond_the_request():
    assert over_serving([16, 6], [16, 16]) == pytest.approx(10 / 22)
    assert over_serving([16, 6], [16, 6]) == 0


@given(st.integers(2, 4), st.integers(2, 5), st.integers(0, 10**6))
def test_a_tier_is_spread_where_it_costs_least_and_adds_up(layers, full, seed):
    from itertools import product
    from random import Random

    draw = Random(seed)
    losses = [sorted((draw.random() for _ in range(full)), reverse=True) for _ in range(layers)]
    for tier in range(1, full + 1):
        spread = split_tier(tier, losses)
        assert all(1 <= each <= full for each in spread) and sum(spread) <= layers * tier
        found = sum(loss[each - 1] for loss, each in zip(losses, spread, strict=True))
        best = min(
            sum(loss[each - 1] for loss, each in zip(losses, tried, strict=True))
            for tried in product(range(1, full + 1), repeat=layers)
            if sum(tried) <= layers * tier
        )
        assert found == pytest.approx(best)
