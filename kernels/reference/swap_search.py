"""swap_search: neurons change places between the parts of a partition, as long as the objective allows."""

from typing import NamedTuple

import torch
from torch import Tensor


class Searched(NamedTuple):
    """What a search found. group [F] int32 at its best; objective at first and at the best; changes [I] float32."""

    group: Tensor
    first: float
    best: float
    changes: Tensor


def swap_search(
    mass: Tensor, group: Tensor, num_parts: int, dropped: int, swaps: Tensor, tolerances: Tensor
) -> Searched:
    """Try swaps one after another; make those that change the objective by less than their tolerance.

    mass        [F, B]  float32, what each neuron carries in each row
    group       [F]     int32, the part of each neuron, 0 .. num_parts - 1
    dropped             parts that a row does without: the objective is the sum over rows of the `dropped` lightest
    swaps       [2, I]  int32, pairs of neurons; nothing happens to a pair of one part
    tolerances  [I]     float32, 0 for downhill only
    """
    group = group.clone()
    loads = torch.stack([mass[group == part].sum(0) for part in range(num_parts)])
    cost = loads.sort(0).values[:dropped].sum(0)
    now = first = best = float(cost.sum())
    best_group = group.clone()
    changes = torch.zeros(swaps.shape[1])
    for i, (j, k) in enumerate(swaps.T.tolist()):
        a, b = int(group[j]), int(group[k])
        if a == b:
            continue
        moved = mass[k] - mass[j]
        tried = loads.clone()
        tried[a] += moved
        tried[b] -= moved
        tried_cost = tried.sort(0).values[:dropped].sum(0)
        changes[i] = (tried_cost - cost).sum()
        if not changes[i] < tolerances[i]:
            continue
        loads, cost, now = tried, tried_cost, now + float(changes[i])
        group[j], group[k] = b, a
        if now < best:
            best, best_group = now, group.clone()
    return Searched(best_group, first, best, changes)
