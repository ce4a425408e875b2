"""What a step may spend of quality, on its way through stages: to plain numbers, on, and back to the first stage's books.

Pure. What came over the wire is not trusted: at a later stage a number out of range is a Refusal, and the first stage takes
nothing back that it has not given.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from edge_runtime.engine.quality import TracedLayer
from edge_runtime.engine.step_books import WAYS, Choose, StepBooks, TakeLate
from edge_runtime.errors import Refusal
from edge_runtime.protocol import Allowance, LayerTrace
from edge_runtime.selector.account import RowAccount, StepAccount

ROUNDING = 1e-9
FIELDS = Allowance.__struct_fields__


def sent_allowances(books: StepBooks) -> list[Allowance]:
    """The rows that may spend, with what they have spent so far."""
    rows, account = books.spenders, books.account
    columns = (
        account.left,
        account.price,
        account.spent,
        account.deviates,
        *books.weights,
        books.reserved,
        books.dropped_loss,
    )
    return [
        Allowance(row, *numbers)
        for row, numbers in zip(rows.tolist(), np.stack(columns)[:, rows].T.tolist(), strict=True)
    ]


def sent_trace(books: StepBooks) -> list[LayerTrace]:
    """The layers here, for requests that are traced."""
    return [
        LayerTrace(index, layer, tuple(weights.tolist())) for index, layer, weights in books.traced_layers()
    ]


def layers_of(trace: Iterable[LayerTrace]) -> list[TracedLayer]:
    """What `sent_trace` of all stages said."""
    return [(each.slice, each.layer, np.array(each.weights)) for each in trace]


def is_of(trace: Iterable[LayerTrace], traced: Sequence[int]) -> bool:
    """Whether a trace is of these requests of the step, and of numbers."""
    trace = list(trace)
    weights = np.array([each.weights for each in trace]).reshape(-1, len(WAYS))
    return {each.slice for each in trace} <= set(traced) and bool(np.isfinite(weights).all())


def books_at(
    allowances: Sequence[Allowance],
    traced: Sequence[int],
    counts: np.ndarray,
    choose: Choose,
    take_late: TakeLate,
    drag_per_deviation: float,
) -> StepBooks:
    """A step's books as a later stage goes on with them.

    counts  [S] rows of each slice
    """
    num_rows, table = int(counts.sum()), _table(allowances)
    rows = table[:, 0].astype(np.int64)
    if len(rows) and not (rows.max() < num_rows and (np.diff(rows) > 0).all() and np.isfinite(table).all()):
        raise Refusal("shape", f"allowances of {len(rows)} rows came for a step of {num_rows}, or no numbers")
    if max(traced, default=0) >= len(counts):
        raise Refusal("shape", f"slice {max(traced)} is to be traced, and there are {len(counts)}")
    columns = np.zeros((len(FIELDS) - 1, num_rows))
    columns[:, rows] = table[:, 1:].T
    left, price, spent, deviates, *weights, reserved, dropped_loss = columns
    account = RowAccount(left, price, spent, deviates, drag_per_deviation)
    slice_of = np.repeat(np.arange(len(counts)), counts)
    books = StepBooks(account, rows, slice_of, traced, choose, take_late)
    books.weights, books.reserved, books.dropped_loss = np.stack(weights), reserved, dropped_loss
    return books


def taken_back(books: StepBooks, allowances: Sequence[Allowance]) -> bool:
    """Take into the first stage's books what all stages have spent; False, and nothing is taken, if that is not what was
    given.
    """
    account, table, rows = books.account, _table(allowances), books.spenders
    assert isinstance(account, StepAccount), "the step began where the ledgers are"
    if not np.array_equal(table[:, 0], rows) or not np.isfinite(table).all():
        return False
    spent, given = table[:, FIELDS.index("spent")], account.given[rows]
    slack = ROUNDING * given + ROUNDING**2
    if (spent > given + slack).any() or (spent < account.spent[rows] - slack).any():
        return False
    account.spent[rows] = np.minimum(spent, given)
    first = FIELDS.index("substituted")
    books.weights[:, rows] = table[:, first : first + len(books.weights)].T
    books.dropped_loss[rows] = table[:, FIELDS.index("dropped_loss")]
    return True


def _table(allowances: Sequence[Allowance]) -> np.ndarray:
    """[n, F] float64."""
    numbers = [msgspec.structs.astuple(each) for each in allowances]
    return np.array(numbers, dtype=np.float64).reshape(-1, len(FIELDS))
