"""Partition and proxy gate of one expert from its activations. Pure; knows no model and no file."""

from typing import NamedTuple

import torch
from torch import Tensor

from calibration.partition import PartitionSettings, contiguous, objective, order_of, part_mass, split

ACTIVE_SHARE = 0.75  # of a row's neurons count as active for co-activation, the largest
GATE_NEURONS = 4  # r, per sub-expert


class ExpertFit(NamedTuple):
    """One expert split. F width, N sub-experts.

    order        [F] int64   new place -> old neuron; each slice begins with its gate neurons
    ratios       [N] float32 mean mass of a slice by the mean activation of its gate neurons
    objective    J of the split, and of neurons as they lie, both by the mass of all rows
    """

    order: Tensor
    ratios: Tensor
    objective: float
    objective_contiguous: float


def fit_expert(
    activations: Tensor,
    settings: PartitionSettings,
    *,
    norms: Tensor | None = None,
    gate_neurons: int = GATE_NEURONS,
) -> ExpertFit:
    """Split an expert and choose its gate neurons.

    activations  [B, F]  what the neurons gave in the calibration rows
    norms        [F]     length of each neuron's column of `down`: what its activation counts in the output; None for 1
    """
    F, N = activations.shape[1], settings.num_parts
    mass = activations.abs() if norms is None else activations.abs() * norms
    group = split(mass, settings)
    order = order_of(group, mass, N, first=centrality(activations, group, N))
    ordered = activations.abs()[:, order].unflatten(1, (N, F // N))
    proxies = ordered[..., : min(gate_neurons, F // N)].mean(-1)  # [B, N]
    slices = mass[:, order].unflatten(1, (N, F // N)).sum(-1)
    ratios = slices.mean(0) / proxies.mean(0).clamp(min=torch.finfo(torch.float32).tiny)
    total = float(mass.sum()) or 1.0
    lost = [
        objective(mass, each, N, settings.num_dropped) / total
        for each in (group, contiguous(mass, settings))
    ]
    return ExpertFit(order, ratios, *lost)


def centrality(activations: Tensor, group: Tensor, num_parts: int) -> Tensor:
    """[F]: how often each neuron is active together with the others of its part."""
    F = activations.shape[1]
    num_active = max(1, round(ACTIVE_SHARE * F))
    active = torch.zeros_like(activations).scatter_(
        1, activations.abs().topk(num_active, dim=1).indices, 1.0
    )
    together = part_mass(active, group, num_parts)  # [B, N] active neurons of each part
    return (active * together[:, group.long()]).sum(0)
