"""One layer's attention over paged keys and values. Knows rows, slots and block tables, not who asked for them."""

from typing import NamedTuple, Protocol

from torch import Tensor

from edge_runtime.model.spec import AttentionSpec
from kernels import ops
from kernels.ops import LinearWeight


class AttentionBatch(NamedTuple):
    """Where each row of a step stands; the same for all layers. All int32.

    positions     [T]     position of the row in its request, from 0
    slots         [T]     where its key and value go: block * 16 + offset
    row_request   [T]     index of its request, a row of `block_tables`
    block_tables  [B, M]  the requests' blocks in order; entries beyond a request's last block are not read
    """

    positions: Tensor
    slots: Tensor
    row_request: Tensor
    block_tables: Tensor


class Pages(Protocol):
    """The keys and values of an engine's layers, by the layer's number in the model."""

    def k(self, layer: int) -> Tensor:
        """[num_blocks, G, P, 16] float32."""

    def v(self, layer: int) -> Tensor:
        """[num_blocks, G, 16, P] float32."""


class AttentionWeights(NamedTuple):
    """One layer's attention."""

    qkv: LinearWeight  # [(H + 2 G) P, D], queries above keys above values
    qkv_bias: Tensor | None  # [(H + 2 G) P] float32
    out: LinearWeight  # [D, H P]
    out_bias: Tensor | None  # [D] float32
    q_norm: Tensor | None  # [P] float32
    k_norm: Tensor | None  # [P] float32


class AttentionRows(NamedTuple):
    """The buffers of one step's T rows: views of one allocation, made once per T."""

    qkv: Tensor  # [T, (H + 2 G) P]
    q: Tensor  # [T, H, P], in qkv
    k: Tensor  # [T, G, P], in qkv
    v: Tensor  # [T, G, P], in qkv
    mixed: Tensor  # [T, H, P]
    mixed_rows: Tensor  # [T, H P], the same memory


def attention_rows(spec: AttentionSpec, qkv: Tensor, mixed: Tensor) -> AttentionRows:
    """Name the parts of two buffers: qkv [T, (H + 2 G) P] and mixed [T, H P], float32."""
    H, G, P = spec.num_heads, spec.num_kv_heads, spec.head_width
    q, k, v = (part.unflatten(1, (-1, P)) for part in qkv.split([H * P, G * P, G * P], dim=1))
    return AttentionRows(qkv, q, k, v, mixed.unflatten(1, (H, P)), mixed)


def attend(
    weights: AttentionWeights,
    x: Tensor,
    hidden: Tensor,
    batch: AttentionBatch,
    rows: AttentionRows,
    *,
    k_pages: Tensor,
    v_pages: Tensor,
    rope: tuple[Tensor, Tensor],
    norm_eps: float,
    scale: float,
) -> None:
    """hidden += attention(x); the rows' keys and values are in their pages afterwards.

    x        [T, D] float32, normed
    hidden   [T, D] float32, the residual
    rows     buffers, overwritten
    rope     cos and sin, [S, P/2] float32
    """
    cos, sin = rope
    ops.linear(x, weights.qkv, out=rows.qkv)
    if weights.qkv_bias is not None:
        rows.qkv.add_(weights.qkv_bias)
    ops.head_norm_rope(rows.q, weights.q_norm, norm_eps, cos, sin, batch.positions)
    ops.head_norm_rope(rows.k, weights.k_norm, norm_eps, cos, sin, batch.positions)
    ops.kv_write(rows.k, rows.v, k_pages, v_pages, batch.slots)
    ops.paged_attention(
        rows.q,
        k_pages,
        v_pages,
        batch.block_tables,
        batch.row_request,
        batch.positions,
        scale,
        out=rows.mixed,
    )
    ops.linear(rows.mixed_rows, weights.out, out=hidden, add=True)
    if weights.out_bias is not None:
        hidden.add_(weights.out_bias)
