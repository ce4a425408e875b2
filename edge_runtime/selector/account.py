"""What the rows of one step may spend of quality, spend, and deviate by so far: between ledgers and prices, which live on, and
the choices of a step's layers, at one node or stage by stage. Knows no expert and no clock.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_runtime.selector.budget import Ledgers, Prices
from edge_runtime.selector.choose import Choice, Slots
from topology.traits import Floats


class RowAccount:
    """The rows of one step, wherever its layers are. T rows.

    left, price         [T] what each row may still spend, and seconds of waiting that a unit of it is worth
    spent, deviates     [T] what it has spent, and how far it deviates, so far
    drag_per_deviation  see `Losses`
    """

    def __init__(
        self, left: Floats, price: Floats, spent: Floats, deviates: Floats, drag_per_deviation: float = 0.0
    ) -> None:
        self.left, self.price, self.spent, self.deviates = left, price, spent, deviates
        self._drag_per_deviation = drag_per_deviation

    def slots(
        self,
        expert_ids: NDArray[np.int32],
        gate_weights: NDArray[np.float32],
        gate_logits: NDArray[np.float32],
        rows: NDArray[np.integer] | slice = slice(None),
    ) -> Slots:
        """What a layer's choice is asked about; `rows` says which of the step's they are."""
        drag = self._drag_per_deviation * self.deviates[rows]
        return Slots(expert_ids, gate_weights, gate_logits, self.left[rows], self.price[rows], drag)

    def take(self, choice: Choice, rows: NDArray[np.integer] | slice = slice(None)) -> None:
        """A choice is carried out."""
        self.spent[rows] += choice.loss
        self.left[rows] = np.maximum(self.left[rows] - choice.loss, 0.0)
        self.deviates[rows] += choice.deviation

    def pay(self, loss: Floats) -> None:
        """[T] rows lose so much in another way."""
        self.spent += loss
        self.left = np.maximum(self.left - loss, 0.0)


class StepAccount(RowAccount):
    """The same where the ledgers are: what the rows may spend is held for them until the step is booked or given up.

    users, budgets  of each row; a budget of 0 neither earns nor spends
    given           [T] what each row might spend in this step
    """

    def __init__(
        self,
        ledgers: Ledgers,
        prices: Prices,
        users: Sequence[str],
        budgets: Sequence[float],
        drag_per_deviation: float = 0.0,
    ) -> None:
        self._ledgers, self._prices, self._budgets = ledgers, prices, budgets
        # Around the price, by how full a bucket is: a full one loses what it earns, so there spending costs nothing.
        price = prices.values(budgets) * (2 * (1 - ledgers.fills(users, budgets)))
        self._held = ledgers.hold(users, budgets)
        self.given = self._held.allowances
        nothing = np.zeros(len(users))
        super().__init__(self.given.copy(), price, nothing, nothing.copy(), drag_per_deviation)

    def book(self, *, moves_prices: bool = True) -> Floats:
        """The step is done: tokens earn, and what was spent is taken out. Returns [T] what was spent."""
        self._ledgers.settle(self._held, self.spent)
        if moves_prices:
            self._prices.observe(self._budgets, self.spent)
        return self.spent

    def give_up(self) -> None:
        """The step did not happen: nobody has earned or spent anything."""
        self._ledgers.release(self._held)
