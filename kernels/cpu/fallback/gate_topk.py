"""gate_topk in plain torch. Defined by kernels.reference.gate_topk."""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import tree_sum
from kernels.reference.gate_topk import LEAST_SUM, GateRule, choose, finish


def gate_topk(
    logits: Tensor,
    k: int,
    rule: GateRule,
    counts: Tensor | None,
    count_rows: Tensor | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    if counts is not None and count_rows is not None and len(count_rows):
        lowest, highest = int(count_rows.min()), int(count_rows.max())
        if lowest < -1 or highest >= len(counts):
            raise ValueError(f"count_rows: found {count_rows.tolist()}, expected -1 to {len(counts) - 1}")
    if rule.scores == "sigmoid":
        score = 1.0 / (1.0 + torch.exp(-logits))
    else:
        score = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        if rule.scores == "softmax":
            score = score / tree_sum(score)[:, None]
    chosen, order = choose(logits, score, k, rule)
    if rule.renormalise or rule.scores == "softmax_of_top_k":
        chosen = chosen / tree_sum(chosen).clamp(min=LEAST_SUM)[:, None]
    finish(chosen, order, rule, counts, count_rows, ids, weights)
