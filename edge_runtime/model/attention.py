"""One layer's attention over paged keys and values, for every family by its AttentionSpec.

Knows rows, slots and block tables, not who asked for them.
"""

from collections.abc import Mapping
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from edge_runtime.model.spec import AttentionSpec
from kernels import ops
from kernels.ops import HeadsWeight, LinearWeight


class AttentionBatch(NamedTuple):
    """Where each row of a step stands; the same for all layers. All int32.

    positions     [T]     position of the row in its request, from 0
    slots         [T]     where its key and value go: block * 16 + offset
    row_request   [T]     index of its request, a row of `block_tables`
    block_tables  [B, M]  the requests' blocks in order; entries beyond a request's last block are not read
    counted       [T]     0 for rows whose choice of experts is not counted in their block (a prompt's are); None: all 0
    """

    positions: Tensor
    slots: Tensor
    row_request: Tensor
    block_tables: Tensor
    counted: Tensor | None = None


class Pages(Protocol):
    """The keys and values of an engine's layers, by the layer's number in the model."""

    def k(self, layer: int) -> Tensor:
        """[num_blocks, G, P, 16] float32; on a GPU see `KVPages`."""

    def v(self, layer: int) -> Tensor:
        """[num_blocks, G, 16, value width] float32."""


class AttentionWeights(NamedTuple):
    """One layer's attention with keys and values of their own, or of another layer. Vectors are float32."""

    qkv: LinearWeight  # [(H + 2 G) P, D], queries above keys above values; without values or without both where so
    out: LinearWeight  # [D, H P]
    rope: tuple[Tensor, Tensor]  # cos and sin, [S, P/2]
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None  # [D]
    q_norm: Tensor | None = None  # [P], or [H P] over the whole projection
    k_norm: Tensor | None = None  # [P], or [G P]
    sinks: Tensor | None = None  # [H]
    relative_bias: Tensor | None = None  # [H, 2 * max_distance + 1], see `relative_bias`


class LatentWeights(NamedTuple):
    """One layer's latent attention: C latent, R turned, A plain, U value width, Q query rank. Vectors are float32."""

    down: LinearWeight  # [H (A + R) + C + R, D], or [Q + C + R, D] if queries have a latent too
    out: LinearWeight  # [D, H U]
    rope: tuple[Tensor, Tensor]  # cos and sin, [S, R/2]
    kv_latent_norm: Tensor  # [C]
    to_latent: HeadsWeight  # H of [C, A]: a plain query into the latent, so that no key is rebuilt
    from_latent: HeadsWeight  # H of [U, C]: a mixture of latents into the head's value
    q_latent_norm: Tensor | None = None  # [Q]
    q_up: LinearWeight | None = None  # [H (A + R), Q]
    down_bias: Tensor | None = None
    out_bias: Tensor | None = None  # [D]


class AttentionRows(NamedTuple):
    """The buffers of one step's T rows of a layer with its own heads: views of one allocation, made once per T."""

    projected: Tensor  # [T, (H + 2 G) P] or fewer, what the projection writes
    clipped: Tensor  # [T, (H + 2 G) P] or H P, all three
    q: Tensor  # [T, H, P], in projected
    k: Tensor  # [T, G, P], in projected
    v: Tensor  # [T, G, P], in projected or behind it
    q_rows: Tensor  # [T, H P], the same memory as q
    k_rows: Tensor  # [T, G P], the same memory as k
    mixed: Tensor  # [T, H, P]
    mixed_rows: Tensor  # [T, H P], the same memory


class LatentRows(NamedTuple):
    """The buffers of one step's T rows of latent attention."""

    down: Tensor  # [T, Q + C + R] or [T, H (A + R) + C + R]
    q_latent: Tensor  # [T, Q], in down
    q_rows: Tensor  # [T, H (A + R)], in down if queries have no latent
    q: Tensor  # [T, H, A + R], the same memory
    latent: Tensor  # [T, C], in down
    k: Tensor  # [T, 1, C + R], in down
    v: Tensor  # [T, 1, C], in down
    absorbed: Tensor  # [T, H, C + R], queries as the latent sees them
    mixed: Tensor  # [T, H, C]
    values: Tensor  # [T, H, U]
    value_rows: Tensor  # [T, H U], the same memory


def attention_floats(spec: AttentionSpec) -> int:
    """Float32 numbers per row that a layer's attention needs as buffers."""
    return sum(_latent_widths(spec) if spec.latent else _head_widths(spec))


def attention_rows(spec: AttentionSpec, buffer: Tensor, num_rows: int) -> AttentionRows | LatentRows:
    """Name the parts of a buffer for a layer: [at least num_rows * attention_floats(spec)] float32."""
    widths = _latent_widths(spec) if spec.latent else _head_widths(spec)
    ends = pairwise(accumulate((num_rows * width for width in widths), initial=0))
    sections = [buffer[a:b].view(num_rows, -1) if b > a else buffer[a:b] for a, b in ends]
    return _latent_rows(spec, *sections) if spec.latent else _head_rows(spec, *sections)


def _head_widths(spec: AttentionSpec) -> tuple[int, int]:
    num_heads = spec.num_heads + (0 if spec.kv_shared_with is not None else 2 * spec.num_kv_heads)
    return num_heads * spec.head_width, spec.num_heads * spec.head_width


def _head_rows(spec: AttentionSpec, qkv: Tensor, mixed: Tensor) -> AttentionRows:
    H, G, P = spec.num_heads, spec.num_kv_heads, spec.head_width
    G = 0 if spec.kv_shared_with is not None else G
    q, k, v = qkv.split([H * P, G * P, G * P], dim=1)
    written = qkv[:, : (H + G) * P] if spec.values_are_keys else qkv
    return AttentionRows(
        projected=written,
        clipped=qkv,
        q=q.unflatten(1, (H, P)),
        k=k.unflatten(1, (G, P)),
        v=v.unflatten(1, (G, P)),
        q_rows=q,
        k_rows=k,
        mixed=mixed.unflatten(1, (H, P)),
        mixed_rows=mixed,
    )


def _latent_widths(spec: AttentionSpec) -> tuple[int, int, int, int, int]:
    assert spec.latent is not None, "only latent attention has these"
    H, C, R, rank = spec.num_heads, spec.latent.width, spec.rotary_width, spec.latent.query_rank
    queries = H * spec.head_width
    first, second = (queries, 0) if rank is None else (rank, queries)
    return first + C + R, second, H * (C + R), H * C, spec.mixed_width


def _latent_rows(
    spec: AttentionSpec, down: Tensor, q_up: Tensor, absorbed: Tensor, mixed: Tensor, values: Tensor
) -> LatentRows:
    assert spec.latent is not None, "only latent attention has these"
    H, C, R = spec.num_heads, spec.latent.width, spec.rotary_width
    first, kv = down.split([down.shape[1] - C - R, C + R], dim=1)
    q_rows = first if spec.latent.query_rank is None else q_up
    return LatentRows(
        down=down,
        q_latent=first,
        q_rows=q_rows,
        q=q_rows.unflatten(1, (H, spec.head_width)),
        latent=kv[:, :C],
        k=kv.unflatten(1, (1, C + R)),
        v=kv[:, :C].unflatten(1, (1, C)),
        absorbed=absorbed.unflatten(1, (H, C + R)),
        mixed=mixed.unflatten(1, (H, C)),
        values=values.unflatten(1, (H, -1)),
        value_rows=values,
    )


def attend(
    spec: AttentionSpec,
    weights: AttentionWeights | LatentWeights,
    x: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    rows: AttentionRows | LatentRows,
    *,
    pages: tuple[Tensor, Tensor],
    norm_eps: float,
    add: bool,
    options: Mapping[str, Any],
) -> None:
    """out = attention(x), or out += it with `add`; the rows' keys and values are in their pages afterwards.

    x        [T, D] float32, normed
    out      [T, D] float32, the residual with `add`
    rows     buffers, overwritten
    pages    of keys and of values
    options  what `paged_options` gave
    """
    if isinstance(weights, LatentWeights):
        assert isinstance(rows, LatentRows), "rows made by another spec"
        mixed = _attend_latent(spec, weights, x, batch, rows, pages, options)
    else:
        assert isinstance(rows, AttentionRows), "rows made by another spec"
        mixed = _attend_heads(spec, weights, x, batch, rows, pages, options, norm_eps)
    ops.linear(mixed, weights.out, bias=weights.out_bias, out=out, add=add)


def _attend_heads(
    spec: AttentionSpec,
    weights: AttentionWeights,
    x: Tensor,
    batch: AttentionBatch,
    rows: AttentionRows,
    pages: tuple[Tensor, Tensor],
    options: Mapping[str, Any],
    norm_eps: float,
) -> Tensor:
    """[T, H P], before the output projection."""
    cos, sin = weights.rope
    has_keys = spec.kv_shared_with is None
    ops.linear(x, weights.qkv, bias=weights.qkv_bias, out=rows.projected)
    if spec.values_are_keys and has_keys:
        rows.v.copy_(rows.k)
    q_norm, k_norm = weights.q_norm, weights.k_norm
    if spec.qk_norm == "projection":
        ops.rms_norm(rows.q_rows, q_norm, norm_eps, out=rows.q_rows)
        ops.rms_norm(rows.k_rows, k_norm, norm_eps, out=rows.k_rows)
        q_norm = k_norm = None
    if spec.clip is not None:
        rows.clipped.clamp_(-spec.clip, spec.clip)
    interleaved = spec.interleaved
    ops.head_norm_rope(rows.q, q_norm, norm_eps, cos, sin, batch.positions, interleaved=interleaved)
    if has_keys:
        ops.head_norm_rope(rows.k, k_norm, norm_eps, cos, sin, batch.positions, interleaved=interleaved)
        if spec.value_norm:
            unturned = cos[:, :0]
            ops.head_norm_rope(
                rows.v, _ones(spec.head_width, x.device), norm_eps, unturned, unturned, batch.positions
            )
        ops.kv_write(rows.k, rows.v, *pages, batch.slots)
    _paged(spec, rows.q, pages, batch, rows.mixed, options)
    return rows.mixed_rows


def _attend_latent(
    spec: AttentionSpec,
    weights: LatentWeights,
    x: Tensor,
    batch: AttentionBatch,
    rows: LatentRows,
    pages: tuple[Tensor, Tensor],
    options: Mapping[str, Any],
) -> Tensor:
    """[T, H U], before the output projection.

    A key is W_k c for a head's matrix W_k and the token's latent c, so q . (W_k c) = (W_k^T q) . c: queries are taken
    into the latent and all heads attend to the same short keys, which are also the values before W_v.
    """
    assert spec.latent is not None, "latent weights belong to a latent spec"
    eps, plain, C = spec.latent.norm_eps, spec.latent.plain_width, spec.latent.width
    q_turned, k_turned = rows.absorbed[..., C:], rows.k[..., C:]
    ops.linear(x, weights.down, out=rows.down)
    if weights.down_bias is not None:
        rows.down[:, -len(weights.down_bias) :].add_(weights.down_bias)
    if weights.q_up is not None:
        assert weights.q_latent_norm is not None, "a query latent has a norm"
        ops.rms_norm(rows.q_latent, weights.q_latent_norm, eps, out=rows.q_latent)
        ops.linear(rows.q_latent, weights.q_up, out=rows.q_rows)
    ops.rms_norm(rows.latent, weights.kv_latent_norm, eps, out=rows.latent)
    ops.linear_heads(rows.q[..., :plain], weights.to_latent, out=rows.absorbed[..., :C])
    q_turned.copy_(rows.q[..., plain:])
    for part in (q_turned, k_turned):
        ops.head_norm_rope(part, None, 0.0, *weights.rope, batch.positions, interleaved=spec.interleaved)
    ops.kv_write(rows.k, rows.v, *pages, batch.slots)
    _paged(spec, rows.absorbed, pages, batch, rows.mixed, options)
    ops.linear_heads(rows.mixed, weights.from_latent, out=rows.values)
    return rows.value_rows


def _paged(
    spec: AttentionSpec,
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: AttentionBatch,
    out: Tensor,
    options: Mapping[str, Any],
) -> None:
    rows = batch.block_tables, batch.row_request, batch.positions
    ops.paged_attention(q, *pages, *rows, spec.scale, out=out, **options)


def paged_options(spec: AttentionSpec, weights: AttentionWeights | LatentWeights) -> dict[str, Any]:
    """The arguments of paged attention that plain causal attention does not need."""
    sinks = weights.sinks if isinstance(weights, AttentionWeights) else None
    found = {"window": spec.window, "sinks": sinks, "soft_cap": spec.soft_cap}
    return {name: value for name, value in found.items() if value is not None}


@cache
def _ones(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, device=device)
