"""The memory behind the blocks: keys and values of the layers that this engine runs.

It knows shapes and bytes; which request owns which block is the pool's business.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BLOCK_TOKENS
from edge_runtime.model.spec import KVShape
from kernels import backends, host_pages
from kernels.transfers import on_device, on_host


def kv_bytes_per_block(shapes: Mapping[int, KVShape], item_bytes: int = 4) -> int:
    """Bytes of one block over these layers: keys and values; shared ones count where they are kept."""
    return sum(
        shape.num_heads * (shape.key_width + shape.value_width) * BLOCK_TOKENS * item_bytes
        for shape in shapes.values()
        if shape.shared_with is None
    )


class KVPages:
    """Keys and values of some layers, allocated once. Layers may differ in shape, and may share with one another.

    k(layer)  [num_blocks, G, P, 16] float32            the 16 tokens of a block are the innermost axis (SIMD lanes)
    v(layer)  [num_blocks, G, 16, value width] float32
    dtype     of a GPU's pages, whose keys are [num_blocks, G, 16, P]; what leaves and comes is float32 and laid out as above

    All `nbytes` are zeroed, and thereby touched, by `touch`, which construction calls unless told otherwise: memory that
    is not there shows at load and never in the middle of an answer, and what a node reports as resident is what it will
    need. For 1024 blocks (16384 tokens) of 6 layers with G = 2, P = 32 that is 48 MiB. Pages that follow others are
    touched when those have been given back, so that no node needs room for both; a GPU's memory is taken at once.

    A block keeps the numbers of its last owner when it changes hands, non-finite ones of a failed request
    included. Readers take positions `<= row_position` only and *select* them; a weight of 0 is not enough, since
    0 * nan is nan.
    """

    def __init__(
        self,
        num_blocks: int,
        shapes: Mapping[int, KVShape],
        dtype: torch.dtype = torch.float32,
        *,
        touched: bool = True,
    ) -> None:
        if num_blocks < 1 or not shapes:
            raise ValueError(f"no pages for {num_blocks} blocks of {len(shapes)} layers")
        self.num_blocks = num_blocks
        self.nbytes = num_blocks * kv_bytes_per_block(shapes, dtype.itemsize)
        """Bytes allocated, all of them resident once touched."""
        own = {layer: shape for layer, shape in shapes.items() if shape.shared_with is None}
        memory = torch.empty(
            self.nbytes // dtype.itemsize, dtype=dtype, device=backends.device()
        )  # one piece
        self._memory, self._is_touched = memory, False
        if touched or memory.device.type != "cpu":
            self.touch()
        self._is_turned = not backends.keys_end_in_tokens()
        pages: dict[int, tuple[Tensor, Tensor]] = {}
        at = 0
        for layer, shape in own.items():
            parts = []
            for width, tail in (
                (
                    shape.key_width,
                    (BLOCK_TOKENS, shape.key_width) if self._is_turned else (shape.key_width, BLOCK_TOKENS),
                ),
                (shape.value_width, (BLOCK_TOKENS, shape.value_width)),
            ):
                count = num_blocks * shape.num_heads * width * BLOCK_TOKENS
                parts.append(memory[at : at + count].view(num_blocks, shape.num_heads, *tail))
                at += count
            pages[layer] = (parts[0], parts[1])
        for layer, shape in shapes.items():
            if shape.shared_with is not None:
                if shape.shared_with not in pages:
                    raise ValueError(
                        f"layer {layer} uses keys and values of layer {shape.shared_with}, which is not among "
                        f"layers {min(shapes)} to {max(shapes)}; a stage must hold both"
                    )
                pages[layer] = pages[shape.shared_with]
        self._pages = pages
        self._own = [page for layer in own for page in pages[layer]]
        self._floats_per_block = kv_bytes_per_block(shapes) // 4

    def touch(self) -> None:
        """Zero everything, once. zero_ and not zeros, which may leave the pages to be mapped when they are first written."""
        if not self._is_touched:
            self._memory.zero_()
            self._is_touched = True

    def give_back(self) -> None:
        """Let the system have the memory: nothing is written any more, and what is read is nothing. See `host_pages`."""
        host_pages.drop_tensor(self._memory)

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, by its number in the model."""
        return self._of(layer)[0]

    def v(self, layer: int) -> Tensor:
        """Values of a layer, by its number in the model."""
        return self._of(layer)[1]

    @property
    def floats_per_block(self) -> int:
        """Numbers of one block over all layers."""
        return self._floats_per_block

    def read(self, blocks: Sequence[int]) -> Tensor:
        """[n, floats of a block] float32, a copy: of each layer that keeps any in order, keys, then values."""
        table = torch.tensor(blocks, dtype=torch.int64)
        if not self._is_turned:
            return torch.cat([page[table].flatten(1) for page in self._own], dim=1)
        parts = [page[table] for page in self._own]
        parts[::2] = [keys.transpose(2, 3) for keys in parts[::2]]
        return on_host(torch.cat([part.flatten(1) for part in parts], dim=1).float())

    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """Put what `read` gave, here or on another node, into these blocks."""
        table = torch.tensor(blocks, dtype=torch.int64)
        at, rows = 0, on_device(rows)
        for index, page in enumerate(self._own):
            size, shape = page[0].numel(), page.shape[1:]
            part = rows[:, at : at + size]
            if self._is_turned and index % 2 == 0:
                part = part.unflatten(1, (shape[0], shape[2], shape[1])).transpose(2, 3)
            page[table] = part.reshape(len(blocks), *shape).to(page.dtype)
            at += size

    def _of(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer not in self._pages:
            first, last = min(self._pages), max(self._pages)
            raise IndexError(f"layer {layer} is not in [{first}, {last + 1})")
        return self._pages[layer]
