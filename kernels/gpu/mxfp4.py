"""MXFP4 as checkpoints hold it (gpt_oss): blocks of 32 values, two E2M1 codes to a byte, one E8M0 scale. Unpack and pack.

Packed weights of this folder keep the codes in another order (`quantise.from_mxfp4`); these two serve whole tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.product import load_scale, unpack_nibble
from kernels.gpu.quantise import GROUP
from kernels.reference.mxfp4 import pack

__all__ = ["pack", "unpack"]

ROWS = 64


@triton.jit(do_not_specialize=["num_groups"])
def unpack_kernel(
    blocks_ptr,  # [num_groups, 16] uint8
    scales_ptr,  # [num_groups] uint8
    out_ptr,  # [num_groups, 32]
    num_groups,
    ROWS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = group < num_groups
    j = tl.arange(0, 32)
    codes = tl.load(blocks_ptr + group[:, None] * 16 + (j // 2)[None, :], mask=mask[:, None], other=0).to(
        tl.int32
    )
    codes = (codes >> ((j % 2) * 4)[None, :]) & 15
    scale = load_scale(scales_ptr, group, mask, "mxfp4")
    value = unpack_nibble(codes, scale[:, None], "mxfp4")
    tl.store(
        out_ptr + group[:, None] * 32 + j[None, :], value.to(out_ptr.dtype.element_ty), mask=mask[:, None]
    )


def unpack(blocks: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """blocks [..., K / 32, 16] uint8, column 2i in the low half of byte i, and scales [..., K / 32] to [..., K]."""
    num_groups = scales.numel()
    out = torch.empty(*scales.shape[:-1], scales.shape[-1] * GROUP, dtype=dtype, device=blocks.device)
    if num_groups:
        unpack_kernel[(triton.cdiv(num_groups, ROWS),)](
            blocks.contiguous(), scales.contiguous(), out, num_groups, ROWS=ROWS
        )
    return out
