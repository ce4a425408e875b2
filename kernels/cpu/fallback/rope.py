"""head_norm_rope in plain torch. Defined by kernels.reference.rope."""

import torch
from torch import Tensor

from kernels.cpu.fallback.rms_norm import inverse_rms
from kernels.reference.rope import turned


def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> None:
    at = positions.long()
    if not torch.compiler.is_compiling() and len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(cos):
        raise ValueError(f"positions: found {at.tolist()}, expected 0 to {len(cos) - 1}")
    normed = x if weight is None else x * inverse_rms(x, eps)[..., None] * weight
    x.copy_(turned(normed, cos[at, None], sin[at, None], interleaved))
