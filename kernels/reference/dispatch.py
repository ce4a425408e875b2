"""dispatch: routed pairs grouped by the host of their expert."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Dispatched(NamedTuple):
    """Pairs (token, column) of a step, grouped by host. All int32; the offsets in numpy, since only Python reads them."""

    pairs: Tensor
    """[R] flat index t * K + j, grouped by host, in order within one."""
    offsets: NDArray[np.int32]
    """[num_hosts + 1] where each host's pairs begin."""
    rows: Tensor
    """[sum of unique rows] the tokens each host needs, once each, ascending within one."""
    row_offsets: NDArray[np.int32]
    """[num_hosts + 1] where each host's rows begin."""
    pair_rows: Tensor
    """[R] index of each pair's token among its host's rows."""


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    """Group pairs by host, and name the token rows each host needs.

    expert_ids      [T, K]  int32; outside [0, E): ValueError
    host_of_expert  [E]     int32, 0..num_hosts-1, or -1 for nobody: such pairs appear in no group

    T=2, K=2, expert_ids [[0, 1], [1, 2]], hosts [0, 1, 0]: pairs [0, 3, 1, 2], offsets [0, 2, 4],
    rows [0, 1, 0, 1], row_offsets [0, 2, 4], pair_rows [0, 1, 0, 1].
    """
    E = len(host_of_expert)
    for i, expert in enumerate(expert_ids.flatten().tolist()):
        if not 0 <= expert < E:
            raise ValueError(f"expert_ids: entry {i} is {expert}, expected 0 to {E - 1}")
    for i, host in enumerate(host_of_expert.tolist()):
        if not -1 <= host < num_hosts:
            raise ValueError(f"host_of_expert: entry {i} is {host}, expected -1 to {num_hosts - 1}")
    K = expert_ids.shape[1]
    hosts = [int(host_of_expert[e]) for e in expert_ids.flatten().tolist()]
    pairs: list[int] = []
    rows: list[int] = []
    pair_rows: list[int] = []
    offsets, row_offsets = [0], [0]
    for n in range(num_hosts):
        mine = [pair for pair, host in enumerate(hosts) if host == n]
        unique = sorted({pair // K for pair in mine})
        pairs += mine
        rows += unique
        pair_rows += [unique.index(pair // K) for pair in mine]
        offsets.append(len(pairs))
        row_offsets.append(len(rows))
    return Dispatched(
        torch.tensor(pairs, dtype=torch.int32),
        np.array(offsets, dtype=np.int32),
        torch.tensor(rows, dtype=torch.int32),
        np.array(row_offsets, dtype=np.int32),
        torch.tensor(pair_rows, dtype=torch.int32),
    )
