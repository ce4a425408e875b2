"""linear and embed in plain torch. Defined by kernels.reference.linear, whose unpacked weight they use."""

from collections.abc import Sequence

from torch import Tensor

from kernels.cpu.fallback.tiles import product
from kernels.reference.formats import Codes, decode


def linear(x: Tensor, weight: Tensor | Codes, bias: Tensor | None, out: Tensor, add: bool) -> None:
    finished = product(x, weight)
    if bias is not None:
        finished += bias
    if add:
        out.add_(finished)
    else:
        out.copy_(finished)


def linear_heads(x: Tensor, weights: Sequence[Tensor | Codes], out: Tensor) -> None:
    for h, weight in enumerate(weights):
        linear(x[:, h], weight, None, out[:, h], False)


def embed(token_ids: Tensor, weight: Tensor | Codes, out: Tensor) -> None:
    ids = token_ids.long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise ValueError(f"token_ids: found {ids.tolist()}, expected 0 to {weight.shape[0] - 1}")
    if isinstance(weight, Codes):
        out.copy_(decode(weight._replace(values=weight.values[ids], scales=weight.scales[ids])))
    else:
        out.copy_(weight[ids])
