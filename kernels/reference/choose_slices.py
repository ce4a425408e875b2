"""choose_slices: which slices of a token's experts run at its tier, by what a few gate neurons foretell."""

import torch
from torch import Tensor


def slice_scores(gate_weights: Tensor, activations: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """Expected mass of every slice of the chosen experts: [T, k0, N].

    gate_weights     [T, k0]        float32, normalised as trained
    activations      [T, k0, N, r]  float32, of the gate neurons
    slopes, offsets  [T, k0, N]     float32, a slice's mass by the mean of its gate neurons, from calibration
    """
    return gate_weights[..., None] * (offsets + slopes * activations.abs().mean(-1))


def best_first(scores: Tensor) -> Tensor:
    """The order in which slices are kept: [T, k0, N] -> places [T, k0 * N] int64. See best_slices."""
    first = scores[:, 0].argmax(-1, keepdim=True)
    raised = scores.clone()
    raised[:, 0].scatter_(1, first, torch.inf)
    return raised.flatten(1).argsort(dim=1, descending=True, stable=True)


def best_slices(scores: Tensor, tiers: Tensor) -> Tensor:
    """The best `tiers` [T] of each token's slices: scores [T, k0, N] -> kept [T, k0, N] bool.

    One slice of the gate's first choice is always among them. Ties go to the better expert, then to the slice that lies
    first, which is the heavier one. A tier of k0 * N or more keeps all.
    """
    order = best_first(scores)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return (rank < tiers[:, None]).view_as(scores)


def dropped_mass(gate_weights: Tensor, scores: Tensor, kept: Tensor) -> Tensor:
    """Expected share of each token's gate weight that is left out: [T] float32, 0 at full tier.

    An expert's weight counts in proportion to the expected mass of its slices that do not run.
    """
    total = scores.sum(-1)
    left_out = scores.masked_fill(kept, 0.0).sum(-1)
    return (gate_weights * left_out / total.clamp(min=torch.finfo(torch.float32).tiny)).sum(-1)


def dropped_shares(gate_weights: Tensor, scores: Tensor) -> Tensor:
    """Share of each token's gate weight that goes with each slice: [T, k0, N]. See dropped_mass."""
    total = scores.sum(-1, keepdim=True)
    return gate_weights[..., None] * scores / total.clamp(min=torch.finfo(torch.float32).tiny)


def choose_slices(
    activations: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    slopes: Tensor,
    offsets: Tensor,
    tiers: Tensor,
    masks: Tensor,
    dropped: Tensor,
) -> None:
    """Choose each row's slices.

    activations      [T*k0, N*r]  float32, the gate neurons of each routed slot, slice after slice
    expert_ids       [T, k0]      int32, best first
    gate_weights     [T, k0]      float32
    slopes, offsets  [E, N]       float32
    tiers            [T]          int32, slices of the row; k0 * N or more: all
    masks            [T, k0]      int32, written: bit s for slice s
    dropped          [T]          float32, written: see dropped_mass
    """
    T, k0 = expert_ids.shape
    N, ids = slopes.shape[1], expert_ids.long()
    found = activations.view(T, k0, N, activations.shape[1] // N)
    scores = slice_scores(gate_weights, found, slopes[ids], offsets[ids])
    kept = best_slices(scores, tiers)
    masks.copy_((kept.int() << torch.arange(N, dtype=torch.int32, device=kept.device)).sum(-1))
    dropped.copy_(dropped_mass(gate_weights, scores, kept))
