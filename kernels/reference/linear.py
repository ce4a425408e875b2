"""linear and embed: rows times a packed weight, and rows of it."""

from collections.abc import Sequence

from torch import Tensor

from kernels.reference.chain import product
from kernels.reference.formats import Codes, Weight, decode, encode, stacked


def pack_rows(weights: Sequence[Weight], format: str) -> Tensor | Codes:
    """Stack weights [Ni, K] into one [N, K] of the given format. The handle of this backend is that tensor, or its codes."""
    return stacked([encode(weight, format) for weight in weights])


def linear(x: Tensor, weight: Tensor | Codes, bias: Tensor | None, out: Tensor, add: bool) -> None:
    """Multiply rows by a weight; every output is summed as `chain.product` says, over k in increasing order.

    x       [T, K]  float32
    weight  [N, K]  bfloat16, float16 or float32, or codes
    bias    [N]     float32 or None, added to the finished product
    out     [T, N]  float32; with `add` the finished sum is added to what stands there (the residual)
    """
    finished = product(x, weight)
    if bias is not None:
        finished = finished + bias
    out.copy_(out + finished if add else finished)


def new_heads(handles: Sequence[Tensor | Codes]) -> tuple[Tensor | Codes, ...]:
    """The handle of several weights that serve one head each."""
    return tuple(handles)


def linear_heads(x: Tensor, weights: Sequence[Tensor | Codes], out: Tensor) -> None:
    """Multiply each head by its own weight.

    x        [T, H, K]  float32; rows and heads may be strided
    weights  H times [N, K]
    out      [T, H, N]  float32, strided likewise
    """
    for h, weight in enumerate(weights):
        linear(x[:, h], weight, None, out[:, h], False)


def embed(token_ids: Tensor, weight: Tensor | Codes, out: Tensor) -> None:
    """Look rows up, widened exactly; codes times their scale.

    token_ids  [T]     int32; outside [0, N): ValueError
    weight     [N, K]
    out        [T, K]  float32
    """
    plain = decode(weight)
    for t, token in enumerate(token_ids.tolist()):
        if not 0 <= token < len(plain):
            raise ValueError(f"token_ids: entry {t} is {token}, expected 0 to {len(plain) - 1}")
        out[t] = plain[token]
