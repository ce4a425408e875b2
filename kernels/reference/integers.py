"""Rows as whole numbers: how activations meet codes. About 15 bits and one scale per row; bfloat16 keeps 8 bits.

Codes of mxfp4, which may be what a checkpoint holds, meet two such rows: the number and what is left of it, 30 bits.

Whole numbers add up exactly in any order, so processors may sum codes as they like and still give the same bits.
"""

import torch
from torch import Tensor

LARGEST = 127 * 256 + 127
"""What two signed digits of base 256 reach on both sides: the compiled kernels multiply digit by digit."""
LEAST = 1e-30
"""A row that stays below counts as zeros: what its numbers are divided by could not be held."""


def whole_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, K] float32 as whole numbers [T, K] (in float32) in -LARGEST..LARGEST, and scales [T].

    x is near whole * scale, off by at most half the scale. A row with a number that is not finite has a scale of nan, and
    zeros: what is multiplied by it is nan, and shows.
    """
    if not x.shape[1]:
        return x, x.new_zeros(len(x))
    highest = x.abs().amax(dim=1)
    finite = x.isfinite().all(dim=1)
    some = finite & (highest >= LEAST)
    inverse = torch.where(
        some, torch.full_like(highest, LARGEST) / highest, 0.0
    )  # number / tensor rounds twice
    whole = torch.where(some[:, None], x * inverse[:, None], 0.0).round_()
    return whole, torch.where(some, highest / LARGEST, torch.where(finite, 0.0, torch.nan))
