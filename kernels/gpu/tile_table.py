"""The tile table: routed rows sorted by expert, and one line per (expert, run of rows) for the grouped products.

Built on the device in one launch, with a fixed grid and no word to the host, so it may stand in a captured graph.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_R = 1024
ONE_LAUNCH_ROWS = (
    16384  # more routed rows than this: sorted by torch, since every program would read them all
)


class TileTable(NamedTuple):
    """`pairs` [R] int32 routed rows in order of expert; `tiles` [max_tiles, 3] int32 expert, first place in `pairs`, count.

    R = 5, experts [2, 0, 2, 2, 0], 2 rows to a tile: pairs [1, 4, 0, 2, 3], tiles [0, 0, 2], [2, 2, 2], [2, 4, 1].
    Lines behind the last tile have count 0.
    """

    pairs: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=["R", "E", "max_tiles"])
def tile_table_kernel(
    ids_ptr,  # [R] int32
    addresses_ptr,  # [E] int64
    pairs_ptr,  # [R] int32
    tiles_ptr,  # [max_tiles, 3] int32
    missing_ptr,  # [1] int32
    R,
    E,
    max_tiles,
    TILE_ROWS: tl.constexpr,
    BINS: tl.constexpr,  # power of two above E; the last bin takes rows without an expert
    BLOCK_R: tl.constexpr,
):
    # One program per expert. Each counts all rows, which tells it where its own begin.
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), dtype=tl.int32)
    absent = tl.zeros((BLOCK_R,), dtype=tl.int32)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        ids = tl.load(ids_ptr + r, mask=r < R, other=-1)
        wanted = (ids >= 0) & (ids < E)
        here = wanted & (tl.load(addresses_ptr + ids, mask=wanted, other=0) != 0)
        absent = tl.maximum(absent, tl.where((ids >= 0) & (here == 0), ids + 1, 0))
        counts += tl.histogram(tl.where(here, ids, BINS - 1), BINS)
    tile_counts = (counts + TILE_ROWS - 1) // TILE_ROWS
    mine = tl.sum(tl.where(bins == expert, counts, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0))
    first_tile = tl.sum(tl.where(bins < expert, tile_counts, 0))
    num_tiles = (mine + TILE_ROWS - 1) // TILE_ROWS
    for i in range(num_tiles):
        line = tiles_ptr + (first_tile + i) * 3
        tl.store(line, expert)
        tl.store(line + 1, first + i * TILE_ROWS)
        tl.store(line + 2, tl.minimum(TILE_ROWS, mine - i * TILE_ROWS))
    if expert == E - 1:
        for t0 in range(first_tile + num_tiles, max_tiles, BINS):
            tl.store(
                tiles_ptr + (t0 + bins) * 3 + 2, tl.zeros((BINS,), dtype=tl.int32), mask=t0 + bins < max_tiles
            )
        worst = tl.max(absent, axis=0)
        if worst > 0:
            tl.store(missing_ptr, worst)
    if mine > 0:
        place = first
        for r0 in range(0, R, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            is_mine = (tl.load(ids_ptr + r, mask=r < R, other=-1) == expert).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(is_mine, axis=0) - 1, r, mask=is_mine != 0)
            place += tl.sum(is_mine)


def max_tiles(R: int, E: int, tile_rows: int) -> int:
    """No routing of R rows to E experts needs more tiles."""
    return min(R, E) + R // tile_rows


def tile_table(expert_ids: Tensor, addresses: Tensor, missing: Tensor, tile_rows: int) -> TileTable:
    """Sort routed rows by expert, keeping their order within one. Ids of -1 and of absent experts get no tile.

    expert_ids  [R] int32
    addresses   [E] int64, 0: not resident; asking for it sets missing [1] to the id + 1
    """
    R, E = len(expert_ids), len(addresses)
    limit = max_tiles(R, E, tile_rows)
    pairs = torch.empty(R, dtype=torch.int32, device=expert_ids.device)
    tiles = torch.empty(limit, 3, dtype=torch.int32, device=expert_ids.device)
    if R > ONE_LAUNCH_ROWS:
        _sorted_by_torch(expert_ids, addresses, missing, tile_rows, pairs, tiles)
    else:
        tile_table_kernel[(E,)](
            expert_ids,
            addresses,
            pairs,
            tiles,
            missing,
            R,
            E,
            limit,
            TILE_ROWS=tile_rows,
            BINS=triton.next_power_of_2(E + 1),
            BLOCK_R=min(BLOCK_R, triton.next_power_of_2(R)),
        )
    return TileTable(pairs, tiles)


def _sorted_by_torch(
    ids: Tensor, addresses: Tensor, missing: Tensor, tile_rows: int, pairs: Tensor, tiles: Tensor
) -> None:
    """The same table by torch calls on the whole batch, no loop and no word to the host."""
    E = len(addresses)
    wanted = (ids >= 0) & (ids < E)
    here = wanted & (addresses[ids.clamp(0, E - 1).long()] != 0)
    missing.copy_(torch.maximum(missing, torch.where((ids >= 0) & ~here, ids + 1, 0).max()))
    bins = torch.where(here, ids, E)
    pairs.copy_(bins.argsort(stable=True))
    counts = torch.zeros(E + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, bins.long(), torch.ones_like(bins, dtype=torch.int64))[:E]
    first = counts.cumsum(0) - counts
    tile_counts = (counts + tile_rows - 1) // tile_rows
    ends = tile_counts.cumsum(0)
    place = torch.arange(len(tiles), device=ids.device)
    expert = torch.searchsorted(ends, place, right=True).clamp(max=E - 1)
    done = (place - (ends - tile_counts)[expert]) * tile_rows
    tiles[:, 0] = expert
    tiles[:, 1] = first[expert] + done
    tiles[:, 2] = torch.where(place < ends[-1], (counts[expert] - done).clamp(max=tile_rows), 0)
