"""paged_attention and biased_attention in Triton. Defined by kernels.reference.paged_attention, over the pages of
`kernels.gpu.kv_blocks`.

One kernel serves all phases: a tile is a few rows of one request times the query heads of one kv head. Without a plan,
positions are cut into pieces of SPLIT_TOKENS, which a second kernel merges in order, and rows beside one another that are
of one request share a tile: 16 heads and rows, the same program for one row and for many, so a row's bits are always the
same. With a plan, runs of prompt rows take larger tiles and walk all positions at once, with bits of their own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.tiles import INTERPRETED, SPLIT_TOKENS, attention_tile, launch_options, operand_dtype, target

PART_VALUES = (
    1 << 24
)  # float32 numbers that the pieces of one launch may take: 64 MiB; more rows take more launches


class AttentionPlan(NamedTuple):
    """Which rows are computed together. Depends on the step's rows only, so one serves all layers.

    decode  [n, 2] int32, (row, 1): one position each, cut into pieces
    prompt  [m, 2] int32, (first row, number of rows): consecutive rows of one request, up to `prompt_rows`
    """

    decode: Tensor
    prompt: Tensor
    prompt_rows: int


def attention_plan(
    row_request: Sequence[int], row_position: Sequence[int], device: torch.device | str, prompt_rows: int = 16
) -> AttentionPlan:
    """Runs of consecutive positions of one request go to prompt tiles, single rows to decode.

    Takes the host's lists: reading them back from the device would wait for it.
    """
    decode: list[tuple[int, int]] = []
    prompt: list[tuple[int, int]] = []
    begin = 0
    T = len(row_request)
    for t in range(1, T + 1):  # once a step, on the host
        if t < T and row_request[t] == row_request[t - 1] and row_position[t] == row_position[t - 1] + 1:
            continue
        if t - begin == 1:
            decode.append((begin, 1))
        else:
            prompt += [(r, min(prompt_rows, t - r)) for r in range(begin, t, prompt_rows)]
        begin = t
    lines = torch.tensor(decode + prompt, dtype=torch.int32).view(-1, 2).to(device)
    return AttentionPlan(lines[: len(decode)], lines[len(decode) :], prompt_rows)


@triton.jit
def finish(total, sum_, top, sink, HAS_SINK: tl.constexpr):
    # Output of a row from its unnormalised total, the sum of its weights and the largest score (base 2).
    if HAS_SINK:
        largest = tl.maximum(top, sink)
        shrink = tl.exp2(top - largest)
        sum_ = sum_ * shrink + tl.exp2(sink - largest)
        total = total * shrink[:, None]
    return total / tl.where(sum_ > 0, sum_, 1.0)[:, None]


@triton.jit
def rows_together(request_ptr, row, T, ROWS: tl.constexpr):
    # How many rows from `row` on share its tile: those of its request up to the next multiple of ROWS; 0 if the row before
    # it has taken it along.
    end = tl.minimum((row // ROWS + 1) * ROWS, T)
    request = tl.load(request_ptr + row)
    following = row + tl.arange(0, ROWS)
    other = tl.load(request_ptr + following, mask=following < end, other=-1) != request
    count = tl.min(tl.where(other, following, end), axis=0) - row
    before = tl.load(request_ptr + row - 1, mask=row % ROWS > 0, other=-1)
    return tl.where(before == request, 0, count)


@triton.jit(do_not_specialize=["table_stride", "num_splits", "T", "first_row", "most_distance"])
def attention_kernel(
    q_ptr,  # [T, H, P]
    k_ptr,  # [num_blocks, G, 16, P]
    v_ptr,  # [num_blocks, G, 16, PV]
    table_ptr,  # [B, M] int32
    request_ptr,  # [T] int32
    position_ptr,  # [T] int32
    lines_ptr,  # [n, 2] int32
    sinks_ptr,  # [H] float32
    distance_ptr,  # [H, 2 * most_distance + 1] float32, added to scores
    own_ptr,  # [T] int32, where distances are counted from
    out_ptr,  # [T, H, PV]
    part_ptr,  # [rows of the launch, H, num_splits, PV] float32
    part_sum_ptr,  # [rows of the launch, H, num_splits] float32
    part_top_ptr,  # [rows of the launch, H, num_splits] float32
    scale,
    soft_cap,
    window,
    T,
    first_row,
    most_distance,
    q_stride,
    q_head_stride,
    k_block_stride,
    k_head_stride,
    k_token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    out_stride,
    out_head_stride,
    table_stride,
    num_splits,
    H: tl.constexpr,
    HEADS: tl.constexpr,  # query heads that share a kv head
    TILE_HEADS: tl.constexpr,  # of them, how many a program takes: a power of two
    P_MAIN: tl.constexpr,  # P is a power of two and a rest, which is padded to one
    P_REST: tl.constexpr,
    P_REST_PAD: tl.constexpr,
    PV: tl.constexpr,
    PV_PAD: tl.constexpr,
    SPLIT: tl.constexpr,  # positions of a piece; 0: all at once
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_DISTANCES: tl.constexpr,
    HAS_LINES: tl.constexpr,  # False: program i begins at row first_row + i
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile times TILE_HEADS, at least 16
    BLOCK_N: tl.constexpr,
):
    if HAS_LINES:
        tile_row = tl.load(lines_ptr + tl.program_id(0) * 2)
        count = tl.load(lines_ptr + tl.program_id(0) * 2 + 1)
    else:
        tile_row = first_row + tl.program_id(0)
        count = rows_together(request_ptr, tile_row, T, BLOCK_M // TILE_HEADS)
    head_tiles: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    g = tl.program_id(1) // head_tiles
    split = tl.program_id(2)
    m = tl.arange(0, BLOCK_M)
    row = m // TILE_HEADS
    head = tl.program_id(1) % head_tiles * TILE_HEADS + m % TILE_HEADS
    in_tile = (row < count) & (head < HEADS)
    row = tile_row + row
    head = g * HEADS + head
    request = tl.load(request_ptr + tile_row).to(tl.int64)
    position = tl.load(position_ptr + row, mask=in_tile, other=-1)
    end = tl.max(position, axis=0) + 1
    begin = 0
    if HAS_WINDOW:
        begin = tl.min(tl.where(in_tile, position, 2147483647), axis=0) - window + 1
        begin = (
            tl.maximum(begin, 0) // BLOCK_N * BLOCK_N
        )  # always the same grid: a row's sums do not know its tile
    if SPLIT > 0:
        begin = tl.maximum(begin, split * SPLIT)
        end = tl.minimum(end, (split + 1) * SPLIT)
    if begin < end:
        if HAS_DISTANCES:
            own = tl.load(own_ptr + row, mask=in_tile, other=0)
            distances = distance_ptr + head.to(tl.int64) * (2 * most_distance + 1) + most_distance
        p = tl.arange(0, P_MAIN)
        q_rows = q_ptr + row.to(tl.int64) * q_stride + head * q_head_stride
        q = tl.load(q_rows[:, None] + p[None, :], mask=in_tile[:, None], other=0.0).to(OPERAND)
        if P_REST > 0:
            r = tl.arange(0, P_REST_PAD)
            q_rest = tl.load(
                q_rows[:, None] + P_MAIN + r[None, :],
                mask=in_tile[:, None] & (r < P_REST)[None, :],
                other=0.0,
            ).to(OPERAND)
        pv = tl.arange(0, PV_PAD)
        total = tl.zeros((BLOCK_M, PV_PAD), dtype=tl.float32)
        sum_ = tl.zeros((BLOCK_M,), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        for n0 in range(begin, end, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            in_n = n < end  # what stands behind the last position is never read
            block = tl.load(table_ptr + request * table_stride + n // 16, mask=in_n, other=0).to(tl.int64)
            k_rows = k_ptr + block * k_block_stride + g * k_head_stride + n % 16 * k_token_stride
            k = tl.load(k_rows[:, None] + p[None, :], mask=in_n[:, None], other=0.0).to(OPERAND)
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
            if P_REST > 0:
                k_rest = tl.load(
                    k_rows[:, None] + P_MAIN + r[None, :],
                    mask=in_n[:, None] & (r < P_REST)[None, :],
                    other=0.0,
                ).to(OPERAND)
                score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
            score *= scale
            if HAS_DISTANCES:
                far = tl.minimum(tl.maximum(n[None, :] - own[:, None], -most_distance), most_distance)
                score += tl.load(distances[:, None] + far, mask=in_tile[:, None], other=0.0)
            if HAS_CAP:
                score = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * score / soft_cap) + 1.0))  # tanh
            score *= 1.4426950408889634
            seen = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (n[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, axis=1))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
            weight = tl.exp2(score - base[:, None])
            shrink = tl.exp2(top - base)
            sum_ = sum_ * shrink + tl.sum(weight, axis=1)
            v_rows = v_ptr + block * v_block_stride + g * v_head_stride + n % 16 * v_token_stride
            v = tl.load(v_rows[:, None] + pv[None, :], mask=in_n[:, None] & (pv < PV)[None, :], other=0.0).to(
                OPERAND
            )
            total = tl.dot(weight.to(OPERAND), v, total * shrink[:, None], input_precision="ieee")
            top = new_top
        place = row.to(tl.int64) * H + head
        if SPLIT > 0:
            if HAS_LINES:
                place = tl.program_id(0).to(tl.int64) * H + head
            else:
                place -= first_row * H
            place = place * num_splits + split
            tl.store(part_sum_ptr + place, sum_, mask=in_tile)
            tl.store(part_top_ptr + place, top, mask=in_tile)
            mask = in_tile[:, None] & (pv < PV)[None, :]
            tl.store(part_ptr + place[:, None] * PV + pv[None, :], total, mask=mask)
        else:
            sink = tl.zeros((BLOCK_M,), dtype=tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + head, mask=in_tile, other=0.0) * 1.4426950408889634
            out = finish(total, sum_, top, sink, HAS_SINKS)
            place = row.to(tl.int64) * out_stride + head * out_head_stride
            mask = in_tile[:, None] & (pv < PV)[None, :]
            tl.store(out_ptr + place[:, None] + pv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_splits", "first_row"])
def merge_kernel(
    lines_ptr,  # [n, 2] int32
    position_ptr,  # [T] int32
    sinks_ptr,  # [H] float32
    part_ptr,  # [rows of the launch, H, num_splits, PV] float32
    part_sum_ptr,
    part_top_ptr,
    out_ptr,  # [T, H, PV]
    window,
    first_row,
    out_stride,
    out_head_stride,
    num_splits,
    H: tl.constexpr,
    PV: tl.constexpr,
    PV_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LINES: tl.constexpr,
):
    # One program per row and head, over the pieces of the row in order of position.
    of_launch = tl.program_id(0).to(tl.int64)
    if HAS_LINES:
        row = tl.load(lines_ptr + tl.program_id(0) * 2).to(tl.int64)
    else:
        row = first_row + of_launch
    head = tl.program_id(1)
    position = tl.load(position_ptr + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0) // SPLIT
    pv = tl.arange(0, PV_PAD)[None, :]
    total = tl.zeros((1, PV_PAD), dtype=tl.float32)
    sum_ = tl.zeros((1,), dtype=tl.float32)
    top = tl.full((1,), float("-inf"), dtype=tl.float32)
    one = tl.arange(0, 1)
    for split in range(first, position // SPLIT + 1):
        place = (of_launch * H + head) * num_splits + split
        part_top = tl.load(part_top_ptr + place + one)
        new_top = tl.maximum(top, part_top)
        shrink = tl.exp2(top - new_top)
        part_shrink = tl.exp2(part_top - new_top)
        part = tl.load(part_ptr + place * PV + pv, mask=pv < PV, other=0.0)
        total = total * shrink[:, None] + part * part_shrink[:, None]
        sum_ = sum_ * shrink + tl.load(part_sum_ptr + place + one) * part_shrink
        top = new_top
    sink = tl.zeros((1,), dtype=tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head + one) * 1.4426950408889634
    out = finish(total, sum_, top, sink, HAS_SINKS)
    tl.store(
        out_ptr + row * out_stride + head * out_head_stride + pv,
        out.to(out_ptr.dtype.element_ty),
        mask=pv < PV,
    )


def prompt_rows(heads: int, chip: str, P: int, Pv: int) -> int:
    """Rows of a prompt tile for this many query heads per kv head: the argument of `attention_plan`."""
    tile = attention_tile(chip, heads, P, Pv, 2, prompt=True)
    return tile.BLOCK_M // tile.TILE_HEADS


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of rows q [T, H, P] over positions 0..row_position of their requests: [T, H, Pv].

    window    a row sees its own position and the window - 1 before it
    sinks     [H] float32, one more logit per head that takes weight and gives nothing
    soft_cap  scores become cap * tanh(score / cap)
    plan      None: every row as decode. Rows of a prompt may take `attention_plan`, whose bits are other
    """
    rows = block_tables, row_request, row_position
    return _attend(q, k_pages, v_pages, *rows, scale, window, sinks, soft_cap, None, None, plan, out)


def biased_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    bias: Tensor,
    own_position: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with bias [H, 2 m + 1] float32 added to the scores, by how far a position is from own_position [T]."""
    rows = block_tables, row_request, row_position
    return _attend(q, k_pages, v_pages, *rows, scale, None, None, None, bias, own_position, None, out)


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    bias: Tensor | None,
    own_position: Tensor | None,
    plan: AttentionPlan | None,
    out: Tensor | None,
) -> Tensor:
    T, H, P = q.shape
    G, Pv = v_pages.shape[1], v_pages.shape[3]
    if out is None:
        out = torch.empty(T, H, Pv, dtype=q.dtype, device=q.device)
    if T == 0:
        return out
    chip = target(q.device)
    main = 1 << (P.bit_length() - 1)
    rest = P - main
    constants = {
        "H": H,
        "PV": Pv,
        "PV_PAD": triton.next_power_of_2(Pv),
        "HAS_WINDOW": window is not None,
        "HAS_SINKS": sinks is not None,
    }
    num_splits = triton.cdiv(block_tables.shape[1] * 16, SPLIT_TOKENS)
    for lines, first_row, count, is_prompt in _launches(plan, T, H * num_splits * Pv):
        tile = attention_tile(chip, H // G, P, Pv, k_pages.element_size(), prompt=is_prompt)
        block_m = tile.BLOCK_M
        if is_prompt and plan is not None:
            block_m = max(block_m, plan.prompt_rows * tile.TILE_HEADS)
        parts = part_sums = part_tops = out
        if not is_prompt:
            parts = torch.empty(count, H, num_splits, Pv, dtype=torch.float32, device=q.device)
            sums = torch.empty(2, count, H, num_splits, dtype=torch.float32, device=q.device)
            part_sums, part_tops = sums.unbind(0)
        head_tiles = triton.cdiv(H // G, tile.TILE_HEADS)
        attention_kernel[(count, G * head_tiles, 1 if is_prompt else num_splits)](
            q,
            k_pages,
            v_pages,
            block_tables,
            row_request,
            row_position,
            lines if lines is not None else row_request,
            sinks if sinks is not None else q,
            bias if bias is not None else q,
            own_position if own_position is not None else row_position,
            out,
            parts,
            part_sums,
            part_tops,
            scale,
            soft_cap if soft_cap is not None else 0.0,
            window if window is not None else 0,
            T,
            first_row,
            bias.shape[1] // 2 if bias is not None else 0,
            q.stride(0),
            q.stride(1),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            out.stride(0),
            out.stride(1),
            block_tables.stride(0),
            num_splits,
            HEADS=H // G,
            TILE_HEADS=tile.TILE_HEADS,
            P_MAIN=main,
            P_REST=rest,
            P_REST_PAD=max(16, triton.next_power_of_2(rest)) if rest else 0,
            SPLIT=0 if is_prompt else SPLIT_TOKENS,
            HAS_CAP=soft_cap is not None,
            HAS_DISTANCES=bias is not None,
            HAS_LINES=lines is not None,
            OPERAND=tl.float32 if INTERPRETED else operand_dtype(k_pages.dtype),
            BLOCK_M=block_m,
            BLOCK_N=tile.BLOCK_N,
            **constants,
            **launch_options(chip, tile.num_warps, tile.num_stages),
        )
        if not is_prompt:
            merge_kernel[(count, H)](
                lines if lines is not None else row_request,
                row_position,
                sinks if sinks is not None else q,
                parts,
                part_sums,
                part_tops,
                out,
                window if window is not None else 0,
                first_row,
                out.stride(0),
                out.stride(1),
                num_splits,
                SPLIT=SPLIT_TOKENS,
                HAS_LINES=lines is not None,
                **constants,
                num_warps=1 if Pv <= 128 else 4,
            )
    return out


def _launches(
    plan: AttentionPlan | None, T: int, row_values: int
) -> Iterator[tuple[Tensor | None, int, int, bool]]:
    """(lines, first row, programs, is prompt) of each launch; of decode so many rows that their pieces have room."""
    most = max(16, PART_VALUES // row_values // 16 * 16)  # 16: no tile of rows is cut
    if plan is None:
        for first in range(0, T, most):
            yield None, first, min(most, T - first), False
        return
    for lines in plan.decode.split(most):
        if len(lines):
            yield lines, 0, len(lines), False
    if len(plan.prompt):
        yield plan.prompt, 0, len(plan.prompt), True
