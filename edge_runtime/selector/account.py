"""What the rows of one step may spend of quality, spend, and deviate by so far: between ledgers and prices, which live on, and
the choices of a step's layers. Knows no expert and no clock.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.budget import Ledgers, Prices
from edge_runtime.selector.choose import Choice, Slots
from topology.traits import Floats


class StepAccount:
    """The rows of one step. T rows.

    users, budgets      of each row; a budget of 0 neither earns nor spends
    drag_per_deviation  see `Losses`
    left                [T] what each row may still spend
    spent               [T] what it has spent
    """

    def __init__(
        self,
        ledgers: Ledgers,
        prices: Prices,
        users: Sequence[str],
        budgets: Sequence[float],
        drag_per_deviation: float = 0.0,
    ) -> None:
        self._ledgers, self._prices, self._users, self._budgets = ledgers, prices, users, budgets
        self._drag_per_deviation = drag_per_deviation
        self.left = ledgers.allowances(users, budgets)
        # Around the price, by how full a bucket is: a full one loses what it earns, so there spending costs nothing.
        self._price = prices.values(budgets) * (2 * (1 - ledgers.fills(users, budgets)))
        self.spent, self._deviates = np.zeros(len(users)), np.zeros(len(users))

    def slots(
        self,
        expert_ids: NDArray[np.int32],
        gate_weights: NDArray[np.float32],
        gate_logits: NDArray[np.float32],
        rows: NDArray[np.integer] | slice = slice(None),
    ) -> Slots:
        """What a layer's choice is asked about; `rows` says which of the step's they are."""
        drag = self._drag_per_deviation * self._deviates[rows]
        return Slots(expert_ids, gate_weights, gate_logits, self.left[rows], self._price[rows], drag)

    def take(self, choice: Choice, rows: NDArray[np.integer] | slice = slice(None)) -> None:
        """A choice is carried out."""
        self.spent[rows] += choice.loss
        self.left[rows] = np.maximum(self.left[rows] - choice.loss, 0.0)
        self._deviates[rows] += choice.deviation

    def pay(self, loss: Floats) -> None:
        """[T] rows lose so much in another way."""
        self.spent += loss
        self.left = np.maximum(self.left - loss, 0.0)

    def book(self) -> Floats:
        """The step is done: tokens earn, and what was spent is taken out. Returns [T] what was spent."""
        self._ledgers.book(self._users, self._budgets, self.spent)
        self._prices.observe(self._budgets, self.spent)
        return self.spent
