"""kv_write and kv_copy in plain torch. Defined by kernels.reference.kv_blocks."""

import torch
from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    at = slots.long()
    if (
        not torch.compiler.is_compiling()
        and len(at)
        and not 0 <= int(at.min()) <= int(at.max()) < len(k_pages) * 16
    ):
        raise ValueError(f"slots: found {at.tolist()}, expected 0 to {len(k_pages) * 16 - 1}")
    block, offset = at // 16, at % 16
    k_pages[block, :, :, offset] = k
    v_pages[block, :, offset] = v


def kv_copy(pages: Tensor, source: Tensor, destination: Tensor) -> None:
    for name, blocks in (("source", source), ("destination", destination)):
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < len(pages):
            raise ValueError(f"{name}: found {blocks.tolist()}, expected 0 to {len(pages) - 1}")
    pages.index_copy_(0, destination.long(), pages.index_select(0, source.long()))
