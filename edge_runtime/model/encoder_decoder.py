"""Runs an encoder-decoder: a step's rows are the encoder's or the decoder's, and each layer takes those of its half.

A request's positions are its encoder's tokens, filler up to a whole block, and then the decoder's tokens, all in one
block table. Decoder layers keep there what they attend to: at the encoder's positions keys and values of what the
encoder gave, behind them their own. Encoder layers need keys and values only while they run, which is why all rows of a
request's encoder belong to one step; what they leave in their pages is used by nobody.

A layer passes rows of the other half on untouched. So any range of layers is a stage: rows of the decoder ride along
with those of the encoder, whose last layer norms what the decoder's layers then read.

Capacity: an expert takes the first `capacity` tokens of an encoder's sequence that choose it; later ones get no expert
and pass on as they are. It is counted for each request by itself, as transformers does for each sequence without
padding, so an answer does not depend on its neighbours. Tokens of the decoder are counted one by one, as they are when
an answer is generated with a cache: a call of transformers counts the tokens of that call, which is one. An expert takes at
least one, so a decoder's token always gets its expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from edge_runtime.model.attention import AttentionBatch, AttentionRows, AttentionWeights, Pages
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.gate import gate
from edge_runtime.model.layers import Trunk
from edge_runtime.model.moe import ExpertPort, Missing, Slices
from edge_runtime.model.spec import ModelSpec
from kernels import ops
from kernels.layer_runs import SliceGate
from kernels.ops import ExpertBank
from kernels.packing import KV_BLOCK_TOKENS


class Half(NamedTuple):
    """The rows of a step that one half runs; n rows, B requests. int32 but for `rows`.

    rows          [n] int64  which rows of the step they are; None for all of them
    num_rows      n
    positions     [n]        where they stand in their half, from 0
    last_seen     [n]        the last position of their half that they attend to
    slots         [n]        where their keys and values go
    row_request   [n]
    block_tables  [B, M]     blocks of the half, in order
    """

    rows: Tensor | None
    num_rows: int
    positions: Tensor
    last_seen: Tensor
    slots: Tensor
    row_request: Tensor
    block_tables: Tensor


class TwoHalves(NamedTuple):
    """Where each row of a step stands in an encoder-decoder; see AttentionBatch.

    encoder_last    [n of the decoder]  int32, the last position of the encoder, all of which the decoder's rows attend to
    encoder_tables  [B, M] int32, blocks of the whole requests: the encoder's come first
    """

    encoder: Half
    decoder: Half
    encoder_last: Tensor
    encoder_tables: Tensor


def two_halves(batch: AttentionBatch, encoder_tokens: Tensor) -> TwoHalves:
    """Tell the rows of a step apart.

    batch           positions in the whole request
    encoder_tokens  [B] int32, tokens that each request's encoder reads
    """
    positions, slots, row_request, tables, _ = batch
    first_block = (encoder_tokens + KV_BLOCK_TOKENS - 1) // KV_BLOCK_TOKENS  # of the decoder
    count, begin = encoder_tokens[row_request], first_block[row_request] * KV_BLOCK_TOKENS
    columns = (torch.arange(tables.shape[1]) + first_block[:, None]).clamp(max=tables.shape[1] - 1)
    own_tables = tables.gather(1, columns)

    def half(is_mine: Tensor, offset: Tensor, last_seen: Tensor, its_tables: Tensor) -> Half:
        rows = None if is_mine.all() else is_mine.nonzero().view(-1)
        parts = positions - offset, last_seen, slots, row_request
        own, last, its_slots, request = parts if rows is None else (part[rows] for part in parts)
        return Half(rows, len(own), own, last, its_slots, request, its_tables)

    encoder = half(positions < count, torch.zeros_like(begin), count - 1, tables)
    decoder = half(positions >= begin, begin, positions - begin, own_tables)
    last = count - 1
    return TwoHalves(encoder, decoder, last if decoder.rows is None else last[decoder.rows], tables)


class EncoderDecoder(Decoder):
    """Layers [first_layer, last_layer) of an encoder-decoder on this node; takes TwoHalves for AttentionBatch."""

    def __init__(self, spec: ModelSpec, trunk: Trunk, pages: Pages, *, max_rows: int) -> None:
        super().__init__(spec, trunk, pages, max_rows=max_rows)
        assert spec.encoder is not None, "a model with an encoder"
        self._encoder = spec.encoder
        self._half: Half | None = None  # of the layer at hand
        self._within: Tensor | None = (
            None  # [n] int64, rows of the half that an expert had room for; None for all
        )

    def embed(self, token_ids: Tensor, batch: AttentionBatch | TwoHalves | None = None) -> Tensor:
        """See Decoder."""
        hidden = super().embed(token_ids)
        if self._trunk.encoder_embed is not None:
            assert isinstance(batch, TwoHalves), "which rows are the encoder's must be known"
            half = batch.encoder
            if half.rows is None:
                ops.embed(token_ids, self._trunk.encoder_embed, out=hidden)
            elif half.num_rows:
                side = self._buffers["side"][: half.num_rows]
                _put(hidden, half.rows, ops.embed(token_ids[half.rows], self._trunk.encoder_embed, out=side))
        return hidden

    def attention_segment(  # type: ignore[override]
        self, layer: int, hidden: Tensor, batch: TwoHalves
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See Decoder. x, expert_ids and gate_weights are of the rows `routed` alone."""
        spec, weights, eps = self._layers[layer].spec, self._layers[layer].weights, self.spec.norm_eps
        in_encoder = layer < self._encoder.num_layers
        half = self._half = batch.encoder if in_encoder else batch.decoder
        if not in_encoder and batch.encoder.num_rows:
            self._keep_encoder(layer, hidden, batch.encoder)
        self.routed, self._within = half.rows, None
        if half.num_rows == 0:
            return hidden[:0], None, None
        rows = self._rows(half.num_rows)
        own = _taken(hidden, half.rows, rows.side)
        self._attend_own(layer, own, half)
        if not in_encoder:
            self._attend_encoder(layer, own, batch)
        if half.rows is not None:
            _put(hidden, half.rows, own)
        ops.rms_norm(own, weights.post_norm, eps, out=rows.x)
        if weights.gate is None:
            return rows.x, None, None
        assert spec.gate is not None, f"layer {layer} has gate weights but its spec has no gate"
        expert_ids, gate_weights = gate(
            spec.gate, weights.gate, rows.x, logits=rows.gate_logits, out=rows.chosen
        )
        capacity = spec.gate.capacity
        if not in_encoder or capacity is None or half.num_rows <= capacity:
            return rows.x, expert_ids, gate_weights
        within = _within_capacity(expert_ids.view(-1), half.row_request, spec.gate.num_experts, capacity)
        if within.all():
            return rows.x, expert_ids, gate_weights
        kept = self._within = within.nonzero().view(-1)
        self.routed = kept if half.rows is None else half.rows[kept]
        return rows.x[kept], expert_ids[kept], gate_weights[kept]

    def layer_in_run(self, layer: int, bank: ExpertBank | None, slices: SliceGate | None) -> None:
        """Never: a layer takes the rows of its half."""

    def gate_logits(self, num_rows: int) -> Tensor:
        """See Decoder."""
        if self._within is None:
            return super().gate_logits(num_rows)
        assert self._half is not None and len(self._within) == num_rows, "of the rows that were routed"
        return super().gate_logits(self._half.num_rows)[self._within]

    def moe_segment(
        self,
        layer: int,
        hidden: Tensor,
        x: Tensor,
        expert_ids: Tensor | None,
        gate_weights: Tensor | None,
        port: ExpertPort,
        slices: Slices | None = None,
    ) -> Missing | None:
        """See Decoder."""
        assert slices is None, "the experts of an encoder-decoder stay whole"
        weights, half, missing = self._layers[layer].weights, self._half, None
        assert half is not None, "attention comes first"
        if len(x):
            rows = self._rows(len(x))
            own = _taken(hidden, self.routed, rows.branch)
            if expert_ids is None or gate_weights is None:
                self._dense(weights, x, rows)
                own.add_(rows.dense_out)
            else:
                missing = self._experts(layer, own, x, expert_ids, gate_weights, port, None)
            if self.routed is not None:
                _put(hidden, self.routed, own)
        if weights.closing_norm is not None and half.num_rows:
            given = _taken(hidden, half.rows, self._buffers["side"][: half.num_rows])
            ops.rms_norm(given, weights.closing_norm, self.spec.norm_eps, out=given)
            if half.rows is not None:
                _put(hidden, half.rows, given)
        return missing

    def _attend_own(self, layer: int, hidden: Tensor, half: Half) -> None:
        """hidden [n, D] += attention to the half's own tokens, by distance."""
        spec, weights, pages = self._layers[layer][:3]
        rows = self._rows(half.num_rows)
        part, attention = rows.attention[layer], weights.attention
        assert isinstance(part, AttentionRows) and isinstance(attention, AttentionWeights)
        assert attention.relative_bias is not None, "both halves have a relative bias"
        ops.rms_norm(hidden, weights.input_norm, self.spec.norm_eps, out=rows.x)
        ops.linear(rows.x, attention.qkv, out=part.projected)
        ops.kv_write(part.k, part.v, *pages, half.slots)
        ops.biased_attention(
            part.q,
            *pages,
            half.block_tables,
            half.row_request,
            half.last_seen,
            spec.attention.scale,
            attention.relative_bias,
            half.positions,
            out=part.mixed,
        )
        ops.linear(part.mixed_rows, attention.out, out=hidden, add=True)

    def _attend_encoder(self, layer: int, hidden: Tensor, batch: TwoHalves) -> None:
        """hidden [n, D] += attention to all that the encoder gave."""
        spec, weights, pages = self._layers[layer][:3]
        rows, cross = self._rows(hidden.shape[0]), weights.cross
        part = rows.attention[layer]
        assert isinstance(part, AttentionRows) and cross is not None, "decoder layers attend to the encoder"
        queries = part.mixed_rows  # and the projection's buffer for the mixture: both are free again
        mixed = rows.scratch[: queries.numel()].view(part.mixed.shape)
        ops.rms_norm(hidden, cross.norm, self.spec.norm_eps, out=rows.x)
        ops.linear(rows.x, cross.q, out=queries)
        ops.paged_attention(
            part.mixed,
            *pages,
            batch.encoder_tables,
            batch.decoder.row_request,
            batch.encoder_last,
            spec.attention.scale,
            out=mixed,
        )
        ops.linear(mixed.view(queries.shape), cross.out, out=hidden, add=True)

    def _keep_encoder(self, layer: int, hidden: Tensor, encoder: Half) -> None:
        """Write keys and values of what the encoder gave, for the decoder's rows of this step and all later ones."""
        _, weights, pages = self._layers[layer][:3]
        rows, cross = self._rows(encoder.num_rows), weights.cross
        part = rows.attention[layer]
        assert isinstance(part, AttentionRows) and cross is not None, "decoder layers attend to the encoder"
        given = _taken(hidden, encoder.rows, rows.side)
        kv = rows.scratch[: 2 * part.mixed_rows.numel()].view(encoder.num_rows, -1)
        ops.linear(given, cross.kv, out=kv)
        keys, values = kv.unflatten(1, (2, *part.mixed.shape[1:])).unbind(1)
        ops.kv_write(keys, values, *pages, encoder.slots)


def decoder_of(
    spec: ModelSpec, trunk: Trunk, pages: Pages, *, max_rows: int, counts: Tensor | None = None
) -> Decoder:
    """What runs a model's layers. counts: see Decoder; not for models with an encoder."""
    if spec.encoder is None:
        return Decoder(spec, trunk, pages, max_rows=max_rows, counts=counts)
    assert counts is None, "a model with an encoder counts no choices"
    return EncoderDecoder(spec, trunk, pages, max_rows=max_rows)


def _taken(hidden: Tensor, rows: Tensor | None, buffer: Tensor) -> Tensor:
    """Some rows of hidden, copied to a buffer; hidden itself if they are all."""
    return hidden if rows is None else torch.index_select(hidden, 0, rows, out=buffer)


def _put(hidden: Tensor, rows: Tensor, values: Tensor) -> None:
    hidden.index_copy_(0, rows, values)


def _within_capacity(expert_ids: Tensor, row_request: Tensor, num_experts: int, capacity: int) -> Tensor:
    """[n] bool: whether fewer than `capacity` earlier rows of the request chose the row's expert."""
    key = row_request.long() * num_experts + expert_ids.long()
    order = torch.argsort(key, stable=True)
    _, counts = torch.unique_consecutive(key[order], return_counts=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first.repeat_interleave(counts)
    return rank < capacity
