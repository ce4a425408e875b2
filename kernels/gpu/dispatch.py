"""dispatch in Triton. Defined by kernels.reference.dispatch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.dispatch import Dispatched

BLOCK_T = 128


@triton.jit
def to_host(ids_ptr, hosts_ptr, t0, T, host, K: tl.constexpr, K_PAD: tl.constexpr, BLOCK_T: tl.constexpr):
    # Which pairs of BLOCK_T tokens go to this host: int32 [BLOCK_T, K_PAD].
    t = (t0 + tl.arange(0, BLOCK_T))[:, None]
    k = tl.arange(0, K_PAD)[None, :]
    mask = (t < T) & (k < K)
    ids = tl.load(ids_ptr + t * K + k, mask=mask, other=0)
    return (tl.load(hosts_ptr + ids, mask=mask, other=-1) == host).to(tl.int32)


@triton.jit(do_not_specialize=["T"])
def count_kernel(
    ids_ptr,  # [T, K] int32
    hosts_ptr,  # [E] int32
    counts_ptr,  # [2, num_hosts] int32: pairs, tokens
    T,
    num_hosts,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # One program per host.
    host = tl.program_id(0)
    pairs = tl.zeros((BLOCK_T,), dtype=tl.int32)
    tokens = tl.zeros((BLOCK_T,), dtype=tl.int32)
    for t0 in range(0, T, BLOCK_T):
        mine = tl.sum(to_host(ids_ptr, hosts_ptr, t0, T, host, K, K_PAD, BLOCK_T), axis=1)
        pairs += mine
        tokens += tl.minimum(mine, 1)
    tl.store(counts_ptr + host, tl.sum(pairs))
    tl.store(counts_ptr + num_hosts + host, tl.sum(tokens))


@triton.jit(do_not_specialize=["T"])
def place_kernel(
    ids_ptr,
    hosts_ptr,
    offsets_ptr,  # [2, num_hosts + 1] int32: where each host's pairs and tokens begin
    pairs_ptr,
    rows_ptr,
    pair_rows_ptr,
    T,
    num_hosts,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # One program per host. Places run on in order of the tokens, so every group is stable.
    host = tl.program_id(0)
    first_pair = tl.load(offsets_ptr + host)
    first_row = tl.load(offsets_ptr + num_hosts + 1 + host)
    done = 0
    for t0 in range(0, T, BLOCK_T):
        mine = to_host(ids_ptr, hosts_ptr, t0, T, host, K, K_PAD, BLOCK_T)
        of_token = tl.sum(mine, axis=1)
        has = tl.minimum(of_token, 1)
        row = done + tl.cumsum(has, axis=0) - has
        t = t0 + tl.arange(0, BLOCK_T)
        tl.store(rows_ptr + first_row + row, t, mask=has != 0)
        before = tl.cumsum(of_token, axis=0) - of_token
        place = first_pair + before[:, None] + tl.cumsum(mine, axis=1) - mine
        pair = t[:, None] * K + tl.arange(0, K_PAD)[None, :]
        tl.store(pairs_ptr + place, pair, mask=mine != 0)
        tl.store(pair_rows_ptr + place, tl.broadcast_to(row[:, None], (BLOCK_T, K_PAD)), mask=mine != 0)
        first_pair += tl.sum(of_token)
        done += tl.sum(has)


class OnDevice(NamedTuple):
    """`Dispatched` whose offsets are on the device too, and whose lists [T * K] mean nothing behind the last offset."""

    pairs: Tensor
    offsets: Tensor
    rows: Tensor
    row_offsets: Tensor
    pair_rows: Tensor


def dispatch_on_device(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> OnDevice:
    """`dispatch` without a word to the host."""
    T, K = expert_ids.shape
    device = expert_ids.device
    counts = torch.zeros(2, num_hosts, dtype=torch.int32, device=device)
    constants = {"K": K, "K_PAD": triton.next_power_of_2(K), "BLOCK_T": BLOCK_T}
    count_kernel[(num_hosts,)](expert_ids, host_of_expert, counts, T, num_hosts, **constants)
    offsets = torch.zeros(2, num_hosts + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, dim=1, dtype=torch.int32, out=offsets[:, 1:])
    pairs, rows, pair_rows = (torch.empty(T * K, dtype=torch.int32, device=device) for _ in range(3))
    place_kernel[(num_hosts,)](
        expert_ids, host_of_expert, offsets, pairs, rows, pair_rows, T, num_hosts, **constants
    )
    return OnDevice(pairs, offsets[0], rows, offsets[1], pair_rows)


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    """Group the pairs of expert_ids [T, K] by host_of_expert [E]; pairs of host -1 appear in no group. Waits for the device."""
    pairs, offsets, rows, row_offsets, pair_rows = dispatch_on_device(expert_ids, host_of_expert, num_hosts)
    ends, row_ends = offsets.cpu().numpy(), row_offsets.cpu().numpy()
    num_pairs, num_rows = int(ends[-1]), int(row_ends[-1])
    return Dispatched(pairs[:num_pairs], ends, rows[:num_rows], row_ends, pair_rows[:num_pairs])
