"""What quality a user may spend, and what spending is worth: leaky buckets, and a price that follows what is spent.

A unit of loss is a relative rise of a token's mean loss, as calibration measured it. Knows no expert and no clock.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BALANCED = 0.007
FAST = 0.03
QUALITIES = {"exact": 0.0, "balanced": BALANCED, "fast": FAST}
"""What the words of a request stand for: mean relative loss per token."""
MOST = 1.0
"""Beyond this an answer has nothing of the model left, and a number is a slip."""
BURST_TOKENS = 32
"""Credit for so many tokens is kept at most."""
RATE_PER_TOKEN = 0.1 / 100
"""By how much a price moves for each token that spends nothing, or twice its budget: 10 % in 100 tokens."""
LEAST_STEP, MOST_STEP = 0.5, 2.0


def budget_of(quality: object) -> float:
    """The budget that a request's `quality` means; ValueError says what is allowed."""
    if isinstance(quality, str) and quality in QUALITIES:
        return QUALITIES[quality]
    if isinstance(quality, int | float) and not isinstance(quality, bool) and 0 <= quality <= MOST:
        return float(quality)
    words = ", ".join(f'"{word}"' for word in QUALITIES)
    raise ValueError(f"{words}, or a mean relative loss per token from 0 to {MOST:g}")


@dataclass
class Ledger:
    """One user's bucket: filled by generated tokens, emptied by substitutions, never below zero.

    credit          what may be spent now
    held            what steps under way may spend of it
    earned, spent   since the start; spent never exceeds earned
    """

    credit: float = 0.0
    held: float = 0.0
    earned: float = 0.0
    spent: float = 0.0

    def earn(self, budget: float) -> float:
        """A token is generated whose request has this budget per token: what that brings, as far as the bucket has room."""
        before = self.credit + self.held
        gain = max(before, min(before + budget, BURST_TOKENS * budget)) - before
        self.credit += gain
        self.earned += gain
        return gain

    def spend(self, loss: float) -> None:
        """Take out what a token cost. More than there is must not have been chosen."""
        assert loss <= self.credit * (1 + 1e-9) + 1e-12, f"{loss} was spent of {self.credit}"
        self.credit = max(0.0, self.credit - loss)
        self.spent += loss


class Share(NamedTuple):
    """What a step has of one user's ledger: `amount` of its credit, of which its own tokens bring `gain`.

    ledger  the very one it was taken from: a user who is forgotten meanwhile and comes again has another
    """

    ledger: Ledger
    amount: float
    gain: float


class Held(NamedTuple):
    """What one step may spend, taken out of the ledgers until it is back.

    users, budgets  of each row; a budget of 0 neither earns nor spends
    allowances      [T] what each row may spend
    by_user         whose credit that is
    """

    users: Sequence[str]
    budgets: Sequence[float]
    allowances: NDArray[np.float64]
    by_user: dict[str, Share]


class Ledgers:
    """The buckets of the users whose requests live here."""

    def __init__(self) -> None:
        self._by_user: dict[str, Ledger] = {}

    def hold(self, users: Sequence[str], budgets: Sequence[float]) -> Held:
        """What each row of a step may spend: a user's credit, with what these tokens earn, is split among its rows.

        No other step has it until `settle` or `release`.
        """
        rows_of: dict[str, list[int]] = {}
        for row, (user, budget) in enumerate(zip(users, budgets, strict=True)):
            if budget > 0:
                rows_of.setdefault(user, []).append(row)
        allowances, by_user = np.zeros(len(users)), {}
        for user, rows in rows_of.items():
            ledger = self.of(user)
            gain = sum(ledger.earn(budgets[row]) for row in rows)
            allowances[rows] = ledger.credit / len(rows)
            by_user[user] = Share(ledger, ledger.credit, gain)
            ledger.held, ledger.credit = ledger.held + ledger.credit, 0.0
        return Held(users, budgets, allowances, by_user)

    def release(self, held: Held) -> None:
        """The step did not happen: its tokens have earned nothing, and may be tried again."""
        for ledger, amount, gain in held.by_user.values():
            ledger.held = max(0.0, ledger.held - amount)
            ledger.credit += max(0.0, amount - gain)
            ledger.earned -= gain

    def settle(self, held: Held, losses: NDArray[np.float64]) -> None:
        """The step is done, and its rows cost this: the rest of what was held is credit again."""
        spent = dict.fromkeys(held.by_user, 0.0)
        for user, budget, loss in zip(held.users, held.budgets, losses.tolist(), strict=True):
            if budget > 0:
                spent[user] += loss
        for user, (ledger, amount, _) in held.by_user.items():
            assert spent[user] <= amount * (1 + 1e-9) + 1e-12, f"{spent[user]} was spent of {amount} held"
            ledger.held = max(0.0, ledger.held - amount)
            ledger.credit += amount
            ledger.spend(spent[user])

    def fills(self, users: Sequence[str], budgets: Sequence[float]) -> NDArray[np.float64]:
        """[T] how full each row's bucket is, 0 to 1: what a full one earns is lost."""
        return np.array(
            [
                min(1.0, self.left(user) / (BURST_TOKENS * budget)) if budget > 0 else 0.0
                for user, budget in zip(users, budgets, strict=True)
            ]
        )

    def left(self, user: str) -> float:
        """What a user has left, with what steps under way may spend of it."""
        known = self._by_user.get(user)
        return known.credit + known.held if known is not None else 0.0

    def of(self, user: str) -> Ledger:
        return self._by_user.setdefault(user, Ledger())

    def carry(self, user: str, credit: float, budget: float) -> None:
        """Go on with a bucket that stood elsewhere: as full as it was there, and never fuller than one can be."""
        held = min(credit, BURST_TOKENS * budget)
        self._by_user[user] = Ledger(credit=held, earned=held)

    def forget(self, user: str) -> None:
        """Nobody of that user is here any more. Credit that was not spent is gone, so nothing is gained by it."""
        self._by_user.pop(user, None)

    def forget_oldest(self, keep: Container[str]) -> None:
        """Forget whoever has been here longest, but for those in `keep`."""
        oldest = next((user for user in self._by_user if user not in keep), None)
        if oldest is not None:
            del self._by_user[oldest]

    def __len__(self) -> int:
        return len(self._by_user)


@dataclass
class Price:
    """Seconds of waiting that a unit of loss is worth, for one budget: rises while more than the budget is spent.

    Dual ascent on "least waiting at a mean loss of at most the budget".
    """

    budget: float
    value: float

    def observe(self, mean_loss: float, num_tokens: int) -> None:
        """So many tokens cost so much on average."""
        step = 1 + RATE_PER_TOKEN * num_tokens * (mean_loss / self.budget - 1)
        self.value *= min(MOST_STEP, max(LEAST_STEP, step))


@dataclass
class Prices:
    """A price for each budget that is in use; new ones begin where one typical substitution is worth one typical call."""

    start: float
    _by_budget: dict[float, Price] = field(default_factory=dict)

    def values(self, budgets: Sequence[float]) -> NDArray[np.float64]:
        """[T] the price for each row; 0 for rows without a budget."""
        return np.array([self._price(budget).value if budget > 0 else 0.0 for budget in budgets])

    def begin_at(self, start: float) -> None:
        """Somebody knows what spending is worth at the start, where so far nobody did."""
        if self.start == 0 and start > 0:
            self.start = start
            for price in self._by_budget.values():
                price.value = price.value or start

    def observe(self, budgets: Sequence[float], losses: NDArray[np.float64]) -> None:
        """A step is done, and its rows cost this."""
        for budget in {budget for budget in budgets if budget > 0}:
            spent = [loss for other, loss in zip(budgets, losses.tolist(), strict=True) if other == budget]
            self._price(budget).observe(sum(spent) / len(spent), len(spent))

    def _price(self, budget: float) -> Price:
        if budget not in self._by_budget:
            self._by_budget[budget] = Price(budget, self.start)
        return self._by_budget[budget]
