"""What requests at a lower tier left out: gate weight of slices that did not run, step by step. Pure arithmetic on arrays."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Dropped(NamedTuple):
    """What one request left out, by row and routed layer on average.

    mass  share of the gate weight
    loss  the same times how sensitive each layer is: the unit of the quality ledger, per token
    """

    mass: float
    loss: float


class DroppedMass:
    """Sums by request. S slices of a step, T rows.

    sensitivity  by layer, expected loss of a token when all of the layer's gate weight is missing; absent: 0
    """

    def __init__(self, sensitivity: Mapping[int, float] | None = None) -> None:
        self._sensitivity = sensitivity or {}
        self._by_request: dict[str, np.ndarray] = {}  # mass, loss, rows x layers, rows
        self._step: np.ndarray | None = None
        self._rows = np.zeros(0, dtype=np.int64)

    def begin_step(self, row_request: np.ndarray, num_slices: int) -> None:
        """row_request [T]: the slice of each row."""
        self._rows = row_request
        self._step = np.zeros((4, num_slices))
        self._step[3] = np.bincount(row_request, minlength=num_slices)

    def add_layer(self, layer: int, dropped: np.ndarray) -> None:
        """Count one routed layer. dropped [T] float32, share of each row's gate weight."""
        assert self._step is not None, "a layer without a step"
        mass = np.bincount(self._rows, weights=dropped, minlength=self._step.shape[1])
        self._step[0] += mass
        self._step[1] += mass * self._sensitivity.get(layer, 0.0)
        self._step[2] += self._step[3]

    def end_step(self, request_ids: list[str]) -> None:
        """Book the step on its requests, in slice order."""
        if self._step is None:
            return
        for index, request_id in enumerate(request_ids):
            booked = self._by_request.get(request_id)
            mine = self._step[:, index]
            self._by_request[request_id] = mine.copy() if booked is None else booked + mine
        self._step = None

    def take(self, request_id: str) -> Dropped:
        """Close a request's sums."""
        booked = self._by_request.pop(request_id, None)
        if booked is None or not booked[2]:
            return Dropped(0.0, 0.0)
        return Dropped(float(booked[0] / booked[2]), float(booked[1] / booked[3]))


def sliced_bill(bill: Mapping[str, float], tier: int, dropped: Dropped) -> dict[str, float]:
    """The bill of a request at tier K: what ran shares what was not dropped."""
    ran = 1.0 - dropped.mass
    shares = {
        name: bill[name] * ran
        for name in ("exact_here", "exact_elsewhere", "substituted", "deferred")
        if name in bill
    }
    return {**bill, **shares, "K": tier, "dropped": dropped.mass, "dropped_loss": dropped.loss}
