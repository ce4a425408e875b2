"""Keys of segments: what a batch's budget is, what is kept and what goes, and what is spared."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.engine.graphs import (
    ExpertsKey,
    SegmentTable,
    Span,
    budget_of,
    fitting_budget,
    spans_of,
)

FULL = 16


@dataclass
class Kept:
    key: object
    nbytes: int


def table(**options) -> SegmentTable[Kept, Kept]:
    return SegmentTable(
        lambda rows: Kept(rows, 100 * rows), lambda key: Kept(key, 3 * key.rows * bool(key.budget)), **options
    )


@given(st.lists(st.integers(1, FULL), min_size=1, max_size=40))
def test_a_budget_has_room_for_the_batch_and_less_than_a_slice_per_row_to_spare(slices: Sequence[int]):
    budget = budget_of(slices, FULL)
    if budget == 0:
        assert set(slices) == {FULL}
    else:
        assert sum(slices) <= budget * len(slices) < sum(slices) + len(slices)
        assert budget <= FULL
    assert budget_of([slices[0]] * 7, FULL) in (0, slices[0]), "rows of one tier have that for a budget"


@given(st.integers(0, FULL), st.sets(st.integers(0, FULL)))
def test_a_budget_is_rounded_up_by_one_slice_at_most_and_never_down(budget, kept):
    found = fitting_budget(budget, kept)
    assert budget <= found <= budget + 1
    assert found == budget or (found in kept and budget)


def test_shapes_share_attention_and_segments_are_made_once():
    kept = table()
    first = kept.get(4, 0)
    assert kept.get(4, 9)[0] is first[0] and kept.get(4, 9)[1] is kept.get(4, 9)[1] is not first[1]
    assert kept.get(5, 9)[0] is not first[0]
    assert kept.keys() == ([4, 5], [ExpertsKey(4, 0), ExpertsKey(4, 9), ExpertsKey(5, 9)])
    assert kept.counts().made == 5 and kept.counts().used == 5


def test_of_the_experts_segments_the_longest_unused_goes():
    kept = table(most=2)
    old = kept.get(1, 3)
    kept.get(1, 4)
    assert kept.get(1, 3)[1] is old[1]
    kept.get(1, 5)
    assert kept.keys() == ([1], [ExpertsKey(1, 3), ExpertsKey(1, 5)])
    assert kept.counts().dropped == 1
    assert kept.get(1, 4)[0] is old[0], "attention stays"
    kept.clear()
    assert kept.keys() == ([], [])


def test_long_steps_are_not_kept():
    kept = table(most_rows=8)
    assert kept.get(9, 2)[1].key == ExpertsKey(9, 2)
    assert kept.keys() == ([], []) and kept.counts().made == 0


def test_a_table_may_serve_a_budget_by_the_next_one():
    kept = table(rounds_up=True)
    next_one = kept.get(2, 10)[1]
    assert kept.get(2, 9)[1] is next_one
    assert kept.get(2, 8)[1] is not next_one
    assert kept.get(3, 9)[1] is not next_one, "another shape"
    assert kept.get(2, 0)[1].key.budget == 0, "whole experts are no budget to round"


def test_entries_are_shapes_plus_pairs_and_not_whole_steps():
    kept, shapes, budgets = table(), (1, 2, 4, 8, 16), range(1, FULL + 1)
    for rows, budget in itertools.product(shapes, budgets):
        kept.get(rows, budget % FULL)
    counts = kept.counts()
    assert (counts.attention, counts.experts, counts.whole) == (5, 5 * 16, 5 * 16)
    assert counts.num_bytes == 103 * sum(shapes) + 14 * 3 * sum(shapes)
    assert counts.whole_bytes == 16 * 100 * sum(shapes) + 15 * 3 * sum(shapes)
    assert counts.spared == 1 - counts.num_bytes / counts.whole_bytes > 0.84
    assert table().counts().spared == 0


def test_layers_that_are_here_go_together_and_the_others_alone():
    assert spans_of(2, 8, {2, 3, 6}.__contains__) == [
        Span(2, 4, True),
        Span(4, 5, False),
        Span(5, 6, False),
        Span(6, 7, True),
        Span(7, 8, False),
    ]
    assert spans_of(3, 3, bool) == []


def test_nothing_can_be_kept_in_no_room():
    with pytest.raises(ValueError, match="most: found 0"):
        table(most=0)
