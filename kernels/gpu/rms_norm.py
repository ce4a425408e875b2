"""rms_norm in Triton. Defined by kernels.reference.rms_norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, D]
    weight_ptr,  # [D]
    out_ptr,  # [T, D]
    D,
    x_stride,
    out_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_D: tl.constexpr,  # D up to a power of two: one program holds a row
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    in_row = columns < D
    x = tl.load(x_ptr + token * x_stride + columns, mask=in_row, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    out = x * scale
    if HAS_WEIGHT:
        out *= tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=in_row)


def norm_warps(width: int) -> int:
    """16 values for each thread, up to 16 warps: 8192 columns are 16 values of 512 threads."""
    return min(16, max(1, width // 512))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Rows [T, D] scaled to a mean square of 1, times weight [D] if there is one. Sums in float32."""
    T, D = x.shape
    if out is None:
        out = torch.empty(T, D, dtype=x.dtype, device=x.device)
    BLOCK_D = triton.next_power_of_2(D)
    if T:
        rms_norm_kernel[(T,)](
            x,
            weight if weight is not None else x,
            out,
            D,
            x.stride(0),
            out.stride(0),
            eps,
            HAS_WEIGHT=weight is not None,
            BLOCK_D=BLOCK_D,
            num_warps=norm_warps(BLOCK_D),
        )
    return out
