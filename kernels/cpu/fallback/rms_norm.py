"""rms_norm and soft_cap in plain torch. Defined by kernels.reference.rms_norm."""

from torch import Tensor

from kernels.cpu.fallback.tiles import tanh, tree_sum


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean square + eps) of the last dimension."""
    return 1.0 / (tree_sum(x.square()) / x.shape[-1] + eps).sqrt()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    normed = x * inverse_rms(x, eps)[:, None]
    out.copy_(normed if weight is None else normed * weight)


def soft_cap(x: Tensor, cap: float) -> None:
    x.copy_(cap * tanh(x / cap))
