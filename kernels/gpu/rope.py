"""head_norm_rope in Triton. Defined by kernels.reference.rope."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["S"])
def head_norm_rope_kernel(
    x_ptr,  # [T, H, P], in place
    weight_ptr,  # [P]
    cos_ptr,  # [S, TURNED]
    sin_ptr,  # [S, TURNED]
    positions_ptr,  # [T] int32
    H,
    S,
    x_stride,
    head_stride,
    eps,
    HAS_WEIGHT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    P: tl.constexpr,
    TURNED: tl.constexpr,  # pairs that turn; columns from 2 * TURNED on only take the norm
    TURNED_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,  # power of two that holds P - 2 * TURNED, 0 if that is 0
    BLOCK_H: tl.constexpr,
):
    # One program per token and BLOCK_H heads.
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_heads = (h < H)[:, None]
    heads = x_ptr + token * x_stride + h[:, None] * head_stride
    i = tl.arange(0, TURNED_PAD)
    in_turned = i < TURNED
    if INTERLEAVED:
        low_columns = 2 * i
        high_columns = 2 * i + 1
    else:
        low_columns = i
        high_columns = i + TURNED
    mask = in_heads & in_turned[None, :]
    low = tl.load(heads + low_columns[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + high_columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        squares = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if REST_PAD > 0:
            rest_columns = 2 * TURNED + tl.arange(0, REST_PAD)
            in_rest = rest_columns < P
            rest_mask = in_heads & in_rest[None, :]
            rest = tl.load(heads + rest_columns[None, :], mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = (1.0 / tl.sqrt(squares / P + eps))[:, None]
        if REST_PAD > 0:
            rest *= (
                scale * tl.load(weight_ptr + rest_columns, mask=in_rest, other=0.0).to(tl.float32)[None, :]
            )
            tl.store(heads + rest_columns[None, :], rest.to(x_ptr.dtype.element_ty), mask=rest_mask)
        low *= scale * tl.load(weight_ptr + low_columns, mask=in_turned, other=0.0).to(tl.float32)[None, :]
        high *= scale * tl.load(weight_ptr + high_columns, mask=in_turned, other=0.0).to(tl.float32)[None, :]
    position = tl.load(positions_ptr + token)
    position = tl.minimum(tl.maximum(position, 0), S - 1).to(tl.int64)  # padding rows may hold anything
    cos = tl.load(cos_ptr + position * TURNED + i, mask=in_turned, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * TURNED + i, mask=in_turned, other=0.0)[None, :]
    tl.store(heads + low_columns[None, :], (low * cos - high * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(heads + high_columns[None, :], (high * cos + low * sin).to(x_ptr.dtype.element_ty), mask=mask)


def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Norm the heads of x [T, H, P] (if weight [P] is given), then rotate them by their positions. In place.

    With fewer than P / 2 columns in cos and sin, or none, only the first 2 * columns of a head turn. `interleaved` pairs
    neighbours (2i, 2i + 1) instead of (i, i + columns).
    """
    T, H, P = x.shape
    turned = cos.shape[1]
    rest = P - 2 * turned
    block = min(triton.next_power_of_2(H), max(1, 1024 // triton.next_power_of_2(P)))
    if T:
        head_norm_rope_kernel[(T, triton.cdiv(H, block))](
            x,
            weight if weight is not None else x,
            cos,
            sin,
            positions,
            H,
            len(cos),
            x.stride(0),
            x.stride(1),
            eps,
            HAS_WEIGHT=weight is not None,
            INTERLEAVED=interleaved,
            P=P,
            TURNED=turned,
            TURNED_PAD=triton.next_power_of_2(max(turned, 1)),
            REST_PAD=triton.next_power_of_2(rest) if rest else 0,
            BLOCK_H=block,
            num_warps=2,
        )
