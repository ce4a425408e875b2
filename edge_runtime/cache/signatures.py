"""Which experts the tokens of each KV block chose, kept beside the block: the sum over a prompt's blocks is its signature.

The gate itself counts, in the row of the block that a token's keys and values go to, and forgets what a block counted
before when its first token is written. So evicted and reused blocks need no care, and a block that is found in the cache
brings the counts of whoever computed it, which are those that its finder would have counted: same tokens after the
same beginning, same choices. It knows blocks and rows; no request's fate, no router, no weights.

A step that did not happen is computed again, and with stages one of them may have counted it and another not. So what a
block counted before its last step is kept beside it: a step that begins where that one began replaces it.

Every row counts in its block, whether it was prefilled or decoded, since a later prompt may contain both. A request's
counts are taken when its prompt has been computed and nothing behind it, so decoded tokens are never among them.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BLOCK_MASK, BLOCK_SHIFT, BLOCK_TOKENS
from edge_runtime.errors import ConfigError
from kernels import backends
from kernels.transfers import on_device, on_host

MAX_BLOCK_TOKENS = 127
"""A token chooses an expert of a layer at most once, so a cell never passes the tokens of a block; it is an int8."""
MAX_PROMPT_TOKENS = 2**15 - 1
"""A request's counts travel as int16."""


def signature_bytes_per_block(num_layers: int, num_experts: int) -> int:
    """Bytes of one block's counts over so many MoE layers."""
    return num_layers * num_experts


class SignatureCache:
    """counts [num_blocks, L, E] int8 for L MoE layers in order, allocated and zeroed once.

    max_rows  most rows of a step
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_experts: int,
        *,
        max_rows: int,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(
                f"KV blocks have {block_tokens} tokens, but a block's expert counts are bytes and hold up to "
                f"{MAX_BLOCK_TOKENS}; use smaller blocks"
            )
        shape, device = (num_blocks, num_layers, num_experts), backends.device()
        cells = num_blocks * num_layers * num_experts
        words = torch.zeros(-(-cells // 4), dtype=torch.int32, device=device)  # a GPU adds to whole words
        self.counts = words.view(torch.int8)[:cells].view(shape)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._most = 2 * max_rows
        self._before: dict[
            int, tuple[int, Tensor]
        ] = {}  # block -> its tokens before its last step, and their counts

    @property
    def nbytes(self) -> int:
        """Bytes of all counts."""
        return self.counts.nbytes

    def begin_step(self, num_rows: int, spans: Iterable[tuple[Sequence[int], int, int]] = ()) -> Tensor:
        """Which of the step's rows count, [T] int32: all do.

        spans  block table, first position and rows of each request, where the step may be computed again
        """
        for table, start, count in spans:
            for block in table[
                (start + BLOCK_MASK) >> BLOCK_SHIFT : (start + count + BLOCK_MASK) >> BLOCK_SHIFT
            ]:
                self._before.pop(block, None)  # it begins anew
            if start & BLOCK_MASK:
                self._go_on(table[start >> BLOCK_SHIFT], start & BLOCK_MASK)
        return self._ones[:num_rows]

    def _go_on(self, block: int, num_tokens: int) -> None:
        """A block that holds so many tokens gets more: for the first time, or once more."""
        known = self._before.pop(block, None)
        if known is not None and known[0] == num_tokens:
            self.counts[block] = known[1]
        self._before[block] = (num_tokens, self.counts[block].clone())
        while len(self._before) > self._most:
            del self._before[next(iter(self._before))]

    def total(self, blocks: Sequence[int]) -> np.ndarray:
        """Counts [L, E] int16 over the blocks of a prompt, once all of it and nothing else is in them.

        Of a prompt of more tokens than an int16 counts, the first so many say which experts it uses. By NumPy, which takes
        0.04 ms for 32 blocks of 48 layers and 128 experts; torch takes 8.
        """
        counted = list(blocks[: MAX_PROMPT_TOKENS // BLOCK_TOKENS])
        rows = self.counts.numpy()[counted] if self.counts.is_cpu else self.read(counted)
        return np.add.reduce(rows, axis=0, dtype=np.int16)

    def copy(self, source: int, target: int) -> None:
        """A block was copied: its counts go along."""
        self.counts[target] = self.counts[source]

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        """Counts [n, L, E] int8 of blocks that are handed on."""
        return on_host(self.counts[torch.tensor(blocks, dtype=torch.int64)]).numpy()

    def write(self, blocks: Sequence[int], counts: np.ndarray) -> None:
        """Blocks came from elsewhere, with counts [n, L, E] int8."""
        self.counts[torch.tensor(blocks, dtype=torch.int64)] = on_device(torch.from_numpy(counts))
