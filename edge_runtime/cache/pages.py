"""The memory behind the blocks: keys and values of the layers that this engine runs.

It knows shapes and bytes; which request owns which block is the pool's business.
"""

import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BLOCK_TOKENS


def kv_bytes_per_block(num_layers: int, num_kv_heads: int, head_width: int) -> int:
    """Bytes of one block over `num_layers` layers: keys and values, float32."""
    return 2 * num_layers * num_kv_heads * head_width * BLOCK_TOKENS * 4


class KVPages:
    """Keys and values of layers `[first_layer, last_layer)`, allocated once.

    k(layer)  [num_blocks, G, P, 16] float32  the 16 tokens of a block are the innermost axis (SIMD lanes)
    v(layer)  [num_blocks, G, 16, P] float32

    All `nbytes` are zeroed, and thereby touched, on construction: memory that is not there shows at load and
    never in the middle of an answer, and what a node reports as resident is what it will need. For 1024 blocks
    (16384 tokens) of 6 layers with G = 2, P = 32 that is 48 MiB.

    A block keeps the numbers of its last owner when it changes hands, non-finite ones of a failed request
    included. Readers take positions `<= row_position` only and *select* them; a weight of 0 is not enough, since
    0 * nan is nan.
    """

    def __init__(
        self, num_blocks: int, *, num_kv_heads: int, head_width: int, first_layer: int, last_layer: int
    ) -> None:
        if num_blocks < 1 or last_layer <= first_layer:
            raise ValueError(f"no pages for {num_blocks} blocks of layers [{first_layer}, {last_layer})")
        self.num_blocks = num_blocks
        self.first_layer = first_layer
        self.last_layer = last_layer
        num_layers = last_layer - first_layer
        # empty + zero_ and not zeros, which may leave the pages to be mapped at first touch.
        shape = (num_layers, num_blocks, num_kv_heads)
        self._k = torch.empty((*shape, head_width, BLOCK_TOKENS), dtype=torch.float32).zero_()
        self._v = torch.empty((*shape, BLOCK_TOKENS, head_width), dtype=torch.float32).zero_()
        self._k_layers = list(self._k.unbind(0))
        self._v_layers = list(self._v.unbind(0))

    @property
    def nbytes(self) -> int:
        """Bytes allocated, all of them resident."""
        return int(self._k.nbytes + self._v.nbytes)

    def k(self, layer: int) -> Tensor:
        """Keys of a layer, by its number in the model."""
        return self._k_layers[self._index(layer)]

    def v(self, layer: int) -> Tensor:
        """Values of a layer, by its number in the model."""
        return self._v_layers[self._index(layer)]

    def _index(self, layer: int) -> int:
        if not self.first_layer <= layer < self.last_layer:
            raise IndexError(f"layer {layer} is not in [{self.first_layer}, {self.last_layer})")
        return layer - self.first_layer
