"""rope: rotary positions, rotate-half as in the Llama and Qwen families, with an optional norm per head before."""

import torch
from torch import Tensor

from kernels.reference.chain import lane_sum


def rope_table(num_positions: int, P: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, P/2] float32 of every position, equal to transformers' default rope."""
    inverse_frequency = 1.0 / (theta ** (torch.arange(0, P, 2, dtype=torch.int64).float() / P))
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequency
    return angles.cos(), angles.sin()


def head_norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor
) -> None:
    """Norm each head (if there is a weight), then rotate the pairs (p, p + P/2) by the position's angles. In place.

    x          [T, H, P]  float32; rows and heads may be strided, the last dimension is dense
    weight     [P]        float32, or None for no norm
    cos, sin   [S, P/2]   float32
    positions  [T]        int32; outside [0, S): ValueError
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(cos):
        raise ValueError(f"positions: found {positions.tolist()}, expected 0 to {len(cos) - 1}")
    normed = x
    if weight is not None:
        mean_square = lane_sum(x.square()) / x.shape[-1]
        normed = x * (1.0 / (mean_square + eps).sqrt())[..., None] * weight
    low, high = normed.chunk(2, dim=-1)
    c, s = cos[positions.long(), None], sin[positions.long(), None]
    x.copy_(torch.cat([low * c - high * s, high * c + low * s], dim=-1))
