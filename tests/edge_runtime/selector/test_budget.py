"""Ledgers are never overdrawn, whatever comes; prices follow what is spent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.selector.budget import BURST_TOKENS, Ledger, Ledgers, Price, Prices, budget_of

BUDGETS = st.sampled_from([0.0, 0.001, 0.007, 0.03])
STEPS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), BUDGETS, st.floats(0, 1)), min_size=1, max_size=6), max_size=60
)


@given(STEPS)
def test_no_ledger_is_ever_overdrawn_by_random_traffic(steps):
    ledgers, earned, spent = Ledgers(), dict.fromkeys("abc", 0.0), dict.fromkeys("abc", 0.0)
    for rows in steps:
        users, budgets, shares = (list(part) for part in zip(*rows, strict=True))
        allowance = ledgers.allowances(users, budgets)
        assert (allowance >= 0).all() and (allowance[np.array(budgets) == 0] == 0).all()
        losses = allowance * np.array(shares)
        ledgers.book(users, budgets, losses)
        for user, budget, loss in zip(users, budgets, losses.tolist(), strict=True):
            earned[user] += budget
            spent[user] += loss
        for user in set(users):
            assert spent[user] <= earned[user] * (1 + 1e-9), "at no moment more than its tokens have earned"
            assert 0 <= ledgers.left(user) <= BURST_TOKENS * 0.03 * (1 + 1e-9)


def test_a_user_with_several_rows_in_a_step_splits_one_credit():
    ledgers = Ledgers()
    ledgers.book(["ann"], [0.01], np.array([0.0]))
    assert ledgers.allowances(["ann", "bob", "ann"], [0.01, 0.01, 0.01]).tolist() == pytest.approx(
        [0.015, 0.01, 0.015]
    )


def test_asking_books_nothing():
    ledgers = Ledgers()
    assert [ledgers.allowances(["ann"], [0.01])[0] for _ in range(3)] == [0.01] * 3
    assert ledgers.left("ann") == 0.0


def test_credit_is_kept_for_a_burst_and_no_more():
    ledger = Ledger()
    for _ in range(100):
        ledger.earn(0.01)
    assert ledger.credit == pytest.approx(BURST_TOKENS * 0.01)
    ledger.earn(0.001)
    assert ledger.credit == pytest.approx(BURST_TOKENS * 0.01), "a smaller budget takes nothing away"


def test_a_bucket_is_full_when_more_would_be_lost():
    ledgers = Ledgers()
    ledgers.book(["ann"] * 16, [0.01] * 16, np.zeros(16))
    assert ledgers.fills(["ann", "bob", "ann"], [0.01, 0.01, 0.0]).tolist() == pytest.approx([0.5, 0.0, 0.0])
    ledgers.book(["ann"] * 40, [0.01] * 40, np.zeros(40))
    assert ledgers.fills(["ann"], [0.01])[0] == pytest.approx(1.0)


def test_more_than_there_is_cannot_be_spent():
    ledger = Ledger()
    ledger.earn(0.01)
    with pytest.raises(AssertionError, match="was spent of"):
        ledger.spend(0.02)


def test_a_price_moves_by_a_tenth_in_a_hundred_tokens_and_comes_to_rest_at_the_budget():
    idle, twice, right = (Price(0.01, 1.0) for _ in range(3))
    for _ in range(100):
        idle.observe(0.0, 1)
        twice.observe(0.02, 1)
        right.observe(0.01, 1)
    assert idle.value == pytest.approx(0.9, abs=0.01) and twice.value == pytest.approx(1.1, abs=0.01)
    assert right.value == 1.0


def test_each_budget_has_a_price_of_its_own_and_exact_rows_have_none():
    prices = Prices(2.0)
    assert prices.values([0.0, 0.01, 0.03]).tolist() == [0.0, 2.0, 2.0]
    for _ in range(50):
        prices.observe([0.0, 0.01, 0.03], np.array([0.0, 0.0, 0.06]))
    exact, idle, busy = prices.values([0.0, 0.01, 0.03])
    assert exact == 0.0 and idle < 2.0 < busy


@pytest.mark.parametrize(
    ("quality", "budget"), [("exact", 0.0), ("balanced", 0.007), ("fast", 0.03), (0, 0.0), (0.02, 0.02)]
)
def test_words_and_numbers_mean_a_budget(quality, budget):
    assert budget_of(quality) == budget


@pytest.mark.parametrize(
    "quality", [-0.001, 1.5, 1e300, float("nan"), float("inf"), "best", None, True, [0.1]]
)
def test_other_budgets_are_refused_with_what_is_allowed(quality):
    with pytest.raises(ValueError, match=r'"balanced".*from 0 to 1'):
        budget_of(quality)
