"""gate_topk: which experts a token goes to, and how much each counts."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.chain import lane_sum

SCORES = ("softmax", "softmax_of_top_k", "sigmoid")
LEAST_SUM = 1e-20
"""What weights are divided by at least: sigmoids of very low logits may all be 0."""


class GateRule(NamedTuple):
    """How a gate chooses and weighs, with the defaults of the Mixtral and Qwen families."""

    renormalise: bool = True
    scores: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    expert_scale: Tensor | None = None
    selection_bias: Tensor | None = None


def gate_topk(
    logits: Tensor,
    k: int,
    rule: GateRule,
    counts: Tensor | None,
    count_rows: Tensor | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Choose k experts for each row by score, in float32; weigh them; count them.

    logits      [T, E]  float32
    counts      [n, E]  int8 or int32, or None: counts[count_rows[t], id] += 1 for every choice of row t
    count_rows  [T]     int32; -1: not counted; outside [-1, n): ValueError
    ids         [T, k]  int32, best first, ties to the lowest id
    weights     [T, k]  float32

    Scores are the softmax over all experts, sigmoids, or e^(logit - highest) (`softmax_of_top_k`: divided by the sum over
    the chosen). Without a selection bias the logits decide, not the rounded scores: two logits that differ never tie. With
    one, score + bias decides and the score weighs. Of the groups the best `top_groups` may be chosen from: a group counts
    by its best expert, with a bias by the sum of its best two; ties to the lowest group. Then: divided by the sum of the
    chosen, in order of choice and at least LEAST_SUM (if `renormalise`); times `scale`; times `expert_scale` of the chosen.
    """
    T = len(logits)
    if counts is not None and count_rows is not None:
        check_count_rows(count_rows, len(counts))
    if rule.scores == "sigmoid":
        score = 1.0 / (1.0 + torch.exp(-logits))
    else:
        score = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        if rule.scores == "softmax":
            score = score / lane_sum(score)[:, None]
    chosen, order = choose(logits, score, k, rule)
    if rule.renormalise or rule.scores == "softmax_of_top_k":
        total = torch.zeros(T)
        for j in range(k):
            total = total + chosen[:, j]
        chosen = chosen / total.clamp(min=LEAST_SUM)[:, None]
    finish(chosen, order, rule, counts, count_rows, ids, weights)


def check_count_rows(count_rows: Tensor, num_rows: int) -> None:
    """ValueError for a row of counts that does not exist."""
    for t, row in enumerate(count_rows.tolist()):
        if not -1 <= row < num_rows:
            raise ValueError(f"count_rows: entry {t} is {row}, expected -1 to {num_rows - 1}")


def choose(logits: Tensor, score: Tensor, k: int, rule: GateRule) -> tuple[Tensor, Tensor]:
    """Scores and ids [T, k] of the chosen."""
    T, E = logits.shape
    pick = logits if rule.selection_bias is None else score + rule.selection_bias
    allowed = torch.ones(T, E, dtype=torch.bool)
    if rule.num_groups > 1:
        groups = pick.view(T, rule.num_groups, E // rule.num_groups)
        best = groups.sort(dim=-1, descending=True).values
        value = best[..., 0] if rule.selection_bias is None else best[..., :2].sum(dim=-1)
        order = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        open_groups = torch.zeros(T, rule.num_groups, dtype=torch.bool).scatter_(1, order, True)
        allowed = open_groups.repeat_interleave(E // rule.num_groups, dim=1)
    # By value among the allowed, then the others: -inf alone would not keep a masked expert behind a closed group's.
    first = torch.sort(pick, dim=-1, descending=True, stable=True).indices
    behind = torch.sort(~allowed.gather(-1, first), dim=-1, stable=True).indices
    order = first.gather(-1, behind)[:, :k]
    return score.gather(-1, order), order


def finish(
    chosen: Tensor,
    order: Tensor,
    rule: GateRule,
    counts: Tensor | None,
    count_rows: Tensor | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Scale, write and count the chosen."""
    chosen = chosen * rule.scale
    if rule.expert_scale is not None:
        chosen = chosen * rule.expert_scale[order]
    ids.copy_(order)
    weights.copy_(chosen)
    if counts is not None and count_rows is not None:
        counted = count_rows >= 0
        at = count_rows[counted].long()[:, None].expand(-1, order.shape[1])
        ones = torch.ones_like(order[counted], dtype=counts.dtype)
        counts.index_put_((at, order[counted]), ones, accumulate=True)
