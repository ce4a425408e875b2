"""Partition and proxy gate of one expert from its activations. Pure; knows no model and no file."""

from typing import NamedTuple

import torch
from torch import Tensor

from calibration.partition import PartitionSettings, contiguous, objective, order_of, part_mass, split

ACTIVE_SHARE = 0.75  # of a row's neurons count as active for co-activation, the largest
GATE_NEURONS = 4  # r, per sub-expert


class ExpertFit(NamedTuple):
    """One expert split. F width, N sub-experts.

    order      [F] int64     new place -> old neuron; each slice begins with its gate neurons
    slopes     [N] float32   with `offsets` [N]: a slice's expected mass is offset + slope * mean of its gate neurons
    objective  [2] float32   J by the mass of all rows: of the split, and of neurons as they lie
    """

    order: Tensor
    slopes: Tensor
    offsets: Tensor
    objective: Tensor


def fit_expert(
    activations: Tensor,
    settings: PartitionSettings,
    *,
    norms: Tensor | None = None,
    gate_neurons: int = GATE_NEURONS,
    ratio_only: bool = False,
) -> ExpertFit:
    """Split an expert and choose its gate neurons.

    activations  [B, F]  what the neurons gave in the calibration rows
    norms        [F]     length of each neuron's column of `down`: what its activation counts in the output; None for 1
    ratio_only   the paper's ratio of means, no offset: trusts noisy gate neurons too much (demo model, K = 4 of 16:
                 perplexity 14.86 and not 14.06)
    """
    F, N = activations.shape[1], settings.num_parts
    mass = activations.abs() if norms is None else activations.abs() * norms
    group = split(mass, settings)
    order = order_of(group, mass, N, first=centrality(activations, group, N))
    ordered = activations.abs()[:, order].unflatten(1, (N, F // N))
    proxies = ordered[..., : min(gate_neurons, F // N)].mean(-1)  # [B, N]
    slices = mass[:, order].unflatten(1, (N, F // N)).sum(-1)
    slopes, offsets = _line(proxies, slices, ratio_only)
    total = float(mass.sum()) or 1.0
    lost = [
        objective(mass, each, N, settings.num_dropped) / total for each in (group, contiguous(mass, settings))
    ]
    return ExpertFit(order, slopes, offsets, torch.tensor(lost))


def centrality(activations: Tensor, group: Tensor, num_parts: int) -> Tensor:
    """[F]: how often each neuron is active together with the others of its part."""
    num_active = max(1, round(ACTIVE_SHARE * activations.shape[1]))
    largest = activations.abs().topk(num_active, dim=1).indices
    active = torch.zeros_like(activations).scatter_(1, largest, 1.0)
    together = part_mass(active, group, num_parts)  # [B, N] active neurons of each part
    return (active * together[:, group.long()]).sum(0)


def _line(proxies: Tensor, slices: Tensor, ratio_only: bool) -> tuple[Tensor, Tensor]:
    """Least squares of slices on proxies [B, N], column by column: slopes and offsets [N], neither negative."""
    least = torch.finfo(torch.float32).tiny
    x, y = proxies.mean(0), slices.mean(0)
    if ratio_only:
        return y / x.clamp(min=least), torch.zeros_like(y)
    covariance = ((proxies - x) * (slices - y)).mean(0)
    slopes = (covariance / (proxies - x).square().mean(0).clamp(min=least)).clamp(min=0.0)
    slopes = torch.minimum(slopes, y / x.clamp(min=least))
    return slopes, y - slopes * x
