"""paged_attention and biased_attention in plain torch. Defined by kernels.reference.paged_attention.

Rows in tiles of 16, context in chunks of 4 blocks: every matrix product has the same shape for any batch and any context,
and a chunk that a row does not see leaves its sums untouched.
"""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import ROWS, row_tiles, tanh, tree_sum, whole_tile
from kernels.reference.paged_attention import bias_columns

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
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    out: Tensor,
    bias: Tensor | None = None,
    own_position: Tensor | None = None,
) -> None:
    M = block_tables.shape[1]
    begins = (
        (row_position.long() + 1 - window).clamp(min=0) if window else torch.zeros(len(q), dtype=torch.int64)
    )
    _check_rows(block_tables, row_request, begins, row_position, len(k_pages))
    padded = torch.nn.functional.pad(block_tables.long(), (0, -M % CHUNK_BLOCKS))
    for rows in row_tiles(len(q)):
        tile = _attend(
            whole_tile(q[rows]),
            k_pages,
            v_pages,
            whole_tile(padded[row_request[rows].long()]),
            whole_tile(begins[rows]),
            whole_tile(row_position[rows].long() + 1),
            scale,
            sinks,
            soft_cap,
            bias,
            None if own_position is None else whole_tile(own_position[rows]),
        )
        out[rows] = tile[: rows.stop - rows.start]


def biased_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    bias: Tensor,
    own_position: Tensor,
    out: Tensor,
) -> None:
    rows = block_tables, row_request, row_position, scale, None, None, None, out
    paged_attention(q, k_pages, v_pages, *rows, bias, own_position)


def _check_rows(
    block_tables: Tensor, row_request: Tensor, begins: Tensor, row_position: Tensor, num_blocks: int
) -> None:
    B, M = block_tables.shape
    if len(row_request) == 0 or torch.compiler.is_compiling():  # nothing is known of values then
        return
    if not 0 <= int(row_request.min()) <= int(row_request.max()) < B:
        raise ValueError(f"row_request: found {row_request.tolist()}, expected 0 to {B - 1}")
    if not 0 <= int(row_position.min()) <= int(row_position.max()) < M * 16:
        raise ValueError(f"row_position: found {row_position.tolist()}, expected 0 to {M * 16 - 1}")
    used = (torch.arange(M) <= (row_position // 16)[:, None]) & (torch.arange(M) >= (begins // 16)[:, None])
    blocks = block_tables[row_request.long()][used]
    if not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise ValueError(f"block_tables: found {blocks.tolist()}, expected 0 to {num_blocks - 1}")


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    blocks: Tensor,
    begins: Tensor,
    lengths: Tensor,
    scale: float,
    sinks: Tensor | None,
    soft_cap: float | None,
    bias: Tensor | None,
    own_position: Tensor | None,
) -> Tensor:
    """One tile: q [16, H, P], blocks [16, M up to whole chunks], tokens begins [16] to lengths [16] (0: padding row)."""
    H, P = q.shape[1:]
    G, Pv = k_pages.shape[1], v_pages.shape[3]
    grouped = q.reshape(ROWS * G, H // G, P)
    chunks = blocks.shape[1] // CHUNK_BLOCKS
    if not torch.compiler.is_compiling():  # chunks that nobody sees leave sums as they are
        chunks = -(-int(lengths.max()) // CHUNK_TOKENS)
    scores, seen_tokens, tables = [], [], []
    for n in range(chunks):
        tokens = n * CHUNK_TOKENS + torch.arange(CHUNK_TOKENS)
        seen = (tokens < lengths[:, None]) & (tokens >= begins[:, None])
        table = blocks[:, n * CHUNK_BLOCKS : (n + 1) * CHUNK_BLOCKS]
        table = torch.where(seen.view(ROWS, CHUNK_BLOCKS, 16).any(dim=-1), table, 0)
        keys = k_pages[table].permute(0, 2, 3, 1, 4).reshape(ROWS * G, P, CHUNK_TOKENS)
        chunk = torch.bmm(grouped, keys).view(ROWS, H, CHUNK_TOKENS) * scale
        if bias is not None and own_position is not None:
            chunk = chunk + bias[:, bias_columns(bias, own_position[:, None], tokens)].transpose(0, 1)
        if soft_cap is not None:
            chunk = soft_cap * tanh(chunk / soft_cap)
        scores.append(chunk.masked_fill(~seen[:, None], -torch.inf))
        seen_tokens.append(seen)
        tables.append(table)
    top = torch.stack([chunk.amax(dim=-1) for chunk in scores]).amax(dim=0)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = torch.zeros(ROWS, H)
    weighed = torch.zeros(ROWS * G, H // G, Pv)
    for chunk, seen, table in zip(scores, seen_tokens, tables, strict=True):
        e = torch.exp(chunk - top[..., None]).masked_fill(~seen[:, None], 0.0)
        values = v_pages[table].permute(0, 2, 1, 3, 4).reshape(ROWS, G, CHUNK_TOKENS, Pv)
        values = values.masked_fill(~seen[:, None, :, None], 0.0).view(ROWS * G, CHUNK_TOKENS, Pv)
        total = total + tree_sum(e)
        weighed = weighed + torch.bmm(e.view(ROWS * G, H // G, CHUNK_TOKENS), values)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return weighed.view(ROWS, H, Pv) / total[..., None]
