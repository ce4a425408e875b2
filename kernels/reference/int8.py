"""int8 by output: one float32 scale for each row of a weight. What the codes are and what they stand for."""

import torch
from torch import Tensor

LARGEST = 127


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] float32 to codes [N, K] int8 in -127..127 and scales [N] float32.

    A row's largest value is 127 times its scale, so no value is off by more than half the scale.
    """
    scales = weight.abs().amax(dim=1) / LARGEST
    codes = weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return codes.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor, K: int) -> Tensor:
    """float32 [N, K]: code times scale, rounded once."""
    return codes.float() * scales[:, None]
