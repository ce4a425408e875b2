"""Which trouble comes follows from the seed alone, and never more of it than a cluster is to bear."""

import random

from hypothesis import given
from hypothesis import strategies as st

from testbed.chaos import (
    KINDS,
    MOST_AT_ONCE,
    Done,
    Record,
    Trouble,
    _longest_pause,
    mixed_entries,
    next_trouble,
)

NODES = ["n1", "n2", "n3", "n4", "n5"]


@given(st.integers(0, 2**31), st.lists(st.sampled_from(NODES), max_size=3, unique=True))
def test_trouble_is_the_seeds_and_comes_to_nodes_that_have_none(seed, busy):
    first, second = (next_trouble(random.Random(seed), NODES, busy) for _ in range(2))
    assert first == second
    if len(busy) >= MOST_AT_ONCE:
        assert first is None
    if first is not None:
        assert first.node in NODES and first.node not in busy and first.kind in KINDS
        assert first.peer != first.node and first.length_s >= 0 and first.pause_s > 0


def test_every_kind_of_trouble_comes():
    source = random.Random(1)
    assert {trouble.kind for _ in range(200) if (trouble := next_trouble(source, NODES, []))} == set(KINDS)


def test_entries_are_of_mixed_length_and_the_same_for_the_same_seed():
    entries = mixed_entries([f"Prompt {number}" for number in range(30)], 1)
    assert entries == mixed_entries([f"Prompt {number}" for number in range(30)], 1)
    assert len({entry.sampling["max_tokens"] for entry in entries}) > 3
    assert len({len(entry.prompt) for entry in entries}) > 1


def test_a_trouble_is_blamed_for_the_longest_wait_that_it_overlaps():
    records = [Record(0, 0.0, [1.0, 2.0, 7.0], 7.5), Record(1, 8.0, [20.0], 21.0)]
    trouble = Trouble("kill", "n1", 1.0, 1.0)
    assert _longest_pause(records, Done(trouble, 3.0, undone_s=4.0, recovered_s=1.0)) == 5.0
    assert _longest_pause(records, Done(trouble, 1.2, undone_s=1.4, recovered_s=0.1)) == 1.0
