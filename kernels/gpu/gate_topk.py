"""gate_topk in Triton. Defined by kernels.reference.gate_topk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.gate_topk import Counting

SCORES = ("softmax", "softmax_of_top_k", "sigmoid")
VALUES = 1024  # logits that one program holds, at least one row


@triton.jit
def best_free(pick, free, e, NONE: tl.constexpr):
    # The lowest id among the largest free values of each row: [rows].
    candidate = tl.where(free != 0, pick, float("-inf"))
    best = tl.max(candidate, axis=1)
    return tl.min(tl.where((candidate == best[:, None]) & (free != 0), e, NONE), axis=1)


@triton.jit
def free_groups(pick, e, in_row, SIZE: tl.constexpr, NUM: tl.constexpr, TOP: tl.constexpr, TWO: tl.constexpr,
                ROWS: tl.constexpr, NUM_PAD: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1 for the experts of the TOP best groups: a group counts by its best value, or (TWO) by the sum of its best two.
    groups = tl.arange(0, NUM_PAD)[None, :]
    group_score = tl.full((ROWS, NUM_PAD), float("-inf"), dtype=tl.float32)
    for g in range(NUM):
        inside = tl.broadcast_to((in_row & (e // SIZE == g)).to(tl.int32), (ROWS, BLOCK_E))
        value = tl.max(tl.where(inside != 0, pick, float("-inf")), axis=1)
        if TWO:
            top = best_free(pick, inside, e, BLOCK_E)
            others = tl.where((inside != 0) & (e != top[:, None]), pick, float("-inf"))
            value += tl.max(others, axis=1)
        group_score = tl.where(groups == g, value[:, None], group_score)
    open_groups = tl.broadcast_to((groups < NUM).to(tl.int32), (ROWS, NUM_PAD))
    free = tl.zeros((ROWS, BLOCK_E), dtype=tl.int32)
    for _ in range(TOP):
        best = best_free(group_score, open_groups, groups, NUM_PAD)[:, None]
        open_groups = tl.where(groups == best, 0, open_groups)
        free = tl.where(in_row & (e // SIZE == best), 1, free)
    return free


@triton.jit(do_not_specialize=["T"])
def clear_counts_kernel(
    counts_ptr,  # [num_blocks, E], rows strided
    slots_ptr,  # [T] int32
    T,
    counts_stride,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program per row: the counts of a block that it begins.
    t = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    slot = tl.load(slots_ptr + t)
    if slot % 16 == 0:  # -1, nowhere, is no multiple
        row = counts_ptr + (slot // 16).to(tl.int64) * counts_stride
        tl.store(row + e, tl.zeros((BLOCK_E,), counts_ptr.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["T"])
def gate_topk_kernel(
    logits_ptr,  # [T, E] float32
    expert_scale_ptr,  # [E] float32
    bias_ptr,  # [E] float32
    ids_ptr,  # [T, K] int32
    weights_ptr,  # [T, K] float32
    words_ptr,  # int32: all of the memory that the counts lie in
    slots_ptr,  # [T] int32
    counted_ptr,  # [T] int32
    T,
    logits_stride,
    first_count,
    counts_stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COUNT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K_PAD: tl.constexpr,
    NUM_GROUPS_PAD: tl.constexpr,
):
    # One program per ROWS rows.
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = t < T
    e = tl.arange(0, BLOCK_E)[None, :]
    in_row = e < E
    place = logits_ptr + t.to(tl.int64)[:, None] * logits_stride + e
    logits = tl.load(place, mask=in_rows[:, None] & in_row, other=float("-inf"))
    logits = tl.where(
        in_rows[:, None] | (e == 0), logits, float("-inf")
    )  # spare rows: finite sums, never stored
    logits = tl.where(in_rows[:, None] | (e != 0), logits, 0.0)
    if SCORES == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logits))
    else:
        score = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        if SCORES == "softmax":
            score = score / tl.sum(score, axis=1)[:, None]
    if HAS_BIAS:
        pick = score + tl.load(bias_ptr + e, mask=in_row, other=0.0)  # the bias picks, the score weighs
    else:
        pick = logits  # not the rounded scores: two logits that differ never tie
    pick = tl.where(pick == pick, pick, float("-inf"))
    if NUM_GROUPS > 1:
        free = free_groups(
            pick, e, in_row, E // NUM_GROUPS, NUM_GROUPS, TOP_GROUPS, HAS_BIAS, ROWS, NUM_GROUPS_PAD, BLOCK_E
        )
    else:
        free = tl.broadcast_to(in_row.to(tl.int32), (ROWS, BLOCK_E))
    k = tl.arange(0, K_PAD)[None, :]
    ids = tl.zeros((ROWS, K_PAD), dtype=tl.int32)
    weights = tl.zeros((ROWS, K_PAD), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for j in range(K):
        best = best_free(pick, free, e, BLOCK_E)
        is_best = e == best[:, None]
        free = tl.where(is_best, 0, free)
        weight = tl.sum(tl.where(is_best, score, 0.0), axis=1)
        total += weight  # in order of j, as the reference sums
        ids = tl.where(k == j, best[:, None], ids)
        weights = tl.where(k == j, weight[:, None], weights)
    if RENORMALISE or SCORES == "softmax_of_top_k":
        weights = weights / tl.maximum(total, 1e-20)[:, None]
    weights *= scale
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale_ptr + ids)
    place = t[:, None] * K + k
    mask = in_rows[:, None] & (k < K)
    tl.store(ids_ptr + place, ids, mask=mask)
    tl.store(weights_ptr + place, weights, mask=mask)
    if COUNT_BITS:
        slot = tl.load(slots_ptr + t, mask=in_rows, other=-1)
        counted = tl.load(counted_ptr + t, mask=in_rows, other=0)
        place = first_count + (slot // 16).to(tl.int64)[:, None] * counts_stride + ids
        # Atomics need 32 bits: a byte's 1 is added to the word that holds it. A count stays below 128, so none carries.
        PER_WORD: tl.constexpr = 32 // COUNT_BITS
        one = tl.full((ROWS, K_PAD), 1, tl.int32) << ((place % PER_WORD) * COUNT_BITS).to(tl.int32)
        some = mask & (slot >= 0)[:, None] & (counted != 0)[:, None]
        tl.atomic_add(words_ptr + place // PER_WORD, one, mask=some)


def gate_topk(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    scores: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    selection_bias: Tensor | None = None,
    counting: Counting | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each row of logits [T, E] float32, ties to the lowest id: ids int32 and weights [T, k].

    scores          "softmax" over all, "softmax_of_top_k" or "sigmoid"
    num_groups      experts in equal groups, of which the `top_groups` best may be chosen from; a group counts by its
                    best expert, with a selection bias by the sum of its best two
    scale           times every weight, as is expert_scale [E] of the chosen
    selection_bias  [E] added to the score to choose, not to weigh
    counting        where choices are counted by KV block; the memory behind int8 counts is a multiple of 4 bytes
    """
    T, E = logits.shape
    if scores not in SCORES:
        raise ValueError(f"scores: found {scores!r}, expected one of {', '.join(SCORES)}")
    if not 1 <= k <= E // num_groups * top_groups:
        raise ValueError(
            f"k: found {k}, expected 1 to {E // num_groups * top_groups}, the experts to choose from"
        )
    if out is None:
        ids = torch.empty(T, k, dtype=torch.int32, device=logits.device)
        out = ids, torch.empty(T, k, dtype=torch.float32, device=logits.device)
    ids, weights = out
    BLOCK_E = triton.next_power_of_2(E)
    ROWS = max(1, min(8, VALUES // BLOCK_E))
    words = slots = counted = ids  # any pointer where nothing is counted
    first_count = counts_stride = bits = 0
    if counting is not None:
        counts, slots, counted = counting
        if counts.untyped_storage().nbytes() % 4:
            raise ValueError(
                f"counting.counts: found memory of {counts.untyped_storage().nbytes()} bytes, expected a multiple of 4"
            )
        bits, counts_stride, first_count = 8 * counts.itemsize, counts.stride(0), counts.storage_offset()
        words = torch.empty(0, dtype=torch.int32, device=counts.device).set_(counts.untyped_storage())
        if T:
            clear_counts_kernel[(T,)](counts, slots, T, counts_stride, E=E, BLOCK_E=BLOCK_E, num_warps=1)
    if T:
        gate_topk_kernel[(triton.cdiv(T, ROWS),)](
            logits,
            expert_scale if expert_scale is not None else logits,
            selection_bias if selection_bias is not None else logits,
            ids,
            weights,
            words,
            slots,
            counted,
            T,
            logits.stride(0),
            first_count,
            counts_stride,
            scale,
            E=E,
            K=k,
            SCORES=scores,
            RENORMALISE=renormalise,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=top_groups,
            HAS_EXPERT_SCALE=expert_scale is not None,
            HAS_BIAS=selection_bias is not None,
            COUNT_BITS=bits,
            ROWS=ROWS,
            BLOCK_E=BLOCK_E,
            K_PAD=triton.next_power_of_2(k),
            NUM_GROUPS_PAD=triton.next_power_of_2(num_groups),
            num_warps=4 if ROWS * BLOCK_E >= 512 else 1,
        )
    return out
