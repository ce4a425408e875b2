"""gate_topk in plain torch. Defined by kernels.reference.gate_topk."""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import tree_sum
from kernels.reference.gate_topk import LEAST_SUM, Counting, GateRule, check_slots, choose, finish


def gate_topk(
    logits: Tensor,
    k: int,
    rule: GateRule,
    counting: Counting | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    if counting is not None:
        check_slots(counting)
    if rule.scores == "sigmoid":
        score = 1.0 / (1.0 + torch.exp(-logits))
    else:
        score = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        if rule.scores == "softmax":
            score = score / tree_sum(score)[:, None]
    chosen, order = choose(logits, score, k, rule)
    if rule.renormalise or rule.scores == "softmax_of_top_k":
        chosen = chosen / tree_sum(chosen).clamp(min=LEAST_SUM)[:, None]
    finish(chosen, order, rule, counting, ids, weights)
