"""grouped_ffn, sliced_ffn and expert_inner in Triton. Defined by kernels.reference.{grouped_ffn,sliced_ffn}.

Three launches: the tile table, gate and up with the activation, down. A program takes one line of the table and a
stretch of outputs; empty lines cost a launch slot and one read. Where pairs run some slices of their experts only, the
neurons of the others become zeros, and gate and up of a stretch that no pair of the tile wants are not read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.product import multiply
from kernels.gpu.quantise import GROUP, SCALE_DTYPE, value_dtype
from kernels.gpu.tile_table import TileTable, tile_table
from kernels.gpu.tiles import (
    INTERPRETED,
    NIBBLE_BLOCK,
    NIBBLE_FORMATS,
    Tile,
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
    masks_ptr,  # [R] int32, bit s for slice s
    inner_ptr,  # [R, F] in order of `pairs`
    x_stride,
    D,
    F,
    slice_width,
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
    HAS_MASKS: tl.constexpr,
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
            D_here = D
            if HAS_MASKS:
                mask = tl.load(masks_ptr + pair, mask=in_rows, other=0)
                wanted = ((mask[:, None] >> (n // slice_width)[None, :]) & 1) * in_n[None, :].to(tl.int32)
                D_here = tl.where(tl.max(tl.max(wanted, axis=1), axis=0) > 0, D, 0)
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
                D_here,
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
            if HAS_MASKS:
                inner = tl.where(wanted != 0, inner, 0.0)
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
    shares_ptr,  # [R] float32, of the bias
    out_ptr,  # [R, D] in the caller's order
    out_stride,
    D,
    F,
    W_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    BIAS_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SLICES: tl.constexpr,
    HAS_SHARES: tl.constexpr,
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
        pair = tl.load(pairs_ptr + first + m, mask=in_rows, other=0).to(tl.int64)
        if HAS_BIAS:  # noqa: SIM102 - this one is known when compiling
            if begin == 0:  # of an expert's slices, one brings the bias
                bias = tl.load(section(address, BIAS_OFFSET, tl.float32) + n, mask=in_n, other=0.0)[None, :]
                if HAS_SHARES:
                    bias = bias * tl.load(shares_ptr + pair, mask=in_rows, other=0.0)[:, None]
                total += bias
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
    if out is None:
        out = torch.empty(len(rows), bank.D, dtype=x.dtype, device=x.device)
    if len(rows):
        inner, table = _inner(x, rows, expert_ids, bank, None, 1, prompt)
        _down(inner, table, bank, None, out, prompt)
        if check:
            bank.check()
    return out


def sliced_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: ExpertBank,
    *,
    out: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """`grouped_ffn` with only the neurons in the slices of masks [R] int32, bit s for slice s of `num_parts` equal ones.

    A row with all slices has the bits of `grouped_ffn`. The bias of down counts by the share of slices.
    """
    if out is None:
        out = torch.empty(len(rows), bank.D, dtype=x.dtype, device=x.device)
    if len(rows):
        inner, table = _inner(x, rows, expert_ids, bank, masks, num_parts, False)
        shares = None
        if bank.layout is not None and bank.layout.has_bias:
            slices = torch.arange(num_parts, dtype=torch.int32, device=masks.device)
            shares = ((masks[:, None] >> slices) & 1).sum(dim=1).float() / num_parts
        _down(inner, table, bank, shares, out, False)
        if check:
            bank.check()
    return out


def expert_inner(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    bank: ExpertBank,
    *,
    out: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """What the neurons of each routed row's expert give, before down: float32 [R, F]. check as in `grouped_ffn`."""
    if out is None:
        out = torch.empty(len(rows), bank.F, dtype=torch.float32, device=x.device)
    if len(rows):
        inner, table = _inner(x, rows, expert_ids, bank, None, 1, False)
        if check:
            bank.check()  # before `pairs` is used: a missing expert has none
        out.index_copy_(0, table.pairs.long(), inner.float())
    return out


def _tiles(bank: ExpertBank, R: int, chip: str, prompt: bool) -> tuple[ExpertLayout, Tile, Tile]:
    """What the experts of a bank look like, and the tiles of gate and up, and of down, for R routed rows."""
    layout = bank.layout
    if layout is None:
        raise IndexError("expert_ids: asks for experts, but no expert is resident in this bank")
    rows_each = R // bank.num_resident  # the bits do not depend on it, the speed does
    pair = layout.activation != "relu"
    shapes = (bank.F, bank.D, pair), (bank.D, bank.F, False)
    first, second = (
        product_tile(chip, rows_each, N, K, layout.format, experts=True, pair=both, prompt=prompt)
        for N, K, both in shapes
    )
    if bank.has_slices and layout.format in NIBBLE_FORMATS:
        second = second._replace(BLOCK_K=NIBBLE_BLOCK)  # a slice may end anywhere between blocks
    assert first.BLOCK_M == second.BLOCK_M
    return layout, first, second


def _constants(layout: ExpertLayout, tile: Tile, name: str, chip: str) -> dict[str, Any]:
    """What both products are told of an expert's layout and of their tile."""
    return {
        **section_offsets(layout, name),
        "HAS_BIAS": layout.has_bias,
        "W_TYPE": ELEMENT[value_dtype(layout.format)],
        "SCALE_TYPE": ELEMENT[SCALE_DTYPE.get(layout.format, torch.float32)],
        "FORMAT": layout.format,
        "GROUP": GROUP,
        "OPERAND": operand_dtype(layout.operand),
        "BLOCK_M": tile.BLOCK_M,
        "BLOCK_N": tile.BLOCK_N,
        "BLOCK_K": tile.BLOCK_K,
        **launch_options(chip, tile.num_warps, tile.num_stages),
    }


def _inner(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    bank: ExpertBank,
    masks: Tensor | None,
    num_parts: int,
    prompt: bool,
) -> tuple[Tensor, TileTable]:
    """The inner activations [R, F] in order of the table's pairs, and the table."""
    chip, R, D, F = target(x.device), len(rows), bank.D, bank.F
    layout, tile, _ = _tiles(bank, R, chip, prompt)
    table = tile_table(expert_ids, bank.addresses, bank.missing, tile.BLOCK_M)
    inner = torch.empty(R, F, dtype=torch.float32 if INTERPRETED else layout.operand, device=x.device)
    inner_kernel[(triton.cdiv(F, tile.BLOCK_N), len(table.tiles))](
        x,
        rows,
        table.pairs,
        table.tiles,
        bank.addresses,
        bank.ranges,
        masks if masks is not None else rows,
        inner,
        x.stride(0),
        D,
        F,
        F // num_parts,
        layout.alpha,
        layout.limit,
        ACTIVATION=layout.activation,
        HAS_MASKS=masks is not None,
        MASK_K=D % tile.BLOCK_K != 0,
        **_constants(layout, tile, "in", chip),
    )
    return inner, table


def _down(
    inner: Tensor, table: TileTable, bank: ExpertBank, shares: Tensor | None, out: Tensor, prompt: bool
) -> None:
    """out [R, D] = down of the inner activations, in the caller's order."""
    chip, (R, F), D = target(inner.device), inner.shape, bank.D
    layout, _, tile = _tiles(bank, R, chip, prompt)
    down_kernel[(triton.cdiv(D, tile.BLOCK_N), len(table.tiles))](
        inner,
        table.pairs,
        table.tiles,
        bank.addresses,
        bank.ranges,
        shares if shares is not None else inner,
        out,
        out.stride(0),
        D,
        F,
        HAS_SLICES=bank.has_slices,
        HAS_SHARES=shares is not None,
        MASK_K=bank.has_slices or F % tile.BLOCK_K != 0,
        **_constants(layout, tile, "out", chip),
    )
