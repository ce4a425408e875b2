"""linear and embed: rows times a packed weight, and rows of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference.chain import chain


def pack_rows(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack weights [Ni, K] into one [N, K] of the given dtype. The handle of this backend is that tensor."""
    return torch.cat([weight.detach().to(dtype) for weight in weights]).clone()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """Multiply rows by a weight, widened to float32; every output is one chain of fused multiply-adds over k.

    x       [T, K]  float32
    weight  [N, K]  bfloat16, float16 or float32
    bias    [N]     float32 or None, added to the finished chain
    out     [T, N]  float32; with `add` the finished sum is added to what stands there (the residual)
    """
    product = chain(x, weight.float())
    if bias is not None:
        product = product + bias
    out.copy_(out + product if add else product)


def new_heads(handles: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The handle of several weights that serve one head each."""
    return tuple(handles)


def linear_heads(x: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
    """Multiply each head by its own weight.

    x        [T, H, K]  float32; rows and heads may be strided
    weights  H times [N, K]
    out      [T, H, N]  float32, strided likewise
    """
    for h, weight in enumerate(weights):
        linear(x[:, h], weight, None, out[:, h], False)


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """Look rows up, widened exactly.

    token_ids  [T]     int32; outside [0, N): ValueError
    weight     [N, K]
    out        [T, K]  float32
    """
    for t, token in enumerate(token_ids.tolist()):
        if not 0 <= token < len(weight):
            raise ValueError(f"token_ids: entry {t} is {token}, expected 0 to {len(weight) - 1}")
        out[t] = weight[token].float()
