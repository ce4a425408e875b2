"""rms_norm in plain torch. Defined by kernels.reference.rms_norm."""

from torch import Tensor

from kernels.cpu.fallback.tiles import tree_sum


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of the last dimension."""
    return 1.0 / (tree_sum(x.square()) / x.shape[-1] + eps).sqrt()


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(x * inverse_rms(x, eps)[:, None] * weight)
