"""Hand out fixed-size blocks of KV memory, count who uses them, and remember what the unused ones still hold.

It deals in block numbers and content hashes only: it knows no tensors, no requests, and not how a hash comes
about (see `prefix.py`). There is no copy-on-write: only full blocks are ever shared, and nobody writes into a
full block; the block that a request is still filling belongs to that request alone. One that its request left unfilled
may be cached as well, until somebody adopts it to write on.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 16
"""Tokens per block. The page layouts and the attention kernels have these 16 as their lanes."""

BLOCK_SHIFT = 4
"""`position >> BLOCK_SHIFT` is the index into a block table."""

BLOCK_MASK = BLOCK_TOKENS - 1
"""`position & BLOCK_MASK` is the offset inside a block."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return (num_tokens + BLOCK_MASK) >> BLOCK_SHIFT


class BlockPool:
    """A fixed number of blocks, each either free or referenced by one or more users.

    A free block may still be cached: its content stays findable under its hash until the block is given away
    again. Free blocks are given away in this order: first those that hold nothing findable, then the cached
    ones, least recently released first. All operations are O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_hits = 0  # cached blocks taken up again
        self.num_evictions = 0  # cached blocks whose content was given up for a new user
        self._references = [0] * num_blocks
        self._given = [0] * num_blocks  # how often each block was given to a new user
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # An OrderedDict is a hash table over a linked list: O(1) at both ends and in the middle.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # front: next to go

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, the cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by hash, in use or free."""
        return len(self._block_of)

    def references(self, block: int) -> int:
        """How many users hold the block; 0 if it is free."""
        return self._references[block]

    def hash_of(self, block: int) -> bytes | None:
        """The hash under which the block is found, None if it is not."""
        return self._hash_of[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks for one user each; what was cached in them is forgotten.

        The caller looks at `num_free` first: asking for more is a fault of the program.
        """
        assert count <= len(self._free), f"asked for {count} blocks of {len(self._free)} free ones"
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._hash_of[block] is not None:
                self.forget(block)
                self.num_evictions += 1
            self._references[block] = 1
            self._given[block] += 1
            blocks.append(block)
        return blocks

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The cached blocks of the longest known prefix of `hashes`, at most `limit`. Takes no reference."""
        blocks: list[int] = []
        block_of = self._block_of
        for content_hash in hashes[:limit]:
            block = block_of.get(content_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, content_hash: bytes) -> bool:
        """Whether that content can be found now. Any thread may ask."""
        return content_hash in self._block_of

    def look(self, content_hash: bytes) -> tuple[int, int] | None:
        """Where that content is, and the block's generation; None if it cannot be found. Any thread may ask.

        It is still there after it was read if a second look gives the same.
        """
        block = self._block_of.get(content_hash)
        return None if block is None else (block, self._given[block])

    def adopt(self, content_hash: bytes) -> int | None:
        """Take a cached block that nobody uses for one user, who will write on in it: nobody else finds it any more.

        None if that content is not there, or in use.
        """
        block = self._block_of.get(content_hash)
        if block is None or self._references[block]:
            return None
        del self._block_of[content_hash], self._free[block]
        self._hash_of[block] = None
        self._references[block] = 1
        self._given[block] += 1
        self.num_hits += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block, which must be cached; free ones leave the free list."""
        for block in blocks:
            assert self._hash_of[block] is not None, f"block {block} is not cached, so it cannot be shared"
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
            self.num_hits += 1

    def register(self, block: int, content_hash: bytes) -> None:
        """Make a block in use findable. Its content is computed and never changes while it is in use.

        If another block already holds the same content, that one stays the findable one.
        """
        assert self._references[block] > 0, f"block {block} is free, so it holds nothing to register"
        assert self._hash_of[block] is None, f"block {block} is registered already"
        if self._block_of.setdefault(content_hash, block) == block:
            self._hash_of[block] = content_hash

    def forget(self, block: int) -> None:
        """Make the block's content unfindable; its users keep it. Nothing happens if it was not findable."""
        content_hash = self._hash_of[block]
        if content_hash is not None:
            del self._block_of[content_hash]
            self._hash_of[block] = None
            if self._references[block] == 0 and block in self._free:
                self._free.move_to_end(block, last=False)

    def forget_all(self) -> None:
        """Make every block's content unfindable."""
        for block in list(self._block_of.values()):
            self.forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Take one user from each block of a table, given in the order of its tokens.

        The last block is released first, so that a prefix outlives what was built upon it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than taken"
            if self._references[block] == 0:
                self._free[block] = None
                if self._hash_of[block] is None:
                    self._free.move_to_end(block, last=False)

    def check(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Assert what must always hold; with `tables`, also that exactly these hold the references."""
        for block, count in enumerate(self._references):
            assert count >= 0, f"block {block} has {count} references"
            assert (count == 0) == (block in self._free), (
                f"block {block}: {count} references, free list disagrees"
            )
        assert len(self._free) <= self.num_blocks
        for content_hash, block in self._block_of.items():
            assert self._hash_of[block] == content_hash, f"block {block} is found under a hash not its own"
        hashed = sum(content_hash is not None for content_hash in self._hash_of)
        assert hashed == len(self._block_of), (
            f"{hashed} blocks carry a hash, {len(self._block_of)} are findable"
        )
        cached_seen = False
        for block in self._free:
            cached = self._hash_of[block] is not None
            assert cached or not cached_seen, f"block {block} holds nothing but waits behind cached ones"
            cached_seen = cached_seen or cached
        if tables is not None:
            held = Counter(block for table in tables for block in table)
            for block, count in enumerate(self._references):
                assert held[block] == count, (
                    f"block {block}: {count} references, held by {held[block]} tables"
                )
