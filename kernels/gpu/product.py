"""The main loop of every matrix product: rows times a packed weight, unpacked on the way. Device code only.

A step reads a tile of rows and a tile of the weight, turns both into OPERAND, and adds their product to float32
accumulators. The order of summation is increasing k in steps of BLOCK_K, so an output depends on its own row and on
nothing else; no product is split over k.
"""

import triton
import triton.language as tl


@triton.jit
def unpack_nibble(code, scale, FORMAT: tl.constexpr):
    # code int32 [j, n], scale float32 [1, n] -> float32 [j, n]
    if FORMAT == "int4":
        value = (code - 8).to(tl.float32) * scale
    else:
        # E2M1, doubled so that it is whole: 0 1 2 3 4 6 8 12; the scale makes up for the 2.
        bits = code & 7
        magnitude = tl.where(bits == 0, 0, ((2 + (bits & 1)) << (bits >> 1)) >> 1)
        value = tl.where(code >= 8, -magnitude, magnitude).to(tl.float32) * scale
    return value


@triton.jit
def load_scale(scale_ptr, offset, in_n, FORMAT: tl.constexpr):
    # One scale per output of this group of columns: float32 [n].
    raw = tl.load(scale_ptr + offset, mask=in_n, other=0)
    if FORMAT == "mxfp4":
        # E8M0 is the exponent field of a float32; one less, for the doubled codes. 0 and 1 mean 2^-127 and less: 0 here.
        exponent = tl.maximum(raw.to(tl.int32) - 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = raw.to(tl.float32)
    return scale


@triton.jit
def multiply(
    x_ptr,
    x_rows,  # int64 [BLOCK_M] offset of each row's first value
    in_rows,  # bool [BLOCK_M]
    w_ptr,
    scale_ptr,
    n,  # int32 [BLOCK_N] rows of the weight
    in_n,  # bool [BLOCK_N]
    N,  # rows the weight has in all
    K,  # columns the weight has in all; nibble formats: stored up to a multiple of 64
    k_begin,  # the weight's column that x's column 0 meets; nibble formats: a multiple of 64
    k_count,  # columns of x
    pair_rows,  # PAIR: how many rows further the second weight stands
    PAIR: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    MASK_K: tl.constexpr,  # False where k_count is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # nibble formats: a multiple of 64 that divides the stored columns
):
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    n = n.to(tl.int64)  # a vocabulary times a width passes 2**31
    if FORMAT == "int4" or FORMAT == "mxfp4":
        # Byte j of a block holds column j in its low half and column j + 32 in its high half, so both halves meet
        # unbroken runs of x. Blocks are [K / 64, N, 32 bytes], scales [K / GROUP, N]: a tile is one stretch of memory.
        j = tl.arange(0, 32)
        weights = w_ptr + n[None, :] * 32 + j[:, None]
        for step in range(0, k_count, BLOCK_K):
            for part in tl.static_range(BLOCK_K // 64):
                k0 = step + part * 64
                block = (k_begin + k0) // 64  # block * N * 32 is half of K * N: 31 bits do
                if MASK_K:
                    low = tl.load(
                        x_ptr + x_rows[:, None] + (k0 + j)[None, :],
                        mask=in_rows[:, None] & (k0 + j < k_count)[None, :],
                        other=0.0,
                    )
                    high = tl.load(
                        x_ptr + x_rows[:, None] + (k0 + 32 + j)[None, :],
                        mask=in_rows[:, None] & (k0 + 32 + j < k_count)[None, :],
                        other=0.0,
                    )
                else:
                    low = tl.load(
                        x_ptr + x_rows[:, None] + (k0 + j)[None, :], mask=in_rows[:, None], other=0.0
                    )
                    high = tl.load(
                        x_ptr + x_rows[:, None] + (k0 + 32 + j)[None, :], mask=in_rows[:, None], other=0.0
                    )
                low, high = low.to(OPERAND), high.to(OPERAND)
                low_group = (block * 64 // GROUP) * N
                high_group = ((block * 64 + 32) // GROUP) * N
                codes = tl.load(weights + block * N * 32, mask=in_n[None, :], other=0).to(tl.int32)
                low_scale = load_scale(scale_ptr, low_group + n, in_n, FORMAT)
                high_scale = load_scale(scale_ptr, high_group + n, in_n, FORMAT)
                w_low = unpack_nibble(codes & 15, low_scale[None, :], FORMAT).to(OPERAND)
                w_high = unpack_nibble(codes >> 4, high_scale[None, :], FORMAT).to(OPERAND)
                total = tl.dot(low, w_low, total, input_precision="ieee")
                total = tl.dot(high, w_high, total, input_precision="ieee")
                if PAIR:
                    m = n + pair_rows
                    codes = tl.load(weights + (block * N + pair_rows) * 32, mask=in_n[None, :], other=0).to(
                        tl.int32
                    )
                    low_scale = load_scale(scale_ptr, low_group + m, in_n, FORMAT)
                    high_scale = load_scale(scale_ptr, high_group + m, in_n, FORMAT)
                    w_low = unpack_nibble(codes & 15, low_scale[None, :], FORMAT).to(OPERAND)
                    w_high = unpack_nibble(codes >> 4, high_scale[None, :], FORMAT).to(OPERAND)
                    second = tl.dot(low, w_low, second, input_precision="ieee")
                    second = tl.dot(high, w_high, second, input_precision="ieee")
    else:
        k = tl.arange(0, BLOCK_K)
        weights = w_ptr + n[None, :] * K + (k_begin + k)[:, None]
        if PAIR:
            seconds = w_ptr + (n + pair_rows)[None, :] * K + (k_begin + k)[:, None]
        for k0 in range(0, k_count, BLOCK_K):
            if MASK_K:
                in_k = k0 + k < k_count
                x = tl.load(
                    x_ptr + x_rows[:, None] + (k0 + k)[None, :],
                    mask=in_rows[:, None] & in_k[None, :],
                    other=0.0,
                )
                w = tl.load(weights + k0, mask=in_k[:, None] & in_n[None, :], other=0)
                x = x.to(OPERAND)
                total = tl.dot(x, w.to(OPERAND), total, input_precision="ieee")
                if PAIR:
                    w = tl.load(seconds + k0, mask=in_k[:, None] & in_n[None, :], other=0)
                    second = tl.dot(x, w.to(OPERAND), second, input_precision="ieee")
            else:
                x = tl.load(x_ptr + x_rows[:, None] + (k0 + k)[None, :], mask=in_rows[:, None], other=0.0)
                w = tl.load(weights + k0, mask=in_n[None, :], other=0)
                x = x.to(OPERAND)
                total = tl.dot(x, w.to(OPERAND), total, input_precision="ieee")
                if PAIR:
                    w = tl.load(seconds + k0, mask=in_n[None, :], other=0)
                    second = tl.dot(x, w.to(OPERAND), second, input_precision="ieee")
        if FORMAT == "int8":
            total = total * tl.load(scale_ptr + n, mask=in_n, other=0.0)[None, :]
            if PAIR:
                second = second * tl.load(scale_ptr + n + pair_rows, mask=in_n, other=0.0)[None, :]
    return total, second
