"""The search for a partition of an expert's neurons: checks, and the compiled loop where there is one.

Meant for calibration, which runs some 100,000 swaps per expert. Defined by kernels.reference.swap_search.
"""

import torch
from torch import Tensor

from kernels.reference.swap_search import Searched
from kernels.reference.swap_search import swap_search as plain_search

LANES = 16
MOST_PARTS = 8


def swap_search(
    mass: Tensor, group: Tensor, num_parts: int, dropped: int, swaps: Tensor, tolerances: Tensor
) -> Searched:
    """See the reference. The compiled loop leaves the GIL to others."""
    F = mass.shape[0]
    if not 1 <= dropped < num_parts <= MOST_PARTS:
        raise ValueError(
            f"dropped, num_parts: found {dropped}, {num_parts}, expected 1 <= dropped < num_parts <= {MOST_PARTS}"
        )
    if group.shape != (F,) or swaps.shape != (2, len(tolerances)):
        found = f"group {list(group.shape)}, swaps {list(swaps.shape)}, tolerances {list(tolerances.shape)}"
        raise ValueError(f"{found}: expected [{F}], [2, I] and [I]")
    try:
        from kernels.cpu import compiled
    except ImportError:
        return plain_search(mass, group, num_parts, dropped, swaps, tolerances)
    rows = -(-mass.shape[1] // LANES) * LANES
    padded = torch.zeros(F, rows)
    padded[:, : mass.shape[1]] = mass
    group = group.clone()
    best_group, changes = torch.empty_like(group), torch.empty(len(tolerances))
    loads = torch.zeros(num_parts, rows).index_add_(0, group.long(), padded)
    one, other = swaps.contiguous()
    objective = compiled.swap_search(
        padded,
        one,
        other,
        tolerances,
        group,
        best_group,
        loads,
        torch.empty(2, rows),
        changes,
        dropped,
    )
    if objective is None:
        raise AssertionError("swap_search: the compiled loop declined arguments that passed the checks")
    first, best = objective
    return Searched(best_group, first, best, changes)
