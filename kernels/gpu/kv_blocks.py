"""kv_write and kv_copy in Triton. Defined by kernels.reference.kv_blocks, with pages of another order.

Pages of one layer here: k [num_blocks, G, 16, P] and v [num_blocks, G, 16, Pv]. On the CPU tokens are the lanes of k,
since outputs must be lanes there; a matrix instruction wants a token's columns side by side, for keys as for values,
a block of one head is then one stretch of memory (16 x 128 x 2 = 4 KB), and v may be a view of the first Pv columns of k,
which halves the cache of latent attention.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 16
COPY_BYTES = 4096


def new_pages(
    num_blocks: int,
    G: int,
    P: int,
    Pv: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Zeroed pages of one layer. `shared`: values are the first Pv columns of the keys and take no memory of their own."""
    k = torch.zeros(num_blocks, G, BLOCK_TOKENS, P, dtype=dtype, device=device)
    if shared:
        return k, k[..., :Pv]
    return k, torch.zeros(num_blocks, G, BLOCK_TOKENS, Pv, dtype=dtype, device=device)


@triton.jit(do_not_specialize=["num_slots"])
def kv_write_kernel(
    k_ptr,  # [T, G, P]
    v_ptr,  # [T, G, Pv]
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,  # [T] int32
    num_slots,
    k_stride,
    k_in_stride,
    v_stride,
    v_in_stride,
    k_block_stride,
    k_head_stride,
    k_token_stride,
    v_block_stride,
    v_head_stride,
    v_token_stride,
    P: tl.constexpr,
    PV: tl.constexpr,
    P_PAD: tl.constexpr,
    PV_PAD: tl.constexpr,
    WRITES_V: tl.constexpr,
):
    # One program per token and head. A slot that points nowhere (-1: padding) writes nothing.
    token = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < num_slots):
        block = (slot // 16).to(tl.int64)
        p = tl.arange(0, P_PAD)
        k = tl.load(k_ptr + token * k_stride + g * k_in_stride + p, mask=p < P, other=0.0).to(tl.float32)
        place = k_pages_ptr + block * k_block_stride + g * k_head_stride + slot % 16 * k_token_stride + p
        tl.store(place, k.to(k_pages_ptr.dtype.element_ty), mask=p < P)
        if WRITES_V:
            p = tl.arange(0, PV_PAD)
            v = tl.load(v_ptr + token * v_stride + g * v_in_stride + p, mask=p < PV, other=0.0).to(tl.float32)
            place = v_pages_ptr + block * v_block_stride + g * v_head_stride + slot % 16 * v_token_stride + p
            tl.store(place, v.to(v_pages_ptr.dtype.element_ty), mask=p < PV)


@triton.jit
def kv_copy_kernel(
    pages_ptr,  # uint8
    source_ptr,  # [n] int32
    destination_ptr,  # [n] int32
    block_bytes,
    BLOCK: tl.constexpr,
):
    # One program per pair of blocks and stretch of bytes.
    n = tl.program_id(0)
    source = tl.load(source_ptr + n).to(tl.int64) * block_bytes
    destination = tl.load(destination_ptr + n).to(tl.int64) * block_bytes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < block_bytes
    tl.store(pages_ptr + destination + at, tl.load(pages_ptr + source + at, mask=mask, other=0), mask=mask)


def kv_write(k: Tensor, v: Tensor | None, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys [T, G, P] and values [T, G, Pv] to slots [T] (block * 16 + offset; -1: nowhere) of one layer's pages.

    v None: values are a view of the keys and need no write.
    """
    T, G, P = k.shape
    Pv = v_pages.shape[3]
    if T:
        kv_write_kernel[(T, G)](
            k,
            v if v is not None else k,
            k_pages,
            v_pages,
            slots,
            len(k_pages) * BLOCK_TOKENS,
            *k.stride()[:2],
            *(v.stride()[:2] if v is not None else (0, 0)),
            *k_pages.stride()[:3],
            *v_pages.stride()[:3],
            P=P,
            PV=Pv,
            P_PAD=triton.next_power_of_2(P),
            PV_PAD=triton.next_power_of_2(Pv),
            WRITES_V=v is not None,
            num_warps=1,
        )


def kv_copy(pages: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy blocks source [n] int32 to destination [n] of contiguous pages [num_blocks, ...]; no block is in both lists."""
    as_bytes = pages.view(len(pages), -1).view(torch.uint8)
    block_bytes = as_bytes.shape[1]
    if len(source):
        kv_copy_kernel[(len(source), triton.cdiv(block_bytes, COPY_BYTES))](
            as_bytes, source, destination, block_bytes, BLOCK=COPY_BYTES
        )
