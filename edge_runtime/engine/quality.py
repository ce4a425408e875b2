"""The quality side of an engine's requests: who may spend what in a step, what was spent, and what goes on the bill for it.

Rows of a prompt are never touched: what is computed wrong there stays in the KV. Knows ledgers and prices. Several steps
may be under way, with stages: what one of them may spend is held for it until it is back.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request
from edge_runtime.engine.step_books import WAYS, Choose, StepBooks, TakeLate, nothing_late
from edge_runtime.selector.account import StepAccount
from edge_runtime.selector.budget import Ledgers, Prices

TracedLayer = tuple[int, int, NDArray[np.float64]]
MOST_USERS = 4096  # ledgers that are kept of users who have no request here; the oldest goes first
FIRST_RESERVE = 1e9  # more than anybody has


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

    choose, take_late  see `StepBooks`
    start_price  see `Prices`; asked when a budget is first used
    drag         loss for each unit of deviation, and each unit that a row deviated in the layers before; see `Losses`
    """

    def __init__(
        self,
        choose: Choose,
        start_price: Callable[[], float],
        take_late: TakeLate = nothing_late,
        drag: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.ledgers = Ledgers()
        self._choose, self._start_price, self._take_late, self._drag = choose, start_price, take_late, drag
        self._prices: Prices | None = None
        self._by_request: dict[str, Spending] = {}
        self._open: Counter[str] = Counter()  # named user -> requests that have spendings here

    def begin_step(self, plan: StepPlan) -> StepBooks | None:
        """Find out who may spend what; None where nobody may, and nobody looks. `end_step` or `give_up` must follow."""
        slices = plan.slices
        traced = [index for index, piece in enumerate(slices) if piece.request.trace]
        if not traced and not any(piece.request.budget and piece.count == 1 for piece in slices):
            return None
        users, budgets = [""] * plan.num_rows, [0.0] * plan.num_rows
        row = 0
        for piece in slices:
            request = piece.request
            if (
                request.budget
                and piece.count == 1
                and piece.samples
                and piece.start >= len(request.prompt_ids)
            ):
                users[row], budgets[row] = user_of(request), request.budget
                self._spending(request)
            row += piece.count
        if self._prices is None:
            self._prices = Prices(self._start_price())
        books = StepBooks(
            StepAccount(self.ledgers, self._prices, users, budgets, self._drag()),
            np.flatnonzero(budgets),
            np.repeat(np.arange(len(slices)), [piece.count for piece in slices]),
            traced,
            self._choose,
            self._take_late,
        )
        books.reserved = np.array([self._reserve_of(piece.request) for piece in slices])[books.slice_of]
        return books

    @property
    def start_price(self) -> float:
        """What a unit of loss is worth before any was spent, as far as that is known; see `Prices`."""
        return self._prices.start if self._prices is not None else 0.0

    def learn_start_price(self, start_price: float) -> None:
        """What a stage knows, where this node has all its experts and so does not; see `Prices`."""
        if self._prices is not None:
            self._prices.begin_at(start_price)

    def give_up(self, step: StepBooks) -> None:
        """The step did not happen."""
        _own(step).give_up()

    def end_step(self, plan: StepPlan, step: StepBooks, traced: Iterable[TracedLayer] | None = None) -> None:
        """The step is done: tokens earn, and what was spent is booked. Requests that ended meanwhile have no bill any more.

        traced  as in `StepBooks.traced_layers`, of all stages; None for those of the step itself
        """
        for index, layer, weights in step.traced_layers() if traced is None else traced:
            request = plan.slices[index].request
            if request.trace and request.state == "running":
                table = self._spending(request).trace
                table[layer] = table.get(layer, np.zeros(len(WAYS))) + weights
        spent = _own(step).book()
        for row in step.spenders.tolist():
            request = plan.slices[step.slice_of[row]].request
            if request.state != "running":
                continue
            spending = self._spending(request)
            spending.substituted += float(step.weights[0, row])
            spending.deferred += float(step.weights[1, row])
            spending.dropped += float(step.weights[2, row])
            spending.spent += float(spent[row])
            spending.last_dropped = float(step.dropped_loss[row])
            request.ledger = (0.0 if request.user else self.ledgers.left(user_of(request)), spending.spent)

    def _reserve_of(self, request: Request) -> float:
        """What a token of a request is expected to lose by its tier: as the last one did. The first may use no stand-in."""
        if not request.tier or not request.budget:
            return 0.0
        known = self._by_request.get(request.request_id)
        return FIRST_RESERVE if known is None or known.last_dropped is None else known.last_dropped

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


def _own(step: StepBooks) -> StepAccount:
    assert isinstance(step.account, StepAccount), "the step began where the ledgers are"
    return step.account


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
