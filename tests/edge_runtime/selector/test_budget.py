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
        held = ledgers.hold(users, budgets)
        allowance = held.allowances
        assert (allowance >= 0).all() and (allowance[np.array(budgets) == 0] == 0).all()
        losses = allowance * np.array(shares)
        ledgers.settle(held, losses)
        for user, budget, loss in zip(users, budgets, losses.tolist(), strict=True):
            earned[user] += budget
            spent[user] += loss
        for user in set(users):
            assert spent[user] <= earned[user] * (1 + 1e-9), "at no moment more than its tokens have earned"
            assert 0 <= ledgers.left(user) <= BURST_TOKENS * 0.03 * (1 + 1e-9)


def earn(ledgers, user, budget, tokens):
    """Tokens that cost nothing."""
    ledgers.settle(ledgers.hold([user] * tokens, [budget] * tokens), np.zeros(tokens))


def test_a_user_with_several_rows_in_a_step_splits_one_credit():
    ledgers = Ledgers()
    earn(ledgers, "ann", 0.01, 1)
    held = ledgers.hold(["ann", "bob", "ann"], [0.01, 0.01, 0.01])
    assert held.allowances.tolist() == pytest.approx([0.015, 0.01, 0.015])


def test_a_step_that_did_not_happen_has_earned_and_spent_nothing():
    ledgers = Ledgers()
    for _ in range(3):
        held = ledgers.hold(["ann"], [0.01])
        assert held.allowances.tolist() == [0.01]
        ledgers.release(held)
    assert ledgers.left("ann") == 0.0 and ledgers.of("ann").earned == 0.0


def test_who_is_forgotten_and_comes_again_has_nothing_of_a_step_begun_before():
    for ends in (lambda ledgers, held: ledgers.settle(held, np.zeros(1)), Ledgers.release):
        ledgers = Ledgers()
        earn(ledgers, "ann", 0.01, 10)
        held = ledgers.hold(["ann"], [0.01])
        ledgers.forget("ann")
        earn(ledgers, "ann", 0.01, 1)
        ends(ledgers, held)
        assert ledgers.left("ann") == pytest.approx(0.01)


def test_steps_under_way_at_once_never_have_the_same_credit():
    ledgers = Ledgers()
    earn(ledgers, "ann", 0.01, 10)
    first, second = ledgers.hold(["ann"], [0.01]), ledgers.hold(["ann"], [0.01])
    assert first.allowances[0] == pytest.approx(0.11) and second.allowances[0] == pytest.approx(0.01)
    ledgers.settle(second, second.allowances)
    ledgers.settle(first, first.allowances / 2)
    assert ledgers.left("ann") == pytest.approx(0.055)


@given(st.lists(st.tuples(st.sampled_from("hsr"), BUDGETS, st.floats(0, 1)), max_size=80))
def test_whatever_comes_back_in_whatever_order_the_ledger_adds_up(events):
    ledgers, under_way = Ledgers(), []
    for kind, budget, share in events:
        if kind == "h" or not under_way:
            under_way.append(ledgers.hold(["ann", "ann"], [budget, budget]))
            continue
        held = under_way.pop(int(share * (len(under_way) - 1)))
        if kind == "s":
            ledgers.settle(held, held.allowances * share)
        else:
            ledgers.release(held)
        ledger = ledgers.of("ann")
        assert ledger.credit >= -1e-12 and ledger.spent <= ledger.earned * (1 + 1e-9) + 1e-12
        assert ledger.credit + ledger.held == pytest.approx(ledger.earned - ledger.spent, abs=1e-9)
        assert ledger.credit + ledger.held <= BURST_TOKENS * 0.03 * (1 + 1e-9)


def test_credit_is_kept_for_a_burst_and_no_more():
    ledger = Ledger()
    for _ in range(100):
        ledger.earn(0.01)
    assert ledger.credit == pytest.approx(BURST_TOKENS * 0.01)
    ledger.earn(0.001)
    assert ledger.credit == pytest.approx(BURST_TOKENS * 0.01), "a smaller budget takes nothing away"


def test_a_bucket_is_full_when_more_would_be_lost():
    ledgers = Ledgers()
    earn(ledgers, "ann", 0.01, 16)
    assert ledgers.fills(["ann", "bob", "ann"], [0.01, 0.01, 0.0]).tolist() == pytest.approx([0.5, 0.0, 0.0])
    earn(ledgers, "ann", 0.01, 40)
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
