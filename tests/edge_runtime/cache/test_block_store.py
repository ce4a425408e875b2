"""Blocks that go from node to node by content."""

import numpy as np
import pytest

from edge_runtime.cache.block_store import Blocks, BlockStore
from edge_runtime.cache.pages import KVPages
from tests.support.block_stores import NAMES, SHAPES, filled, store


def test_what_is_read_here_is_what_is_taken_there_bit_for_bit():
    source, target = filled(NAMES[:4]), store()
    blocks = source.read(NAMES[:4])
    assert blocks.is_sound and len(blocks.rows) == 4
    assert target.take(NAMES[:4], blocks) == 4
    again = target.read(NAMES[:4])
    assert (again.rows == blocks.rows).all() and (again.counts == blocks.counts).all()
    assert blocks.rows.nbytes == 4 * source.bytes_per_block
    target.pool.check([])
    assert target.pool.num_free == 6, "blocks that were handed on belong to nobody"


def test_reading_ends_where_a_block_is_missing():
    source = filled(NAMES[:2])
    assert len(source.read([*NAMES[:2], NAMES[5], NAMES[1]]).rows) == 2
    assert len(source.read([NAMES[5], NAMES[0]]).rows) == 0
    assert source.missing(NAMES[:3]) == 2 and source.missing(NAMES[:2]) == 2


def test_what_is_known_already_stays_as_it_is():
    source, target = filled(NAMES[:3]), filled(NAMES[:2], seed=7)
    before = target.read(NAMES[:2])
    assert target.take(NAMES[:3], source.read(NAMES[:3])) == 1
    assert (target.read(NAMES[:2]).rows == before.rows).all()
    assert (target.read(NAMES[:3]).rows[2] == source.read(NAMES[:3]).rows[2]).all()


def test_blocks_in_use_are_never_given_up_for_what_comes():
    source, target = filled(NAMES[:4]), store(3)
    used = target.pool.allocate(2)
    assert target.take(NAMES[:4], source.read(NAMES[:4])) == 1
    target.pool.check([used])
    assert target.missing(NAMES[:4]) == 1


def test_damage_is_noticed():
    blocks = filled(NAMES[:2]).read(NAMES[:2])
    rows = blocks.rows.copy()
    rows[1, 3] += 1
    counts = blocks.counts.copy()
    counts[0, 0] ^= 1
    assert not blocks._replace(rows=rows).is_sound
    assert not blocks._replace(counts=counts).is_sound
    assert not blocks._replace(checks=blocks.checks[:1]).is_sound


@pytest.mark.parametrize(
    "blocks",
    [
        Blocks(np.zeros((1, 3), np.float32), np.zeros((1, 10), np.int8), np.zeros(1, np.int64)),
        Blocks(np.zeros((1, 480), np.float32), np.zeros((1, 0), np.int8), np.zeros(1, np.int64)),
    ],
)
def test_blocks_of_another_shape_or_without_needed_counts_are_not_taken(blocks):
    target = store()
    assert target.pages.floats_per_block == 480
    assert target.take(NAMES[:1], blocks) == 0
    assert target.pool.num_cached == 0


def test_a_node_that_does_not_count_takes_blocks_with_counts_and_hands_on_none():
    target = store(counts=False)
    assert target.take(NAMES[:1], filled(NAMES[:1]).read(NAMES[:1])) == 1
    assert target.read(NAMES[:1]).counts.shape == (1, 0)


def test_a_block_that_changes_hands_while_it_is_read_is_left_out():
    source = filled(NAMES[:3], num_blocks=3)

    class GivenAway(KVPages):
        def read(self, blocks):
            source.pool.allocate(1)  # the one that was released first, meanwhile
            return super().read(blocks)

    pages = GivenAway(3, SHAPES)
    reading = BlockStore(source.pool, pages, source.signatures)
    assert len(reading.read(NAMES[:3]).rows) == 2
    assert not source.pool.holds(NAMES[2])
