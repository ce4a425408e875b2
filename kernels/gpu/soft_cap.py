"""soft_cap in Triton: logits that pass a tanh. Defined by kernels.reference.soft_cap."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def soft_cap_kernel(
    x_ptr,  # [T, N], in place
    N,
    x_stride,
    soft_cap,
    BLOCK: tl.constexpr,
):
    # One program per row and stretch of BLOCK columns.
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = x_ptr + tl.program_id(0).to(tl.int64) * x_stride + columns
    x = tl.load(place, mask=columns < N, other=0.0).to(tl.float32)
    x = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * x / soft_cap) + 1.0))  # tanh
    tl.store(place, x.to(x_ptr.dtype.element_ty), mask=columns < N)


def soft_cap(x: Tensor, cap: float) -> None:
    """x [T, N] becomes cap * tanh(x / cap), in place."""
    T, N = x.shape
    if T:
        soft_cap_kernel[(T, triton.cdiv(N, BLOCK))](x, N, x.stride(0), cap, BLOCK=BLOCK)
