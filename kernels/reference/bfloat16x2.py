"""bfloat16 weights that meet rows of two bfloat16 terms, 16 bits in all; bfloat16 alone keeps 8.

The sums are those of the matrix instruction of x86 processors (TDPBF16PS), found by trial on a Xeon of 2023 and written
out here, so that any processor can give the same bits. Numbers below 2^-126 count as zeros everywhere: that instruction
knows no others.
"""

import torch
from torch import Tensor

from kernels.reference.rounding import flush, fma

BLOCK = 32
"""Inputs whose products are summed from 0, before they are added to the total."""


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] float32 to bfloat16 [N, K]; scales it has none, [N, 0]."""
    return weight.to(torch.bfloat16), weight.new_zeros(len(weight), 0)


def dequantise(values: Tensor, scales: Tensor, K: int) -> Tensor:
    """float32 [N, K], exactly."""
    return values.float()


def terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 as two terms that bfloat16 holds, in float32: x rounded, and what that leaves of it, rounded."""
    first = x.to(torch.bfloat16).float()
    return first, flush(flush(x) - flush(first)).to(torch.bfloat16).float()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] float32 times weight [N, K] bfloat16 transposed: [T, N].

    Of each block of inputs, one chain of fused multiply-adds over the even ones and one over the odd ones, both from 0;
    their sum is added to the term's total. The two terms' totals are added last.
    """
    first, second = (term_sum(term, weight.float()) for term in terms(x))
    return flush(first + second)


def term_sum(term: Tensor, weight: Tensor) -> Tensor:
    """One term's total: [T, N]."""
    term, weight = flush(term), flush(weight)
    total = term.new_zeros(len(term), len(weight))
    for block in range(0, term.shape[1], BLOCK):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(block, min(block + BLOCK, term.shape[1])):
            sums[k % 2] = flush(fma(term[:, k, None], weight[None, :, k], sums[k % 2]))
        total = flush(total + flush(sums[0] + sums[1]))
    return total
