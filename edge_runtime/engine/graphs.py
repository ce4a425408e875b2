"""A step in segments that are kept ready: attention under the shape of the batch, experts under shape and budget.

A whole step kept ready for S shapes and K budgets needs S x K of everything. Only the experts depend on the budget, so cut
between attention and experts S + S x K are enough, and those that are many are small (MoE-Prism, "segmented graphs"). What a
segment is depends on the kernels that serve: buffers and a prepared call (`prepared`), or recorded work, which is a captured
graph on a GPU (`captured`). This file knows keys, not what is under them.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

MOST_BUDGETED = 256
"""Segments of experts that are kept: 16 budgets at 16 shapes."""


class Segment(Protocol):
    """Anything that is kept ready."""

    @property
    def nbytes(self) -> int:
        """Bytes it keeps for itself."""


class ExpertsKey(NamedTuple):
    """Under what a segment of experts is kept: rows of the step, and slices per row that it has room for (0: whole experts)."""

    rows: int
    budget: int


class SegmentCounts(NamedTuple):
    """What is kept, and what it spares.

    attention, experts  entries
    num_bytes           of all entries
    whole, whole_bytes  entries and bytes, were each (shape, budget) that is kept a whole step of its own
    made, dropped, used since the start: segments made, dropped to make room, and steps that ran on them
    """

    attention: int
    experts: int
    num_bytes: int
    whole: int
    whole_bytes: int
    made: int
    dropped: int
    used: int

    @property
    def spared(self) -> float:
        """Share of the bytes of whole steps that segments do without."""
        return 1 - self.num_bytes / self.whole_bytes if self.whole_bytes else 0.0


def budget_of(slices: Sequence[int], full: int) -> int:
    """The budget whose segment runs rows that want so many slices each; 0 where all want all `full` of them.

    Rows run what they ask for and no more: a segment is room for a batch's slices, however they are spread. The room is a
    whole number of slices per row, so less than one per row stays empty, and no row is ever run below what it asks for.
    """
    if not slices or min(slices) >= full:
        return 0
    return min(full, math.ceil(sum(min(count, full) for count in slices) / len(slices)))


def fitting_budget(budget: int, kept: Iterable[int]) -> int:
    """The kept budget that may serve in place of `budget`: itself, or the next whole slice above it; else itself."""
    return budget + 1 if budget and budget not in kept and budget + 1 in kept else budget


A = TypeVar("A", bound=Segment)
E = TypeVar("E", bound=Segment)


class SegmentTable(Generic[A, E]):
    """Segments by key, made when first asked for. Those of experts beyond `most` go, the longest unused first.

    make_attention  rows -> segment
    make_experts    key -> segment
    most_rows       segments of more rows are made for their step alone; None: all are kept
    rounds_up       a segment of one slice per row more may serve: worth it where making one is dear
    """

    def __init__(
        self,
        make_attention: Callable[[int], A],
        make_experts: Callable[[ExpertsKey], E],
        *,
        most: int = MOST_BUDGETED,
        most_rows: int | None = None,
        rounds_up: bool = False,
    ) -> None:
        if most < 1:
            raise ValueError(f"most: found {most}, expected at least 1 segment of experts")
        self._make_attention, self._make_experts = make_attention, make_experts
        self._most, self._most_rows, self._rounds_up = most, most_rows, rounds_up
        self._attention: dict[int, A] = {}
        self._experts: OrderedDict[ExpertsKey, E] = OrderedDict()
        self._made = self._dropped = self._used = 0

    def get(self, rows: int, budget: int) -> tuple[A, E]:
        """The segments of a step."""
        self._used += 1
        if self._most_rows is not None and rows > self._most_rows:
            return self._make_attention(rows), self._make_experts(ExpertsKey(rows, budget))
        attention = self._attention.get(rows)
        if attention is None:
            attention = self._attention[rows] = self._make_attention(rows)
            self._made += 1
        if self._rounds_up:
            budget = fitting_budget(budget, [key.budget for key in self._experts if key.rows == rows])
        key = ExpertsKey(rows, budget)
        experts = self._experts.get(key)
        if experts is None:
            experts = self._experts[key] = self._make_experts(key)
            self._made += 1
            if len(self._experts) > self._most:
                self._experts.popitem(last=False)
                self._dropped += 1
        else:
            self._experts.move_to_end(key)
        return attention, experts

    def keys(self) -> tuple[list[int], list[ExpertsKey]]:
        """What is kept: shapes, and shapes with budgets, the longest unused first."""
        return list(self._attention), list(self._experts)

    def clear(self) -> None:
        """Keep nothing: what segments were made of has changed."""
        self._attention.clear()
        self._experts.clear()

    def counts(self) -> SegmentCounts:
        """See SegmentCounts. May be asked while another thread uses the table."""
        attention = {rows: segment.nbytes for rows, segment in list(self._attention.items())}
        experts = {
            key: segment.nbytes for key, segment in list(self._experts.items()) if key.rows in attention
        }
        return SegmentCounts(
            attention=len(attention),
            experts=len(experts),
            num_bytes=sum(attention.values()) + sum(experts.values()),
            whole=len(experts),
            whole_bytes=sum(attention[key.rows] + nbytes for key, nbytes in experts.items()),
            made=self._made,
            dropped=self._dropped,
            used=self._used,
        )


class Span(NamedTuple):
    """Layers [first, last) of which nothing is asked of other nodes, or one layer that may."""

    first: int
    last: int
    is_here: bool


def spans_of(first: int, last: int, is_here: Callable[[int], bool]) -> list[Span]:
    """Cut layers [first, last) where a call to another node may come between: neighbours that are here go together."""
    spans: list[Span] = []
    for layer in range(first, last):
        here = is_here(layer)
        if here and spans and spans[-1].is_here:
            spans[-1] = spans[-1]._replace(last=layer + 1)
        else:
            spans.append(Span(layer, layer + 1, here))
    return spans
