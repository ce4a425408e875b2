"""The locality band."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.base import HomeLoad, Question
from edge_runtime.routing.locality_band import (
    PAPER,
    BandRule,
    LocalityBand,
    band,
    choose_in_band,
    choose_weighed,
    cost,
)

scores_of = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=16).map(
    lambda values: np.array(values, dtype=np.float32)
)


def loads(*in_flight: int, **changes: object) -> list[HomeLoad]:
    return [HomeLoad(f"n{i}", count, 8, **changes) for i, count in enumerate(in_flight)]  # type: ignore[arg-type]


def test_load_decides_inside_the_band_and_not_outside():
    scores = np.array([0.9, 0.85, 0.5], dtype=np.float32)
    assert choose_in_band(scores, loads(3, 2, 0), PAPER) == 1
    assert choose_in_band(scores, loads(2, 2, 0), PAPER) == 0  # the first of equals
    assert choose_in_band(scores, loads(3, 2, 0), BandRule(tau=0)) == 0
    assert choose_in_band(scores, loads(3, 2, 0), BandRule(tau=1)) == 2


def test_the_best_score_is_inside_even_where_tau_is_0_and_others_tie_with_it():
    assert band(np.array([0.5, 0.7, 0.7], dtype=np.float32), BandRule(tau=0)).tolist() == [1, 2]


@given(scores_of, st.floats(0, 1), st.floats(0, 1))
def test_the_band_holds_the_best_match_and_grows_with_tau(scores, one, other):
    small, large = (set(band(scores, BandRule(tau=tau)).tolist()) for tau in sorted([one, other]))
    assert int(scores.argmax()) in small
    assert small <= large
    assert band(scores, BandRule(tau=1)).tolist() == list(range(len(scores)))


@given(scores_of, st.integers(1, 4))
def test_a_narrow_band_takes_in_the_next_best(scores, least):
    found = band(scores, BandRule(tau=0, min_candidates=least))
    assert len(found) >= min(least, len(scores))
    outside = np.setdiff1d(np.arange(len(scores)), found)
    assert not len(outside) or scores[outside].max() <= scores[found].min()


def test_speed_and_transfer_count_unless_the_rule_leaves_them_out():
    slow, fast = HomeLoad("slow", 4, 8), HomeLoad("fast", 6, 8, speed=2.0)
    scores = np.ones(2, dtype=np.float32)
    assert choose_in_band(scores, [slow, fast], BandRule(tau=0.1)) == 1
    assert choose_in_band(scores, [slow, fast], PAPER) == 0
    far = HomeLoad("far", 3, 8, transfer_s=0.25)
    assert cost(far, BandRule()) == pytest.approx(5.5)
    assert cost(far, PAPER) == 3
    assert choose_in_band(scores, [slow, far], BandRule(tau=0.1)) == 0
    assert choose_in_band(scores, [slow, far], BandRule(tau=0.1, uses_transfer=False)) == 1


def test_waiting_requests_count_fourfold_and_in_the_paper_once():
    crowded = HomeLoad("crowded", 10, 8)
    assert cost(crowded, BandRule()) == 8 + 4 * 2
    assert cost(crowded, PAPER) == 10


def test_a_request_goes_where_its_centroid_is_whatever_the_order_of_the_homes():
    router = LocalityBand(np.eye(3, dtype=np.float32), ["a", "b", "c"], PAPER)
    signature = np.array([0, 1, 0], dtype=np.float32)
    homes = [HomeLoad("c", 0, 8), HomeLoad("b", 5, 8), HomeLoad("a", 0, 8)]
    assert homes[router.choose(Question(signature), homes)].node == "b"


def test_without_a_signature_or_with_one_of_zeros_load_decides():
    router = LocalityBand(np.eye(3, dtype=np.float32), ["n0", "n1", "n2"])
    for signature in (None, np.zeros(3, dtype=np.float32)):
        assert router.choose(Question(signature), loads(2, 3, 1)) == 2


def test_a_home_that_came_after_the_fit_gets_what_suits_nobody():
    router = LocalityBand(np.eye(2, dtype=np.float32), ["n0", "n1"], PAPER)
    homes = loads(9, 9, 0)
    assert router.choose(Question(np.array([1, 0], dtype=np.float32)), homes) == 0
    assert router.choose(Question(np.zeros(2, dtype=np.float32)), homes) == 2


@given(st.integers(0, 2**32 - 1))
def test_with_equal_loads_the_order_of_requests_changes_nothing(seed):
    rng = np.random.default_rng(seed)
    router = LocalityBand(rng.random((4, 6)).astype(np.float32), ["n0", "n1", "n2", "n3"])
    signatures = rng.random((5, 6)).astype(np.float32)
    forth = [router.choose(Question(s), loads(1, 1, 1, 1)) for s in signatures]
    back = [router.choose(Question(s), loads(1, 1, 1, 1)) for s in signatures[::-1]]
    assert forth == back[::-1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tau": -0.1}, "tau is"),
        ({"min_candidates": 0}, "at least 1"),
        ({"affinity": -1.0}, "affinity is -1"),
        ({"memory": 0.5}, "memory 0.5"),
    ],
)
def test_rules_out_of_range_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        BandRule(**options)


def test_a_better_match_makes_up_for_some_load_and_no_more():
    scores = np.array([0.9, 0.1], dtype=np.float32)
    assert choose_weighed(scores, loads(5, 4), BandRule()) == 0, (
        "4.5 on average: 0.4 of that is less than 2 requests"
    )
    assert choose_weighed(scores, loads(7, 4), BandRule()) == 1
    assert choose_weighed(scores, loads(7, 4), BandRule(affinity=1.0)) == 0
    assert choose_weighed(scores, loads(4, 4), BandRule(affinity=0.0)) == 0, "the first of equals"
    assert choose_weighed(scores, loads(1, 0), BandRule()) == 1, (
        "nobody joins another while a home has nothing to do"
    )


@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.data())
def test_no_match_sends_a_request_to_a_home_that_has_much_more_than_the_others(in_flight, data):
    scores = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(in_flight), max_size=len(in_flight))))
    homes = [HomeLoad(f"n{i}", count, 32) for i, count in enumerate(in_flight)]
    chosen = choose_weighed(scores, homes, BandRule())
    mean = max(sum(in_flight) / len(in_flight), 1.0)
    assert in_flight[chosen] <= min(in_flight) + 0.5 * mean + 1e-6


def test_homes_become_like_what_they_are_sent_and_lean_back_to_their_clusters():
    router = LocalityBand(np.eye(4, dtype=np.float32)[:2], ["n0", "n1"])
    new = np.array([0, 0, 1, 0], dtype=np.float32)
    assert router.choose(Question(new), loads(1, 1)) == 0, "nobody knows it yet"
    for _ in range(20):
        router.took("n1", new)
        router.took("n0", np.array([0, 0, 0, 1], dtype=np.float32))
    assert router.choose(Question(new), loads(1, 1)) == 1
    assert router.centroids[1] @ router.fitted[1] > 0.1, "something of calibration stays"
    assert np.linalg.norm(router.centroids, axis=1) == pytest.approx([1, 1])
    router.took("stranger", new)
    router.took("n0", None)
    assert np.isfinite(router.centroids).all()


@pytest.mark.parametrize("rule", [PAPER, BandRule(memory=0)])
def test_under_the_papers_rule_homes_stay_what_calibration_said(rule):
    router = LocalityBand(np.eye(2, dtype=np.float32), ["n0", "n1"], rule)
    for _ in range(20):
        router.took("n0", np.array([0, 1], dtype=np.float32))
    assert (router.centroids == router.fitted).all()
