"""dispatch in plain torch. Defined by kernels.reference.dispatch."""

import torch
from torch import Tensor

from kernels.reference.dispatch import Dispatched


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    T, K = expert_ids.shape
    E = len(host_of_expert)
    flat = expert_ids.flatten().long()
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < E:
        raise ValueError(f"expert_ids: found {flat.tolist()}, expected 0 to {E - 1}")
    if E and not -1 <= int(host_of_expert.min()) <= int(host_of_expert.max()) < num_hosts:
        raise ValueError(f"host_of_expert: found {host_of_expert.tolist()}, expected -1 to {num_hosts - 1}")
    host = host_of_expert.long()[flat]
    order = torch.sort(host, stable=True).indices
    pairs = order[host[order] >= 0]
    key = host[pairs] * T + pairs // K  # ascending: by host, then by token
    rows, place = torch.unique_consecutive(key, return_inverse=True)
    row_host = rows // max(T, 1)
    edges = torch.arange(num_hosts + 1)
    offsets = torch.searchsorted(host[pairs], edges)
    row_offsets = torch.searchsorted(row_host, edges)
    pair_rows = place - row_offsets[host[pairs]]
    return Dispatched(
        pairs.int(),
        offsets.int().numpy(),
        (rows - row_host * T).int(),
        row_offsets.int().numpy(),
        pair_rows.int(),
    )
