"""The quality side of an engine's steps: which rows may spend what, what was spent, and what goes on the bill for it.

Rows of a prompt are never touched: what is computed wrong there stays in the KV. Knows ledgers and prices; which slots
are swapped is the port's to say.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request
from edge_runtime.selector.account import StepAccount
from edge_runtime.selector.budget import Ledgers, Prices
from edge_runtime.selector.choose import DEFERRED, DROPPED, EXACT, STAND_IN, Choice, Slots
from kernels.transfers import on_device, on_host

Choose = Callable[[int, Slots, bool], Choice | None]
MOST_USERS = 4096  # ledgers that are kept of users who have no request here; the oldest goes first
FIRST_RESERVE = 1e9  # more than anybody has
WAYS = ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")
NOT_EXACT = (STAND_IN, DEFERRED, DROPPED)


@dataclass
class Spending:
    """What one request had of stand-ins so far: gate weight served by them, late, dropped, and the loss spent on it.

    last_dropped  loss of the last token by slices that its tier left out
    trace  layer -> gate weight by `WAYS`, of a request that asked for it
    """

    substituted: float = 0.0
    deferred: float = 0.0
    dropped: float = 0.0
    spent: float = 0.0
    last_dropped: float | None = None
    trace: dict[int, NDArray[np.float64]] = field(default_factory=dict)


class QualityBooks:
    """Ledgers, prices and spendings of the requests that one engine answers. One thread.

    choose       which slots of a layer use a stand-in, within what their rows may spend; None: all are exact. The bool says
                 whether replies of the layer may be added one layer late
    start_price  see `Prices`; asked when a budget is first used
    take_late    what was swapped after all in the layer just run, since replies were late
    drag         loss for each unit of deviation, and each unit that a row deviated in the layers before; see `Losses`
    """

    def __init__(
        self,
        choose: Choose,
        start_price: Callable[[], float],
        take_late: Callable[[], Choice | None] = lambda: None,
        drag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.ledgers = Ledgers()
        self.is_open = False
        self.is_traced = False
        self._choose, self._start_price, self._take_late, self._drag = choose, start_price, take_late, drag
        self._prices: Prices | None = None
        self._by_request: dict[str, Spending] = {}
        self._open: Counter[str] = Counter()  # named user -> requests that have spendings here

    def begin_step(self, plan: StepPlan) -> None:
        """Find out who may spend what. `is_open` tells whether anybody may, `is_traced` whether anybody looks."""
        slices = plan.slices
        self.is_traced = any(piece.request.trace for piece in slices)
        self.is_open = any(piece.request.budget and piece.count == 1 for piece in slices)
        if not (self.is_open or self.is_traced):
            return
        self._users, self._budgets = [""] * plan.num_rows, [0.0] * plan.num_rows
        self._slice_of = np.repeat(np.arange(len(slices)), [piece.count for piece in slices])
        row = 0
        for piece in slices:
            request = piece.request
            if (
                request.budget
                and piece.count == 1
                and piece.samples
                and piece.start >= len(request.prompt_ids)
            ):
                self._users[row], self._budgets[row] = user_of(request), request.budget
                self._spending(request)
            row += piece.count
        if self._prices is None:
            self._prices = Prices(self._start_price())
        self._account = StepAccount(self.ledgers, self._prices, self._users, self._budgets, self._drag())
        self._dropped_loss = np.zeros(plan.num_rows)
        self._left_out: NDArray[np.float32] | None = None
        self._layers_left = self._all_layers = 0
        self._reserved = np.array([self._reserve_of(slices[index].request) for index in self._slice_of])
        self._weights = np.zeros((len(NOT_EXACT), plan.num_rows))
        self._layers: list[tuple[int, NDArray[np.float64]]] = []  # layer, [T, W] gate weight by WAYS
        self.is_open = bool(self._account.left.any())

    def stand_in(
        self,
        layer: int,
        expert_ids: Tensor,
        gate_weights: Tensor,
        gate_logits: Tensor,
        may_defer: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ask for the choice of one layer: what is to be computed in place of what the gate chose, and its weights.

        The tensors that are given are left as they are; where nothing changes they are what is returned. The third is
        [T, K] bool, the slots whose outputs are added one layer late; None if none is.
        """
        ids, weights, logits = (on_host(each).numpy() for each in (expert_ids, gate_weights, gate_logits))
        slots = self._account.slots(ids, weights, logits)
        if self._reserved.any():  # what leaving out slices is going to cost goes first
            kept = self._reserved * self._layers_left / self._all_layers
            slots = slots._replace(allowance=np.maximum(0.0, slots.allowance - kept))
        choice = self._choose(layer, slots, may_defer)
        self._kind, self._shares = (None if choice is None else choice.kind), weights
        if choice is None:
            return expert_ids, gate_weights, None
        self._take(choice, weights)
        if (choice.kind == DROPPED).any():
            is_dropped = on_device(torch.from_numpy(choice.kind == DROPPED))
            gate_weights = gate_weights.masked_fill(is_dropped, 0.0)
        is_late = choice.kind == DEFERRED
        late = on_device(torch.from_numpy(is_late)) if is_late.any() else None
        return on_device(torch.from_numpy(choice.expert_ids)), gate_weights, late

    def begin_layer(self, layers_left: int) -> None:
        """A routed layer begins; so many are left, this one included."""
        if self.is_open or self.is_traced:
            self._layers_left, self._left_out = layers_left, None
            self._shares = self._kind = None
            self._all_layers = max(self._all_layers, layers_left)

    def caps(self) -> NDArray[np.float64] | None:
        """[T], the most that each row may lose in this layer by slices left out: an even share of what it has left.

        Infinite for rows without a budget, whose loss nobody counts. None where that is all of them.
        """
        if not self.is_open:
            return None
        return np.where(np.array(self._budgets) > 0, self._account.left / self._layers_left, np.inf)

    def leave_out(self, share: NDArray[np.float32], loss: NDArray[np.float64]) -> None:
        """Rows leave out [T] of their gate weight in this layer, and pay for it if they have a budget."""
        self._left_out = share
        if self.is_open:
            paid = np.where(np.array(self._budgets) > 0, loss, 0.0)
            self._account.pay(paid)
            self._dropped_loss += paid

    def _reserve_of(self, request: Request) -> float:
        """What a token of a request is expected to lose by its tier: as the last one did. The first may use no stand-in."""
        if not request.tier or not request.budget:
            return 0.0
        known = self._by_request.get(request.request_id)
        return FIRST_RESERVE if known is None or known.last_dropped is None else known.last_dropped

    def end_layer(self) -> None:
        """A layer for which `stand_in` was asked is done."""
        late = self._take_late()
        if late is not None:
            self._take(late, self._shares)
            self._kind = late.kind if self._kind is None else np.maximum(self._kind, late.kind)

    def _take(self, choice: Choice, weights: NDArray[np.float32]) -> None:
        self._account.take(choice)
        for at, kind in enumerate(NOT_EXACT):
            self._weights[at] += np.where(choice.kind == kind, weights, 0.0).sum(axis=1)

    def trace(self, layer: int, hosts: NDArray[np.int32] | None, gate_weights: Tensor) -> None:
        """Note where a layer's slots were served. hosts [T, K]: 0 is the home; None if it served all."""
        weights = (on_host(gate_weights).numpy() if self._shares is None else self._shares).astype(np.float64)
        kind = self._kind if self._kind is not None else np.zeros(weights.shape, np.int8)
        served = np.zeros(weights.shape, np.int32) if hosts is None else hosts
        ways = (
            (kind == EXACT) & (served == 0),
            (kind == EXACT) & (served > 0),
            *(kind == other for other in NOT_EXACT),
        )
        table = np.stack([(weights * way).sum(axis=1) for way in ways], axis=1)
        if self._left_out is not None:  # of what ran in whatever way, as much less as was left out
            gone, total = np.minimum(self._left_out.astype(np.float64), 1.0), table.sum(axis=1)
            table *= 1 - gone[:, None]
            table[:, WAYS.index("dropped")] += gone * total
        self._layers.append((layer, table))

    def end_step(self, plan: StepPlan) -> None:
        """The step is done: tokens earn, and what was spent is booked."""
        if self.is_traced:
            self._book_traces(plan)
        if not self.is_open:
            return
        spent = self._account.book()
        for row in np.flatnonzero(np.array(self._budgets)).tolist():
            request = plan.slices[self._slice_of[row]].request
            spending = self._spending(request)
            spending.substituted += float(self._weights[0, row])
            spending.deferred += float(self._weights[1, row])
            spending.dropped += float(self._weights[2, row])
            spending.spent += float(spent[row])
            spending.last_dropped = float(self._dropped_loss[row])
            request.ledger = (0.0 if request.user else self.ledgers.left(user_of(request)), spending.spent)

    def _book_traces(self, plan: StepPlan) -> None:
        for index, piece in enumerate(plan.slices):
            if piece.request.trace:
                table = self._spending(piece.request).trace
                rows = self._slice_of == index
                for layer, weights in self._layers:
                    table[layer] = table.get(layer, np.zeros(len(WAYS))) + weights[rows].sum(axis=0)

    def _spending(self, request: Request) -> Spending:
        found = self._by_request.get(request.request_id)
        if found is None:
            credit, spent = request.ledger  # of its home before, which is gone
            found = self._by_request[request.request_id] = Spending(spent=spent)
            self._open[user_of(request)] += 1
            if credit and not request.user:
                self.ledgers.carry(user_of(request), credit, request.budget)
        return found

    def close(
        self, request: Request, bill: dict[str, float], weight: float
    ) -> tuple[dict[str, float], dict[int, NDArray[np.float64]]]:
        """A request has ended: its bill with what stood in for others taken out of what was served here, and what its
        layers' gate weight was served by (empty unless it asked for that).

        weight  all gate weight that was served
        """
        spending = self._by_request.pop(request.request_id, None)
        if spending is None:
            return bill, {}
        user = user_of(request)
        left = self.ledgers.left(user)
        self._open[user] -= 1
        if not self._open[user]:
            del self._open[user]
            if not request.user:
                self.ledgers.forget(user)
            elif len(self.ledgers) > MOST_USERS:
                self.ledgers.forget_oldest(keep=self._open)
        total = weight + spending.dropped
        if total > 0:
            shares = {key: bill[key] * weight / total for key in ("exact_here", "exact_elsewhere")}
            stood_in, late = spending.substituted / total, spending.deferred / total
            bill = bill | {"substituted": stood_in, "deferred": late, "dropped": spending.dropped / total}
            bill["exact_here"] = max(0.0, shares["exact_here"] - stood_in)
            bill["exact_elsewhere"] = max(0.0, shares["exact_elsewhere"] - late)
        bill = bill | {"budget_spent": spending.spent, "budget_left": left}
        return bill, spending.trace if request.trace else {}

    def take_over(self, other: "QualityBooks") -> None:
        """Go on with what another engine's requests have earned and spent."""
        self.ledgers, self._by_request, self._open = other.ledgers, other._by_request, other._open

    def __len__(self) -> int:
        """Requests that have spendings."""
        return len(self._by_request)


def user_of(request: Request) -> str:
    """Whose ledger a request spends from: its user's, else one of its own."""
    return request.user or f"request {request.request_id}"


def traced(weights_of: Mapping[int, NDArray[np.float64]]) -> list[dict[str, Any]]:
    """A trace for people: of each layer the shares of its gate weight [4] by `WAYS`."""
    found = []
    for layer, weights in sorted(weights_of.items()):
        shares = weights / max(float(weights.sum()), 1e-12)
        ways = {way: round(float(share), 6) for way, share in zip(WAYS, shares, strict=True)}
        found.append({"layer": layer} | ways)
    return found
