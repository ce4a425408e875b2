"""Where the gate weight of every request was served, added up step by step: the bill of an answer.

Pure arithmetic on arrays. Knows hosts as indices, host 0 being the home itself.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np


class Account(NamedTuple):
    """What one request cost: served [2, N] float64, gate weight and slots by host; host 0 is the home.

    here   gate weight served where its rows were: at the home; with stages, at each stage's own node. None: host 0's
    trace  layer -> gate weight by `quality.WAYS`, of a request that asked for it
    """

    served: np.ndarray
    host_names: list[str]
    here: float | None = None
    trace: Mapping[int, np.ndarray] = MappingProxyType({})

    @property
    def weight_here(self) -> float:
        return float(self.served[0, 0]) if self.here is None else self.here


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

    def add_home_layers(self, gate_weights: np.ndarray) -> None:
        """Count layers that the home served alone. gate_weights [layers, T, K] float32."""
        num_layers, _, num_slots = gate_weights.shape
        base, size = self._base.ravel(), self._step.shape[1]
        weight = gate_weights.sum(axis=(0, 2), dtype=np.float64)
        self._step[0] += np.bincount(base, weights=weight, minlength=size)
        self._step[1] += np.bincount(base, minlength=size) * (num_layers * num_slots)

    def of_step(self, num_slices: int) -> np.ndarray:
        """[2, S, N] float64: weight and slots of the step's slices so far, by host; a view."""
        return self._step.reshape(2, num_slices, self.num_hosts)

    def end_step(self, request_ids: list[str]) -> None:
        """Book the step's sums on its requests, named in slice order."""
        step = self.of_step(len(request_ids))
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


class StagesAccounts:
    """The accounts of requests whose layers several stages run, from what each step brings of all of them."""

    def __init__(self, home: str) -> None:
        self._columns: dict[str, int] = {home: 0}
        self._by_request: dict[
            str, np.ndarray
        ] = {}  # [1 + 2N] float64: here, then weight and slots of each host

    def book(self, request_ids: Sequence[str], hosts: Sequence[str], served: np.ndarray) -> None:
        """served [S, 1 + 2H]: gate weight at the stages' own nodes, then of each host its weight, then its slots."""
        for name in hosts:
            self._columns.setdefault(name, len(self._columns))
        places = np.array([self._columns[name] for name in hosts], dtype=np.intp)
        columns = np.concatenate([[0], 1 + 2 * places, 2 + 2 * places])
        size = 1 + 2 * len(self._columns)
        for request_id, numbers in zip(request_ids, served, strict=True):
            booked = self._by_request.get(request_id)
            if booked is None or len(booked) < size:
                grown = np.zeros(size)
                grown[: 0 if booked is None else len(booked)] = () if booked is None else booked
                booked = self._by_request[request_id] = grown
            np.add.at(booked, columns, numbers)

    def take(self, request_id: str) -> Account:
        """Close a request's account; all zeros if it never ran."""
        booked = self._by_request.pop(request_id, None)
        served = np.zeros((2, len(self._columns)))
        if booked is None:
            return Account(served, list(self._columns), 0.0)
        pairs = booked[1:].reshape(-1, 2)
        served[:, : len(pairs)] = pairs.T
        return Account(served, list(self._columns), float(booked[0]))

    def __len__(self) -> int:
        """Accounts that are open."""
        return len(self._by_request)


def served_in_stages(
    hosts: Sequence[str], served: np.ndarray, names: Sequence[str], step: np.ndarray
) -> tuple[list[str], np.ndarray]:
    """Add what one more stage served to what those before it did. S slices, H hosts so far, N of this stage.

    hosts   so far, and `served` [S, 1 + 2H] float32
    names   of this stage's hosts, its own node first; step [2, S, N] float64, weight and slots
    returns the hosts of both, and [S, 1 + 2H'] float32; a host that served nothing is not named
    """
    used = [index for index, name in enumerate(names) if name in hosts or step[1, :, index].any()]
    together = list(dict.fromkeys([*hosts, *(names[index] for index in used)]))
    num_before, num_after = len(hosts), len(together)
    found = np.zeros((served.shape[0], 1 + 2 * num_after), dtype=np.float32)
    found[:, : 1 + num_before] = served[:, : 1 + num_before]
    found[:, 1 + num_after : 1 + num_after + num_before] = served[:, 1 + num_before :]
    found[:, 0] += step[0, :, 0]
    for index in used:
        column = 1 + together.index(names[index])
        found[:, column] += step[0, :, index]
        found[:, column + num_after] += step[1, :, index]
    return together, found


def joined_accounts(accounts: Sequence[Account]) -> Account:
    """One account of several of one request, hosts put together by name; what was here in any of them was here."""
    names = list(dict.fromkeys(name for account in accounts for name in account.host_names))
    served = np.zeros((2, len(names)))
    for account in accounts:
        for index, name in enumerate(account.host_names):
            served[:, names.index(name)] += account.served[:, index]
    trace: dict[int, np.ndarray] = {}
    for account in accounts:
        for layer, weights in account.trace.items():
            trace[layer] = trace[layer] + weights if layer in trace else weights
    return Account(served, names, sum(account.weight_here for account in accounts), trace)


def bill_of(account: Account) -> tuple[dict[str, float], dict[str, int]]:
    """Turn an account into the bill of an answer and the slots by node.

    The shares are of the gate weight that was served and sum to 1, or are all 0 if nothing was. Stand-ins count as what
    they are, experts of their host; `quality.py` says which they were. Nothing is deferred.
    """
    weight, num_slots = account.served
    total = float(weight.sum())
    here = account.weight_here / total if total else 0.0
    bill = {
        "exact_here": here,
        "exact_elsewhere": 1.0 - here if total else 0.0,
        "substituted": 0.0,
        "deferred": 0.0,
        "dropped": 0.0,
        "budget_spent": 0.0,
        "budget_left": 0.0,
    }
    slots = {name: int(count) for name, count in zip(account.host_names, num_slots, strict=True) if count}
    return bill, slots
