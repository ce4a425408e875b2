"""linear and embed in plain torch. Defined by kernels.reference.linear, whose unpacked weight they use."""

from collections.abc import Sequence

from torch import Tensor

from kernels.cpu.fallback.tiles import product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, add: bool) -> None:
    # Widened for the call: a lasting float32 copy would double the memory.
    finished = product(x, weight.float())
    if bias is not None:
        finished += bias
    if add:
        out.add_(finished)
    else:
        out.copy_(finished)


def linear_heads(x: Tensor, weights: Sequence[Tensor], out: Tensor) -> None:
    for h, weight in enumerate(weights):
        linear(x[:, h], weight, None, out[:, h], False)


def embed(token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
    ids = token_ids.long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(weight):
        raise ValueError(f"token_ids: found {ids.tolist()}, expected 0 to {len(weight) - 1}")
    out.copy_(weight[ids])
