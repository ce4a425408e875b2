"""combine in Triton. Defined by kernels.reference.combine."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_D = 1024


@triton.jit(do_not_specialize=["R"])
def combine_kernel(
    expert_out_ptr,  # [R, D]
    slots_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    hidden_ptr,  # [T, D]
    R,
    D,
    out_stride,
    hidden_stride,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # One program per token and tile of BLOCK_D columns. The sum starts at 0 and joins the residual when it is finished.
    token = tl.program_id(0).to(tl.int64)  # token * D passes 2**31 on long prompts
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_row = columns < D
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for k in range(K):
        slot = tl.load(slots_ptr + token * K + k).to(tl.int64)
        if (slot >= 0) & (slot < R):  # a pair that did not come costs no read
            weight = tl.load(weights_ptr + token * K + k)
            row = tl.load(expert_out_ptr + slot * out_stride + columns, mask=in_row, other=0.0)
            total += weight * row.to(tl.float32)
    place = hidden_ptr + token * hidden_stride + columns
    before = tl.load(place, mask=in_row, other=0.0).to(tl.float32)
    tl.store(place, (before + total).to(hidden_ptr.dtype.element_ty), mask=in_row)


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    """hidden [T, D] += each token's expert rows, weighted and summed in slot order; slot -1 is skipped."""
    T, K = slots.shape
    D = hidden.shape[1]
    block = min(BLOCK_D, triton.next_power_of_2(D))
    if T:
        combine_kernel[(T, triton.cdiv(D, block))](
            expert_out,
            slots,
            gate_weights,
            hidden,
            len(expert_out),
            D,
            expert_out.stride(0),
            hidden.stride(0),
            K=K,
            BLOCK_D=block,
        )
