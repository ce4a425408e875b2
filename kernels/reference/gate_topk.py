"""gate_topk: which experts a token goes to, and how much each counts."""

import torch
from torch import Tensor

from kernels.reference.chain import lane_sum


def gate_topk(logits: Tensor, k: int, renormalise: bool, ids: Tensor, weights: Tensor) -> None:
    """Choose the k largest logits of each row; weigh them by the softmax over all experts, in float32.

    logits   [T, E]  float32
    ids      [T, k]  int32, best first, ties to the lowest id
    weights  [T, k]  float32; with `renormalise` divided by their sum

    The logits decide, not the rounded probabilities: two logits that differ never tie.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]
    e = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    chosen = e.gather(-1, order) / lane_sum(e)[:, None]
    if renormalise:
        total = torch.zeros(len(logits))
        for j in range(k):
            total = total + chosen[:, j]
        chosen = chosen / total[:, None]
    ids.copy_(order)
    weights.copy_(chosen)
