"""rms_norm: rows divided by their root mean square. soft_cap: rows bent into a range."""

import torch
from torch import Tensor

from kernels.reference.chain import lane_sum


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    """Scale each row to a mean square of 1, then by the weight. All in float32.

    x       [T, D]  float32
    weight  [D]     float32, or None
    eps             added to the mean square
    out     [T, D]  float32, may be x
    """
    mean_square = lane_sum(x.square()) / x.shape[1]
    normed = x * (1.0 / (mean_square + eps).sqrt())[:, None]
    out.copy_(normed if weight is None else normed * weight)


def soft_cap(x: Tensor, cap: float) -> None:
    """Bend every value into (-cap, cap): cap * tanh(x / cap), in place.

    x    [T, N]  float32; rows may be strided
    """
    x.copy_(cap * torch.tanh(x / cap))
