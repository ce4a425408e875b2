"""paged_attention and biased_attention: attention of rows over their requests' blocks."""

import torch
from torch import Tensor

from kernels.reference.chain import chain, lane_sum


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
    """Let row t attend to positions 0..row_position[t] of request row_request[t], prefill and decode rows alike.

    q             [T, H, P]                float32; rows and heads may be strided
    k_pages       [num_blocks, G, P, 16]   float32
    v_pages       [num_blocks, G, 16, Pv]  float32
    block_tables  [B, M]                   int32, blocks of each request in order; entries that no row sees are not read
    row_request   [T]                      int32
    row_position  [T]                      int32
    scale                                  applied to finished scores
    window                                 a row sees at most this many last positions, its own included; None: all
    sinks         [H]                      float32 or None: one more logit of the softmax, not scaled, without a value
    soft_cap                               scaled scores s become soft_cap * tanh(s / soft_cap); None: they stay
    out           [T, H, Pv]               float32

    Query head h reads kv head h * G // H. Scores are chains over p, outputs chains over tokens in order of the
    unnormalised probabilities, divided by their sum at the end. What stands in unused lanes of a block is never used.
    Values that point nowhere (request, position, block): ValueError.
    """
    heads_per_group = q.shape[1] // k_pages.shape[1]
    for t, (request, position) in enumerate(zip(row_request.tolist(), row_position.tolist(), strict=True)):
        if not 0 <= request < len(block_tables):
            raise ValueError(f"row_request: entry {t} is {request}, expected 0 to {len(block_tables) - 1}")
        if not 0 <= position < block_tables.shape[1] * 16:
            limit = block_tables.shape[1] * 16 - 1
            raise ValueError(f"row_position: entry {t} is {position}, expected 0 to {limit}")
        begin = 0 if window is None else max(0, position + 1 - window)
        blocks = block_tables[request, begin // 16 : position // 16 + 1].long()
        if not 0 <= int(blocks.min()) <= int(blocks.max()) < len(k_pages):
            raise ValueError(f"block_tables: found {blocks.tolist()}, expected 0 to {len(k_pages) - 1}")
        first = begin % 16
        length = position + 1 - begin // 16 * 16
        for h in range(q.shape[1]):
            g = h // heads_per_group
            keys = k_pages[blocks, g].permute(0, 2, 1).reshape(-1, q.shape[2])[:length]
            values = v_pages[blocks, g].reshape(-1, v_pages.shape[3])[first:length]
            scores = chain(q[t, h][None], keys)[0] * scale
            if bias is not None and own_position is not None:
                scores = scores + bias[h, bias_columns(bias, own_position[t], torch.arange(length))]
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            top = scores[first:].max() if sinks is None else torch.maximum(scores[first:].max(), sinks[h])
            unnormalised = torch.exp(scores - top)
            unnormalised[:first] = 0.0
            total = lane_sum(unnormalised)
            if sinks is not None:
                total = total + torch.exp(sinks[h] - top)
            out[t, h] = chain(unnormalised[None, first:], values.T)[0] / total


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
    """Like `paged_attention`, with a number per head and distance added to the scaled scores.

    row_position  [T]           int32, the last position that a row sees
    bias          [H, 2 m + 1]  float32: column m + d for a position d behind the row's own; beyond m, that of m
    own_position  [T]           int32, where the row itself stands, before or behind what it sees
    """
    rows = block_tables, row_request, row_position, scale, None, None, None, out
    paged_attention(q, k_pages, v_pages, *rows, bias, own_position)


def bias_columns(bias: Tensor, own_position: Tensor, positions: Tensor) -> Tensor:
    """The column of `bias` for each of `positions`, seen from `own_position`; int64, broadcast."""
    most = bias.shape[1] // 2
    return (positions - own_position).clamp(-most, most).long() + most
