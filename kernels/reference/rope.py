"""rope: rotary positions in halves or in neighbouring pairs, with an optional norm per head before."""

import torch
from torch import Tensor

from kernels.reference.chain import lane_sum


def rope_table(num_positions: int, P: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, P/2] float32 of every position, equal to transformers' default rope."""
    inverse_frequency = 1.0 / (theta ** (torch.arange(0, P, 2, dtype=torch.int64).float() / P))
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequency
    return angles.cos(), angles.sin()


def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> None:
    """Norm each head (if there is a weight), then rotate pairs of its columns by the position's angles. In place.

    x          [T, H, P]  float32; rows and heads may be strided, the last dimension is dense
    weight     [P]        float32, or None for no norm
    cos, sin   [S, C]     float32, C at most P/2, maybe 0
    positions  [T]        int32; outside [0, S): ValueError

    The pairs are (p, p + C) for p below C as in the Llama and Qwen families, or (2p, 2p + 1) if `interleaved` as in
    DeepSeek's; columns from 2 C on are only normed.
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(cos):
        raise ValueError(f"positions: found {positions.tolist()}, expected 0 to {len(cos) - 1}")
    normed = x
    if weight is not None:
        mean_square = lane_sum(x.square()) / x.shape[-1]
        normed = x * (1.0 / (mean_square + eps).sqrt())[..., None] * weight
    x.copy_(turned(normed, cos[positions.long(), None], sin[positions.long(), None], interleaved))


def turned(x: Tensor, c: Tensor, s: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, P] with the first columns turned by the angles of c and s [T, 1, C]."""
    C = c.shape[-1]
    columns = torch.arange(2 * C).view(C, 2).T if interleaved else torch.arange(2 * C).view(2, C)
    low, high = x[..., columns[0]], x[..., columns[1]]
    result = x.clone()
    result[..., columns[0]] = low * c - high * s
    result[..., columns[1]] = high * c + low * s
    return result
