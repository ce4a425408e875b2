"""gate_topk in plain torch. Defined by kernels.reference.gate_topk."""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import tree_sum


def gate_topk(logits: Tensor, k: int, renormalise: bool, ids: Tensor, weights: Tensor) -> None:
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    e = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    chosen = e.gather(-1, order) / tree_sum(e)[:, None]
    if renormalise:
        chosen = chosen / tree_sum(chosen)[:, None]
    ids.copy_(order)
    weights.copy_(chosen)
