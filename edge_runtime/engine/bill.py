"""Where the gate weight of every request was served, added up step by step: the bill of an answer.

Pure arithmetic on arrays. Knows hosts as indices, host 0 being the home itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Account(NamedTuple):
    """What one request cost: served [2, N] float64, gate weight and slots by host; host 0 is the home."""

    served: np.ndarray
    host_names: list[str]


class ServedWeight:
    """Gate weight and slots by request and host. S requests of a step, T rows, K slots per row, N hosts."""

    def __init__(self, num_hosts: int) -> None:
        self.num_hosts = num_hosts
        self._by_request: dict[str, np.ndarray] = {}  # request id -> [2, N] float64: weight, slots
        self._base = np.zeros((0, 1), dtype=np.int64)
        self._step = np.zeros((2, 0), dtype=np.float64)

    def begin_step(self, row_request: np.ndarray, num_slices: int) -> None:
        """row_request [T] int32: which of the step's `num_slices` requests each row belongs to."""
        self._base = row_request.astype(np.int64)[:, None] * self.num_hosts
        self._step = np.zeros((2, num_slices * self.num_hosts), dtype=np.float64)

    def add_layer(self, hosts: np.ndarray, gate_weights: np.ndarray, rows: np.ndarray | None = None) -> None:
        """Count one MoE layer. hosts [T, K] int: who served the slot, -1 nobody; gate_weights [T, K] float32.

        rows  [T] int, which rows of the step these are; None for all
        """
        base = self._base if rows is None else self._base[rows]
        index = (base + hosts).ravel()
        weights = gate_weights.ravel()
        served = hosts.ravel() >= 0
        if not served.all():
            index, weights = index[served], weights[served]
        self._step[0] += np.bincount(index, weights=weights, minlength=self._step.shape[1])
        self._step[1] += np.bincount(index, minlength=self._step.shape[1])

    def add_local_layers(self, num_layers: int, num_slots: int) -> None:
        """Count `num_layers` MoE layers that the home served alone: weight 1 and `num_slots` slots per row and layer.

        For gates whose weights sum to 1, in place of one `add_layer` each.
        """
        rows = np.bincount(self._base.ravel(), minlength=self._step.shape[1])
        self._step[0] += rows * num_layers
        self._step[1] += rows * (num_layers * num_slots)

    def end_step(self, request_ids: list[str]) -> None:
        """Book the step's sums on its requests, named in slice order."""
        step = self._step.reshape(2, len(request_ids), self.num_hosts)
        for index, request_id in enumerate(request_ids):
            booked = self._by_request.get(request_id)
            if booked is None:
                self._by_request[request_id] = step[:, index].copy()
            else:
                booked += step[:, index]

    def take(self, request_id: str) -> np.ndarray:
        """Close a request's account. [2, N] float64: gate weight and slots by host; zeros if it never ran."""
        booked = self._by_request.pop(request_id, None)
        return booked if booked is not None else np.zeros((2, self.num_hosts))

    def __len__(self) -> int:
        """Accounts that are open."""
        return len(self._by_request)


def joined_accounts(accounts: Sequence[Account]) -> Account:
    """One account of several of one request, hosts put together by name; the first one's home is the home."""
    names = list(dict.fromkeys(name for account in accounts for name in account.host_names))
    served = np.zeros((2, len(names)))
    for account in accounts:
        for index, name in enumerate(account.host_names):
            served[:, names.index(name)] += account.served[:, index]
    return Account(served, names)


def bill_of(account: Account) -> tuple[dict[str, float], dict[str, int]]:
    """Turn an account into the bill of an answer and the slots by node.

    The shares are of the gate weight that was served and sum to 1, or are all 0 if nothing was; nothing
    approximate exists yet, so `substituted`, `deferred` and `dropped` are 0 and no budget is spent.
    """
    weight, num_slots = account.served
    total = float(weight.sum())
    here = float(weight[0]) / total if total else 0.0
    bill = {
        "exact_here": here,
        "exact_elsewhere": 1.0 - here if total else 0.0,
        "substituted": 0.0,
        "deferred": 0.0,
        "dropped": 0.0,
        "budget_spent": 0.0,
    }
    slots = {name: int(count) for name, count in zip(account.host_names, num_slots, strict=True) if count}
    return bill, slots
