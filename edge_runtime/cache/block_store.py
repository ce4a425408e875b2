"""A node's KV blocks by content: read for another node, taken in from one. Blocks taken in are cached and nobody's.

So a handoff leaves nothing to be given back: whoever needs the blocks finds them in the cache, and when memory is
short they go like any cached block. It knows no socket and no request.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.cache.pages import KVPages
from edge_runtime.cache.signatures import SignatureCache


class Blocks(NamedTuple):
    """Content of n blocks: rows [n, floats] float32, counts [n, L * E] int8, checks [n] int64; see KvBlocks."""

    rows: np.ndarray
    counts: np.ndarray
    checks: np.ndarray

    @property
    def is_sound(self) -> bool:
        """Whether nothing was damaged on the way."""
        if not len(self.rows) == len(self.counts) == len(self.checks):
            return False
        return bool((_checks(self.rows, self.counts) == self.checks).all())


@dataclass(frozen=True)
class BlockStore:
    """Blocks of one engine: who holds which, keys and values, and what is counted beside them."""

    pool: BlockPool
    pages: KVPages
    signatures: SignatureCache | None = None

    @property
    def bytes_per_block(self) -> int:
        return self.pages.floats_per_block * 4

    @property
    def _num_counts(self) -> int:
        return self.signatures.counts[0].numel() if self.signatures is not None else 0

    def missing(self, hashes: Sequence[bytes]) -> int:
        """Where the first of these blocks is that cannot be found here; their number if all can. Any thread may ask."""
        return next(
            (place for place, content in enumerate(hashes) if not self.pool.holds(content)), len(hashes)
        )

    def read(self, hashes: Sequence[bytes]) -> Blocks:
        """The leading blocks of these that are here. Any thread may ask, while the engine steps.

        Content never changes while it can be found. A block that was given away while it was read is left out.
        """
        looks = []
        for content in hashes:
            look = self.pool.look(content)
            if look is None:
                break
            looks.append(look)
        blocks = [block for block, _ in looks]
        rows = (
            self.pages.read(blocks).numpy()
            if blocks
            else np.empty((0, self.pages.floats_per_block), np.float32)
        )
        counts = np.empty((len(blocks), 0), np.int8)
        if self.signatures is not None:
            counts = self.signatures.read(blocks).reshape(len(blocks), self._num_counts)
        sound = next(
            (place for place, look in enumerate(looks) if self.pool.look(hashes[place]) != look), len(looks)
        )
        rows, counts = rows[:sound], counts[:sound]
        return Blocks(rows, counts, _checks(rows, counts))

    def take(self, hashes: Sequence[bytes], blocks: Blocks) -> int:
        """Keep blocks that came from elsewhere, as cached ones; how many there was room for. The engine's thread alone.

        Blocks in use are never given up for them, and what is known already stays as it is.
        """
        if not self._fits(blocks):
            return 0
        new = [place for place, content in enumerate(hashes) if not self.pool.holds(content)]
        new = new[: self.pool.num_free]
        if not new:
            return 0
        taken = self.pool.allocate(len(new))
        rows, counts = blocks.rows[new], blocks.counts[new]
        self.pages.write(taken, torch.from_numpy(rows))
        if self.signatures is not None:
            shape = (len(new), *self.signatures.counts.shape[1:])
            self.signatures.write(taken, counts.reshape(shape))
        for place, block in zip(new, taken, strict=True):
            self.pool.register(block, hashes[place])
        self.pool.release(taken)
        return len(new)

    def _fits(self, blocks: Blocks) -> bool:
        """Whether this is what blocks of this engine look like. Counts are needed where this one counts."""
        if blocks.rows.shape[1] != self.pages.floats_per_block:
            return False
        return self.signatures is None or blocks.counts.shape[1] == self._num_counts


def _checks(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.array(
        [
            zlib.crc32(np.ascontiguousarray(count).data, zlib.crc32(np.ascontiguousarray(row).data))
            for row, count in zip(rows, counts, strict=True)
        ],
        dtype=np.int64,
    )
