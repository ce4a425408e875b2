"""paged_attention in plain torch. Defined by kernels.reference.paged_attention.

Rows in tiles of 16, context in chunks of 4 blocks: every matrix product has the same shape for any batch and any context,
and a chunk that a row does not see leaves its sums untouched.
"""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import ROWS, row_tiles, tree_sum, whole_tile

CHUNK_BLOCKS = 4
CHUNK_TOKENS = CHUNK_BLOCKS * 16


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    M = block_tables.shape[1]
    _check_rows(block_tables, row_request, row_position, len(k_pages))
    padded = torch.nn.functional.pad(block_tables.long(), (0, -M % CHUNK_BLOCKS))
    for rows in row_tiles(len(q)):
        tile = _attend(
            whole_tile(q[rows]),
            k_pages,
            v_pages,
            whole_tile(padded[row_request[rows].long()]),
            whole_tile(row_position[rows].long() + 1),
            scale,
        )
        out[rows] = tile[: rows.stop - rows.start]


def _check_rows(block_tables: Tensor, row_request: Tensor, row_position: Tensor, num_blocks: int) -> None:
    B, M = block_tables.shape
    if len(row_request) == 0:
        return
    if not 0 <= int(row_request.min()) <= int(row_request.max()) < B:
        raise ValueError(f"row_request: found {row_request.tolist()}, expected 0 to {B - 1}")
    if not 0 <= int(row_position.min()) <= int(row_position.max()) < M * 16:
        raise ValueError(f"row_position: found {row_position.tolist()}, expected 0 to {M * 16 - 1}")
    used = torch.arange(M) <= (row_position // 16)[:, None]
    blocks = block_tables[row_request.long()][used]
    if not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise ValueError(f"block_tables: found {blocks.tolist()}, expected 0 to {num_blocks - 1}")


def _attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, blocks: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """One tile: q [16, H, P], blocks [16, M up to whole chunks], lengths [16] (0 for a padding row)."""
    H, P = q.shape[1:]
    G = k_pages.shape[1]
    grouped = q.reshape(ROWS * G, H // G, P)
    chunks = -(-int(lengths.max()) // CHUNK_TOKENS)
    scores, seen_tokens, tables = [], [], []
    for n in range(chunks):
        tokens = n * CHUNK_TOKENS + torch.arange(CHUNK_TOKENS)
        seen = tokens < lengths[:, None]
        table = blocks[:, n * CHUNK_BLOCKS : (n + 1) * CHUNK_BLOCKS]
        table = torch.where(seen.view(ROWS, CHUNK_BLOCKS, 16)[..., 0], table, 0)
        keys = k_pages[table].permute(0, 2, 3, 1, 4).reshape(ROWS * G, P, CHUNK_TOKENS)
        chunk = torch.bmm(grouped, keys).view(ROWS, H, CHUNK_TOKENS) * scale
        scores.append(chunk.masked_fill(~seen[:, None], -torch.inf))
        seen_tokens.append(seen)
        tables.append(table)
    top = torch.stack([chunk.amax(dim=-1) for chunk in scores]).amax(dim=0)
    total = torch.zeros(ROWS, H)
    weighed = torch.zeros(ROWS * G, H // G, P)
    for chunk, seen, table in zip(scores, seen_tokens, tables, strict=True):
        e = torch.exp(chunk - top[..., None]).masked_fill(~seen[:, None], 0.0)
        values = v_pages[table].permute(0, 2, 1, 3, 4).reshape(ROWS, G, CHUNK_TOKENS, P)
        values = values.masked_fill(~seen[:, None, :, None], 0.0).view(ROWS * G, CHUNK_TOKENS, P)
        total = total + tree_sum(e)
        weighed = weighed + torch.bmm(e.view(ROWS * G, H // G, CHUNK_TOKENS), values)
    return weighed.view(ROWS, H, P) / total[..., None]
