"""What requests at a lower tier left out: gate weight of slices that did not run, step by step. Pure arithmetic on arrays."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Dropped(NamedTuple):
    """What one request left out, by row and routed layer on average.

    mass  share of the gate weight
    loss  what is expected of that, per token, in the unit of the quality ledger
    ran   slices that ran
    """

    mass: float
    loss: float
    ran: float = 0.0


class DroppedMass:
    """Sums by request. S slices of a step, T rows."""

    def __init__(self) -> None:
        self._by_request: dict[str, np.ndarray] = {}  # mass, loss, slices, rows x layers, rows
        self._rows = np.zeros(0, dtype=np.int64)
        self._num_slices = self._num_layers = 0
        self._sums = np.zeros((3, 0))  # [3, T] mass, loss, slices of each row, over layers
        self._before = np.zeros((4, 0))

    def begin_step(
        self, row_request: np.ndarray, num_slices: int, before: Sequence[Sequence[float]] = ()
    ) -> None:
        """row_request [T]: the slice of each row; before: what `of_step` said at the stage before, none at the first."""
        self._rows, self._num_slices, self._num_layers = row_request, num_slices, 0
        self._sums = np.zeros((3, len(row_request)))
        self._before = np.array(before).T if len(before) else np.zeros((4, num_slices))

    def add_layer(self, dropped: np.ndarray, lost: np.ndarray, ran: np.ndarray) -> None:
        """Count one routed layer, [T] each: share of a row's gate weight, what is expected of that, slices that ran."""
        self.add_layers(dropped[None], lost[None], ran[None])

    def add_layers(self, dropped: np.ndarray, lost: np.ndarray, ran: np.ndarray) -> None:
        """Count routed layers, [layers, T] each."""
        for sums, added in zip(self._sums, (dropped, lost, ran), strict=True):
            sums += added.sum(axis=0, dtype=np.float64)
        self._num_layers += len(dropped)

    def of_step(self) -> list[tuple[float, float, float, float]]:
        """Mass, loss, slices that ran, and rows times layers, of each slice of the step so far."""
        rows = np.bincount(self._rows, minlength=self._num_slices).astype(np.float64)
        sums = [np.bincount(self._rows, weights=each, minlength=self._num_slices) for each in self._sums]
        step = np.stack([*sums, rows * self._num_layers]) + self._before
        return [(mass, loss, ran, layers) for mass, loss, ran, layers in step.T.tolist()]

    def end_step(self, request_ids: Sequence[str]) -> None:
        """Book the step on its requests, in slice order."""
        if not self._num_layers:
            return
        rows = np.bincount(self._rows, minlength=self._num_slices).tolist()
        for request_id, sums, count in zip(request_ids, self.of_step(), rows, strict=True):
            self.book(request_id, sums, count)
        self._num_layers = 0

    def book(self, request_id: str, sums: Sequence[float], num_rows: int) -> None:
        """Book what `of_step` said of one request, which had so many rows."""
        mine, booked = np.array([*sums, num_rows], dtype=np.float64), self._by_request.get(request_id)
        self._by_request[request_id] = mine if booked is None else booked + mine

    def take(self, request_id: str) -> Dropped:
        """Close a request's sums."""
        booked = self._by_request.pop(request_id, None)
        if booked is None or not booked[3]:
            return Dropped(0.0, 0.0)
        mass, loss, ran, rows_and_layers, rows = booked.tolist()
        return Dropped(mass / rows_and_layers, loss / rows, ran / rows_and_layers)


def sliced_bill(bill: Mapping[str, float], tier: int, dropped: Dropped) -> dict[str, float]:
    """The bill of a request at tier K, of which what ran has the shares. K_run: sub-experts that ran, on average."""
    ran = 1.0 - dropped.mass
    shares = {
        name: bill[name] * ran
        for name in ("exact_here", "exact_elsewhere", "substituted", "deferred")
        if name in bill
    }
    left_out = bill.get("dropped", 0.0) * ran + dropped.mass
    return {
        **bill,
        **shares,
        "K": tier,
        "K_run": dropped.ran,
        "dropped": left_out,
        "dropped_loss": dropped.loss,
    }


def whole_bill(bill: Mapping[str, float], full_tier: int) -> dict[str, float]:
    """The bill of a request that ran the whole model, where others may ask for less of it."""
    return {**bill, "K": full_tier, "K_run": full_tier, "dropped_loss": 0.0}
