"""Which sub-experts of a token's experts run at tier K: the training-free proxy gate. Pure.

The native gate has chosen k0 experts. A few gate neurons per sub-expert tell how much it would give for this token; the
K sub-experts with the largest expected share of the layer's output run, with the weights that the gate gave their experts.
"""

import torch
from torch import Tensor


def slice_scores(gate_weights: Tensor, activations: Tensor, slopes: Tensor, offsets: Tensor) -> Tensor:
    """Expected mass of every sub-expert of the chosen experts: [T, k0, N].

    gate_weights     [T, k0]        float32, normalised as trained
    activations      [T, k0, N, r]  float32, of the gate neurons
    slopes, offsets  [T, k0, N]     float32, a sub-expert's mass by the mean of its gate neurons, from calibration
    """
    return gate_weights[..., None] * (offsets + slopes * activations.abs().mean(-1))


def choose_slices(scores: Tensor, tiers: Tensor) -> Tensor:
    """The best `tiers` [T] of each token's sub-experts: scores [T, k0, N] -> kept [T, k0, N] bool.

    One sub-expert of the gate's first choice is always among them. Ties go to the better expert, then to the sub-expert
    that lies first, which is the heavier one. A tier of k0 * N or more keeps all.
    """
    first = scores[:, 0].argmax(-1, keepdim=True)
    raised = scores.clone()
    raised[:, 0].scatter_(1, first, torch.inf)
    order = raised.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
    return (rank < tiers[:, None]).view_as(scores)


def dropped_mass(gate_weights: Tensor, scores: Tensor, kept: Tensor) -> Tensor:
    """Expected share of each token's gate weight that is left out: [T] float32, 0 at full tier.

    An expert's weight counts in proportion to the expected mass of its sub-experts that do not run.
    """
    total = scores.sum(-1)
    left_out = scores.masked_fill(kept, 0.0).sum(-1)
    return (gate_weights * left_out / total.clamp(min=torch.finfo(torch.float32).tiny)).sum(-1)
