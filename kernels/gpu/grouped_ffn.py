"""grouped_ffn in Triton. Defined by kernels.reference.grouped_ffn.

Three launches: the tile table, gate and up with the activation, down. A program takes one line of the table and a
stretch of outputs; empty lines cost a launch slot and one read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.product import multiply
from kernels.gpu.quantise import GROUP, SCALE_DTYPE, value_dtype
from kernels.gpu.tile_table import tile_table
from kernels.gpu.tiles import (
    INTERPRETED,
    NIBBLE_BLOCK,
    NIBBLE_FORMATS,
    launch_options,
    operand_dtype,
    product_tile,
    target,
)
from kernels.gpu.weights import ExpertBank, ExpertLayout

ELEMENT = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}


@triton.jit
def activate(first, second, alpha, limit, ACTIVATION: tl.constexpr):
    # `first` is the gate where there is one; both float32.
    if ACTIVATION == "swiglu":
        inner = first / (1.0 + tl.exp(-first)) * second
    elif ACTIVATION == "geglu_tanh":
        # gelu by tanh is x * sigmoid(2 u)
        u = 0.7978845608028654 * (first + 0.044715 * first * first * first)
        inner = first / (1.0 + tl.exp(-2.0 * u)) * second
    elif ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(first, limit)
        up = tl.minimum(tl.maximum(second, -limit), limit)
        inner = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    else:
        inner = tl.maximum(first, 0.0)
    return inner


@triton.jit
def section(address, OFFSET: tl.constexpr, ELEMENT: tl.constexpr):
    # A part of an expert's buffer as a pointer; every part begins on 256 bytes. OFFSET counts elements: added to the
    # address it would be folded, and with it the hint that loads may be whole.
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16) + OFFSET


@triton.jit
def inner_kernel(
    x_ptr,  # [T, D]
    rows_ptr,  # [R] int32
    pairs_ptr,  # [R] int32
    tiles_ptr,  # [max_tiles, 3] int32
    addresses_ptr,  # [E] int64
    ranges_ptr,  # [E, 2] int32
    inner_ptr,  # [R, F] in order of `pairs`
    x_stride,
    D,
    F,
    alpha,
    limit,
    W_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    BIAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    W_TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OPERAND: tl.constexpr,
    MASK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    line = tiles_ptr + tl.program_id(1) * 3
    count = tl.load(line + 2)
    if count > 0:
        expert = tl.load(line)
        first = tl.load(line + 1)
        begin = tl.load(ranges_ptr + expert * 2)
        F_here = tl.load(ranges_ptr + expert * 2 + 1)
        if tl.program_id(0) * BLOCK_N < F_here:
            address = tl.load(addresses_ptr + expert)
            m = tl.arange(0, BLOCK_M)
            in_rows = m < count
            pair = tl.load(pairs_ptr + first + m, mask=in_rows, other=0)
            row = tl.load(rows_ptr + pair, mask=in_rows, other=0).to(tl.int64)
            n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            in_n = n < F_here
            PAIR: tl.constexpr = ACTIVATION != "relu"
            if PAIR:
                N = 2 * F
            else:
                N = F
            one, two = multiply(
                x_ptr,
                row * x_stride,
                in_rows,
                section(address, W_OFFSET, W_TYPE),
                section(address, SCALE_OFFSET, SCALE_TYPE),
                begin + n,
                in_n,
                N,
                D,
                0,
                D,
                F,
                PAIR,
                FORMAT,
                GROUP,
                OPERAND,
                MASK_K,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
            if HAS_BIAS:
                bias = section(address, BIAS_OFFSET, tl.float32) + begin + n
                one += tl.load(bias, mask=in_n, other=0.0)[None, :]
                if PAIR:
                    two += tl.load(bias + F, mask=in_n, other=0.0)[None, :]
            inner = activate(one, two, alpha, limit, ACTIVATION)
            place = (first + m).to(tl.int64)
            tl.store(
                inner_ptr + place[:, None] * F + n[None, :],
                inner.to(inner_ptr.dtype.element_ty),
                mask=in_rows[:, None] & in_n[None, :],
            )


@triton.jit
def down_kernel(
    inner_ptr,  # [R, F] in order of `pairs`
    pairs_ptr,  # [R] int32
    tiles_ptr,  # [max_tiles, 3] int32
    addresses_ptr,  # [E] int64
    ranges_ptr,  # [E, 2] int32
    out_ptr,  # [R, D] in the caller's order
    out_stride,
    D,
    F,
    W_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    BIAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLICES: tl.constexpr,
    W_TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    MASK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    line = tiles_ptr + tl.program_id(1) * 3
    count = tl.load(line + 2)
    if count > 0:
        expert = tl.load(line)
        first = tl.load(line + 1)
        address = tl.load(addresses_ptr + expert)
        if HAS_SLICES:
            begin = tl.multiple_of(tl.load(ranges_ptr + expert * 2), 16)
            F_here = tl.multiple_of(tl.load(ranges_ptr + expert * 2 + 1), 16)
        else:
            begin = 0
            F_here = F
        m = tl.arange(0, BLOCK_M)
        in_rows = m < count
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        in_n = n < D
        total, _ = multiply(
            inner_ptr,
            (first + m).to(tl.int64) * F,
            in_rows,
            section(address, W_OFFSET, W_TYPE),
            section(address, SCALE_OFFSET, SCALE_TYPE),
            n,
            in_n,
            D,
            F,
            begin,
            F_here,
            0,
            False,
            FORMAT,
            GROUP,
            OPERAND,
            MASK_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        if HAS_BIAS:  # noqa: SIM102 - this one is known when compiling
            if begin == 0:  # of an expert's slices, one brings the bias
                total += tl.load(section(address, BIAS_OFFSET, tl.float32) + n, mask=in_n, other=0.0)[None, :]
        pair = tl.load(pairs_ptr + first + m, mask=in_rows, other=0).to(tl.int64)
        tl.store(
            out_ptr + pair[:, None] * out_stride + n[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=in_rows[:, None] & in_n[None, :],
        )


def section_offsets(layout: ExpertLayout, name: str) -> dict[str, int]:
    """Where values, scales and bias of "in" or "out" begin, in elements of each."""
    return {
        "W_OFFSET": layout.first_element(name),
        "SCALE_OFFSET": layout.first_element(f"{name}_scale"),
        "BIAS_OFFSET": layout.first_element(f"{name}_bias"),
    }


def grouped_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    bank: ExpertBank,
    *,
    out: Tensor | None = None,
    prompt: bool = False,
    check: bool = True,
) -> Tensor:
    """Row rows[i] of x [T, D] through expert (or slice) expert_ids[i] of the bank, unweighted: [R, D].

    Id -1 is padding: its row of `out` is left as it is. The inner activations are rounded to the operand's dtype.

    prompt  take the largest tiles; bits may then differ from those of decode rows
    check   wait for the device and raise IndexError for an expert that is not resident. Without it, its rows are left
            as they are and `bank.check` tells later; inside a graph it must be off
    """
    R, D, F = len(rows), bank.D, bank.F
    if out is None:
        out = torch.empty(R, D, dtype=x.dtype, device=x.device)
    if R == 0:
        return out
    layout = bank.layout
    if layout is None:
        raise IndexError(
            f"expert_ids: asks for expert {int(expert_ids[0])}, but no expert is resident in this bank"
        )
    chip = target(x.device)
    rows_each = R // bank.num_resident  # the bits do not depend on it, the speed does
    pair = layout.activation != "relu"
    first = product_tile(chip, rows_each, F, D, layout.format, experts=True, pair=pair, prompt=prompt)
    second = product_tile(chip, rows_each, D, F, layout.format, experts=True, prompt=prompt)
    if bank.has_slices and layout.format in NIBBLE_FORMATS:
        second = second._replace(BLOCK_K=NIBBLE_BLOCK)  # a slice may end anywhere between blocks
    table = tile_table(expert_ids, bank.addresses, bank.missing, first.BLOCK_M)
    assert first.BLOCK_M == second.BLOCK_M
    inner_dtype = torch.float32 if INTERPRETED else layout.operand
    inner = torch.empty(R, F, dtype=inner_dtype, device=x.device)
    constants = {
        "HAS_BIAS": layout.has_bias,
        "W_TYPE": ELEMENT[value_dtype(layout.format)],
        "SCALE_TYPE": ELEMENT[SCALE_DTYPE.get(layout.format, torch.float32)],
        "FORMAT": layout.format,
        "GROUP": GROUP,
        "OPERAND": operand_dtype(layout.operand),
    }
    inner_kernel[(triton.cdiv(F, first.BLOCK_N), len(table.tiles))](
        x,
        rows,
        table.pairs,
        table.tiles,
        bank.addresses,
        bank.ranges,
        inner,
        x.stride(0),
        D,
        F,
        layout.alpha,
        layout.limit,
        **section_offsets(layout, "in"),
        ACTIVATION=layout.activation,
        MASK_K=D % first.BLOCK_K != 0,
        BLOCK_M=first.BLOCK_M,
        BLOCK_N=first.BLOCK_N,
        BLOCK_K=first.BLOCK_K,
        **constants,
        **launch_options(chip, first.num_warps, first.num_stages),
    )
    down_kernel[(triton.cdiv(D, second.BLOCK_N), len(table.tiles))](
        inner,
        table.pairs,
        table.tiles,
        bank.addresses,
        bank.ranges,
        out,
        out.stride(0),
        D,
        F,
        **section_offsets(layout, "out"),
        HAS_SLICES=bank.has_slices,
        MASK_K=bank.has_slices or F % second.BLOCK_K != 0,
        BLOCK_M=second.BLOCK_M,
        BLOCK_N=second.BLOCK_N,
        BLOCK_K=second.BLOCK_K,
        **constants,
        **launch_options(chip, second.num_warps, second.num_stages),
    )
    if check:
        bank.check()
    return out
