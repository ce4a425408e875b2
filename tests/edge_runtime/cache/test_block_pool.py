"""The block pool: who holds a block, which free one goes next, and what can still be found in it."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_runtime.cache.block_pool import BlockPool, blocks_for


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Blocks allocated, registered under the given names and released, oldest first."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.register(block, name(number))
        pool.release([block])
    return blocks


def test_tokens_are_rounded_up_to_blocks():
    assert [blocks_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="at least 1 block, not 0"):
        BlockPool(0)


def test_more_than_the_free_blocks_is_a_fault_of_the_program():
    with pytest.raises(AssertionError, match="asked for 3 blocks of 2"):
        BlockPool(2).allocate(3)


def test_a_released_block_is_found_by_its_hash_until_it_is_given_away():
    pool = BlockPool(2)
    [block, _] = cached(pool, 1, 2)
    assert pool.match([name(1)], 1) == [block]
    pool.allocate(1)
    assert pool.match([name(1)], 1) == []
    assert pool.match([name(2)], 1) != []
    assert pool.num_evictions == 1
    pool.check([[block]])


def test_blocks_that_hold_nothing_go_before_cached_ones():
    pool = BlockPool(3)
    first, second = cached(pool, 1, 2)
    empty = ({0, 1, 2} - {first, second}).pop()
    assert pool.allocate(3) == [empty, first, second]


def test_the_cached_block_released_longest_ago_goes_first():
    pool = BlockPool(3)
    blocks = cached(pool, 1, 2, 3)
    pool.share([blocks[0]])
    pool.release([blocks[0]])  # now the latest
    assert pool.allocate(3) == [blocks[1], blocks[2], blocks[0]]


def test_the_end_of_a_prefix_goes_before_its_beginning():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.register(block, name(number))
    pool.release(blocks)
    assert pool.allocate(3) == blocks[::-1]


def test_a_shared_block_stays_until_its_last_user_goes():
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.register(block, name(1))
    pool.share([block])
    pool.release([block])
    assert (pool.num_free, pool.references(block), pool.num_hits) == (0, 1, 1)
    pool.release([block])
    assert pool.num_free == 1


def test_releasing_a_free_block_is_a_fault_of_the_program():
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release([0])


def test_of_two_blocks_with_one_content_the_first_stays_the_findable_one():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, name(1))
    pool.register(second, name(1))
    assert pool.match([name(1)], 1) == [first]
    pool.release([first, second])
    pool.check([])
    assert pool.allocate(1) == [second]


def test_match_stops_at_the_first_unknown_hash_and_at_the_limit():
    pool = BlockPool(4)
    blocks = cached(pool, 1, 2, 4)
    assert pool.match([name(1), name(2), name(3), name(4)], 4) == blocks[:2]
    assert pool.match([name(1), name(2)], 1) == blocks[:1]
    assert pool.match([], 4) == []


def test_a_forgotten_block_is_not_found_and_goes_next():
    pool = BlockPool(2)
    first, second = cached(pool, 1, 2)
    pool.forget(second)
    pool.forget(second)
    pool.check([])
    assert pool.match([name(2)], 1) == []
    assert pool.allocate(2) == [second, first]
    assert pool.num_evictions == 1


def test_check_finds_a_lost_reference():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="held by 0 tables"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Users take, share, register, forget and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[list[int]] = []
        self.content: dict[int, int] = {}  # what was last registered in a block and not overwritten
        self.names = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            table = self.pool.allocate(count)
            assert len(set(table)) == count
            for block in table:
                assert all(block not in other for other in self.tables)
                self.content.pop(block, None)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), again=st.booleans())
    def register(self, data: st.DataObject, again: bool) -> None:
        table = data.draw(st.sampled_from(self.tables))
        for block in table:
            if self.pool.hash_of(block) is None:
                self.names += not again
                self.pool.register(block, name(self.names))
                if self.pool.hash_of(block) is not None:
                    self.content[block] = self.names

    @rule(number=st.integers(0, 30))
    def share(self, number: int) -> None:
        table = self.pool.match([name(number)], 1)
        if table:
            assert self.content[table[0]] == number
            self.pool.share(table)
            self.tables.append(table)

    @rule(block=st.integers(0, 6))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.content.pop(block, None)

    @invariant()
    def holds(self) -> None:
        self.pool.check(self.tables)

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        assert self.pool.num_free == 7
        self.pool.check([])


TestAnyOrderOfUse = PoolMachine.TestCase
TestAnyOrderOfUse.settings = settings(stateful_step_count=40)
