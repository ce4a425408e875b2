"""A decoder with pages and block tables for a few sequences: steps of pieces in, logits of every row out."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from edge_runtime.cache.pages import KVPages
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.moe import ExpertPort, ExpertStore, LocalExperts
from edge_runtime.model.spec import ModelSpec
from topology.ids import ExpertId

BLOCK = 16


def all_experts(spec: ModelSpec) -> list[ExpertId]:
    """Every routed expert of a model."""
    layers = [(index, layer.gate) for index, layer in enumerate(spec.layers) if layer.gate]
    return [ExpertId(index, i) for index, gate in layers for i in range(gate.num_experts)]


class Sequences:
    """Up to `num_sequences` sequences, run over the whole model in one or more stages.

    Their blocks lie interleaved and in falling order, so that nothing works by accident of neighbourhood.

    cuts   layers at which the model is cut into stages, each a decoder with pages of its own
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_sequences: int = 1,
        context_tokens: int = 128,
        max_rows: int = 256,
        cuts: Sequence[int] = (),
        port: ExpertPort | None = None,
        store: ExpertStore | None = None,
        counts: Tensor | None = None,
        trunk_format: str = "as_stored",
    ) -> None:
        spec = checkpoint.spec
        if port is None:
            port = LocalExperts(store or load_experts(checkpoint, spec, all_experts(spec)))
        self.port = port
        blocks_each = -(-context_tokens // BLOCK)
        num_blocks = blocks_each * num_sequences
        tables = torch.arange(num_blocks, dtype=torch.int32).flip(0).view(blocks_each, num_sequences).T
        self.block_tables = tables.contiguous()
        self.lengths = [0] * num_sequences
        bounds = [0, *cuts, spec.num_layers]
        self.decoders = []
        for first, last in pairwise(bounds):
            trunk = load_trunk(
                checkpoint, spec, first, last, context_tokens=context_tokens, trunk_format=trunk_format
            )
            pages = KVPages(num_blocks, spec.kv_shapes(first, last))
            self.decoders.append(Decoder(spec, trunk, pages, max_rows=max_rows, counts=counts))

    def batch(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> tuple[Tensor, AttentionBatch]:
        """Token ids and places of a step's rows; the sequences are longer by them afterwards."""
        ids, positions, slots, requests = [], [], [], []
        for sequence, piece in pieces:
            for token_id in piece:
                position = self.lengths[sequence]
                block = int(self.block_tables[sequence, position // BLOCK])
                ids.append(token_id)
                positions.append(position)
                slots.append(block * BLOCK + position % BLOCK)
                requests.append(sequence)
                self.lengths[sequence] += 1
        rows = (torch.tensor(values, dtype=torch.int32) for values in (ids, positions, slots, requests))
        token_ids, row_positions, row_slots, row_request = rows
        return token_ids, AttentionBatch(row_positions, row_slots, row_request, self.block_tables)

    def step(
        self, pieces: Sequence[tuple[int, Sequence[int]]], counted: Tensor | None = None
    ) -> list[Tensor]:
        """Run one step of (sequence, next token ids) pieces: for each piece the logits of its rows, [n, V]."""
        rows, batch = self.batch(pieces)
        batch = batch._replace(counted=counted)
        for decoder in self.decoders:
            rows = decoder.run(rows, batch, self.port)
        logits = self.decoders[-1].head(rows).clone()
        return list(logits.split([len(piece) for _, piece in pieces]))

    def whole(self, token_ids: Sequence[int], sequence: int = 0) -> Tensor:
        """Logits of a fresh sequence in one step."""
        return self.step([(sequence, token_ids)])[0]
