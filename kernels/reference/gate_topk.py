"""gate_topk: which experts a token goes to, and how much each counts."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.packing import KV_BLOCK_TOKENS
from kernels.reference.chain import lane_sum

SCORES = ("softmax", "softmax_of_top_k", "sigmoid")
LEAST_SUM = 1e-20
"""What weights are divided by at least: sigmoids of very low logits may all be 0."""


class Counting(NamedTuple):
    """Where a step's choices are counted: in the row of each token's KV block, so that a block carries its counts along.

    counts   [num_blocks, E]  int8 or int32, rows may be strided
    slots    [T]  int32, block * 16 + offset of each row, as in kv_write; -1: nowhere
    counted  [T]  int32, 0 for rows that are not counted

    First a block that a row begins (offset 0, counted or not) is set to 0: whatever it counted before was another's. Then
    every choice of a counted row adds 1. A block has 16 rows that choose an expert at most once each, so int8 is enough.
    """

    counts: Tensor
    slots: Tensor
    counted: Tensor


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
    counting: Counting | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Choose k experts for each row by score, in float32; weigh them; count them.

    logits    [T, E]  float32
    counting  see Counting; a slot outside [-1, num_blocks * 16) is a ValueError, and nothing is counted
    ids       [T, k]  int32, best first, ties to the lowest id
    weights   [T, k]  float32

    Scores are the softmax over all experts, sigmoids, or e^(logit - highest) (`softmax_of_top_k`: divided by the sum over
    the chosen). Without a selection bias the logits decide, not the rounded scores: two logits that differ never tie. With
    one, score + bias decides and the score weighs. Of the groups the best `top_groups` may be chosen from: a group counts
    by its best expert, with a bias by the sum of its best two; ties to the lowest group. Then: divided by the sum of the
    chosen, in order of choice and at least LEAST_SUM (if `renormalise`); times `scale`; times `expert_scale` of the chosen.
    """
    T = len(logits)
    if counting is not None:
        check_slots(counting)
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
    finish(chosen, order, rule, counting, ids, weights)


def check_slots(counting: Counting) -> None:
    """ValueError for a slot of a block that has no counts."""
    most = len(counting.counts) * KV_BLOCK_TOKENS
    for t, slot in enumerate(counting.slots.tolist()):
        if not -1 <= slot < most:
            raise ValueError(f"slots: entry {t} is {slot}, expected -1 to {most - 1}")


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
    counting: Counting | None,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Scale, write and count the chosen."""
    chosen = chosen * rule.scale
    if rule.expert_scale is not None:
        chosen = chosen * rule.expert_scale[order]
    ids.copy_(order)
    weights.copy_(chosen)
    if counting is not None:
        count(order, *counting)


def count(order: Tensor, counts: Tensor, slots: Tensor, counted: Tensor) -> None:
    """Count choices order [T, k] int64: see Counting."""
    blocks = slots.long() // KV_BLOCK_TOKENS
    counts[blocks[(slots >= 0) & (slots % KV_BLOCK_TOKENS == 0)]] = 0
    some = (slots >= 0) & (counted != 0)
    at = blocks[some][:, None].expand(-1, order.shape[1])
    counts.index_put_((at, order[some]), torch.ones_like(at, dtype=counts.dtype), accumulate=True)
