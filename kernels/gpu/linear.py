"""linear, linear_heads and embed in Triton. Defined by kernels.reference.linear."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.product import load_scale, multiply, unpack_nibble
from kernels.gpu.quantise import GROUP
from kernels.gpu.tiles import launch_options, operand_dtype, product_tile, target
from kernels.gpu.weights import HeadsWeight, LinearWeight

EMBED_COLUMNS = 1024


@triton.jit(do_not_specialize=["T"])
def linear_kernel(
    x_ptr,  # [T, K]
    w_ptr,
    scale_ptr,
    bias_ptr,  # [N]
    out_ptr,  # [T, N]
    T,
    N,
    K,
    num_rows,  # rows of the weight: N, or N of each head
    x_stride,
    out_stride,
    x_head_stride,
    out_head_stride,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    MASK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Row tiles turn fastest: those that share outputs find the weight in the cache. A head has its own N rows of the weight.
    head = tl.program_id(2)
    x_ptr += head.to(tl.int64) * x_head_stride
    out_ptr += head.to(tl.int64) * out_head_stride
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = m < T
    in_n = n < N
    m = m.to(tl.int64)  # rows times a vocabulary pass 2**31
    total, _ = multiply(
        x_ptr,
        m * x_stride,
        in_rows,
        w_ptr,
        scale_ptr,
        head * N + n,
        in_n,
        num_rows,
        K,
        0,
        K,
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
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + m[:, None] * out_stride + n[None, :]
    mask = in_rows[:, None] & in_n[None, :]
    if ADD:
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def embed_kernel(
    ids_ptr,  # [T] int32
    w_ptr,
    scale_ptr,
    out_ptr,  # [T, K]
    N,
    K,
    out_stride,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # One program per token and stretch of BLOCK_K columns.
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_k = k < K
    if FORMAT == "int4" or FORMAT == "mxfp4":
        codes = tl.load(w_ptr + (k // 64 * N + row) * 32 + k % 32, mask=in_k, other=0).to(tl.int32)
        scale = load_scale(scale_ptr, k // GROUP * N + row, in_k, FORMAT)
        value = unpack_nibble((codes >> (k // 32 % 2 * 4)) & 15, scale, FORMAT)
    else:
        value = tl.load(w_ptr + row * K + k, mask=in_k, other=0).to(tl.float32)
        if FORMAT == "int8":
            value *= tl.load(scale_ptr + row)
    tl.store(out_ptr + t * out_stride + k, value.to(out_ptr.dtype.element_ty), mask=in_k)


def linear(
    x: Tensor,
    w: LinearWeight,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
    prompt: bool = False,
) -> Tensor:
    """x [T, K] times w transposed, plus bias [N]: [T, N]. With `add`, out += the finished product.

    x and the unpacked weight are rounded to the weight's operand dtype; a float32 weight keeps float32 (a gate's logits
    should). With `prompt` the largest tiles are taken; bits may then differ from those of decode rows.
    """
    T, N = len(x), w.num_outputs
    if out is None:
        if add:
            raise ValueError("out: found None, expected the residual to add to")
        out = torch.empty(T, N, dtype=x.dtype, device=x.device)
    _launch(x, w, 1, bias, out, add, prompt)
    return out


def linear_heads(x: Tensor, w: HeadsWeight, *, out: Tensor | None = None, prompt: bool = False) -> Tensor:
    """Each head of x [T, H, K] times its own matrix, transposed: [T, H, N], in one launch. Heads may be strided."""
    if out is None:
        out = torch.empty(len(x), w.num_heads, w.num_outputs, dtype=x.dtype, device=x.device)
    _launch(x, w.stacked, w.num_heads, None, out, False, prompt)
    return out


def _launch(
    x: Tensor, w: LinearWeight, heads: int, bias: Tensor | None, out: Tensor, add: bool, prompt: bool
) -> None:
    T, N, K = len(x), w.num_outputs // heads, w.num_inputs
    if T == 0:
        return
    chip = target(x.device)
    tile = product_tile(chip, T, w.num_outputs, K, w.format, experts=False, prompt=prompt)
    linear_kernel[(triton.cdiv(T, tile.BLOCK_M), triton.cdiv(N, tile.BLOCK_N), heads)](
        x,
        w.values,
        w.scales if w.scales is not None else w.values,
        bias if bias is not None else w.values,
        out,
        T,
        N,
        K,
        w.num_outputs,
        x.stride(0),
        out.stride(0),
        x.stride(1) if heads > 1 else 0,
        out.stride(1) if heads > 1 else 0,
        HAS_BIAS=bias is not None,
        ADD=add,
        FORMAT=w.format,
        GROUP=GROUP,
        OPERAND=operand_dtype(w.operand),
        MASK_K=K % tile.BLOCK_K != 0,
        BLOCK_M=tile.BLOCK_M,
        BLOCK_N=tile.BLOCK_N,
        BLOCK_K=tile.BLOCK_K,
        **launch_options(chip, tile.num_warps, tile.num_stages),
    )


def embed(token_ids: Tensor, w: LinearWeight, *, out: Tensor | None = None) -> Tensor:
    """Rows token_ids [T] int32 of a packed weight, widened: [T, K], float32 unless `out` says otherwise."""
    T, K = len(token_ids), w.num_inputs
    if out is None:
        out = torch.empty(T, K, dtype=torch.float32, device=token_ids.device)
    BLOCK_K = min(EMBED_COLUMNS, triton.next_power_of_2(K))
    if T:
        embed_kernel[(T, triton.cdiv(K, BLOCK_K))](
            token_ids,
            w.values,
            w.scales if w.scales is not None else w.values,
            out,
            w.num_outputs,
            K,
            out.stride(0),
            FORMAT=w.format,
            GROUP=GROUP,
            BLOCK_K=BLOCK_K,
        )
    return out
