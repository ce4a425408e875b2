"""rms_norm: rows divided by their root mean square."""

from torch import Tensor

from kernels.reference.chain import lane_sum


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Scale each row to a mean square of 1, then by the weight. All in float32.

    x       [T, D]  float32
    weight  [D]     float32
    eps             added to the mean square
    out     [T, D]  float32, may be x
    """
    mean_square = lane_sum(x.square()) / x.shape[1]
    out.copy_(x * (1.0 / (mean_square + eps).sqrt())[:, None] * weight)
