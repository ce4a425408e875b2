"""Segments on a CPU: buffers made once per key, and layers between which nobody is asked as one prepared native call.

Attention and gate of a layer are one native call, and so are its experts: a segment has nothing left to compile. What is
left is the list: neighbouring layers whose experts are all here run without a return to Python, with the same bits. Other
kernels join no layers, and no segment is made here: see `captured`. Knows the Decoder, and of the port which layers are
here; knows no request.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.elastic.gates import TierGates
from edge_runtime.engine.graphs import ExpertsKey, SegmentTable, Span, budget_of, spans_of
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.decoder import Decoder
from kernels.layer_runs import LayerRun, Ran, RunLayer, bind_layers
from kernels.ops import ExpertBank

MOST_ROWS = 64
"""Rows of a step whose segments are kept; longer steps are prompts, of any length, and take long anyway."""


class AttentionSegment:
    """What T rows are computed in, whatever their budget. Views of the decoder's buffers, which all shapes share."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.rows = rows
        self.buffers = decoder.run_buffers(rows)

    @property
    def nbytes(self) -> int:
        """Bytes that a step of this shape needs."""
        return sum(tensor.nbytes for tensor in self.buffers)


class ExpertsSegment:
    """What depends on the budget too: L layers, T rows, K columns.

    sliced  tiers [L, T] int32, slices of each row, masks [T, K] int32 and dropped [L, T] float32; None where experts run whole
    """

    def __init__(self, key: ExpertsKey, num_layers: int, num_columns: int) -> None:
        self.key = key
        self.sliced: tuple[Tensor, Tensor, Tensor] | None = None
        if key.budget:
            tiers, masks = (
                torch.zeros(shape, dtype=torch.int32)
                for shape in ((num_layers, key.rows), (key.rows, num_columns))
            )
            self.sliced = tiers, masks, torch.zeros(num_layers, key.rows)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.sliced or ())


class PreparedSpan(NamedTuple):
    """Layers [first, last), and the call that runs them all; None: layer by layer, since others may be asked."""

    span: Span
    run: LayerRun | None


class PreparedSteps:
    """The segments of one decoder.

    gates  who chooses slices; None where experts are whole
    joins  neighbouring layers run as one call, where they can
    """

    def __init__(self, decoder: Decoder, gates: TierGates | None, *, joins: bool = True) -> None:
        self._decoder, self.gates, self.joins = decoder, gates, joins
        self._banks: Mapping[int, ExpertBank] | None = None
        self._spans: list[PreparedSpan] = []
        self._last: tuple[object, int, ExpertsSegment | None] = (
            None,
            0,
            None,
        )  # tiers, and the segment that has them
        first, last = decoder.first_layer, decoder.last_layer
        self._layers = range(first, last)
        self._one_by_one = [PreparedSpan(Span(layer, layer + 1, False), None) for layer in range(first, last)]
        self.table: SegmentTable[AttentionSegment, ExpertsSegment] = SegmentTable(
            lambda rows: AttentionSegment(decoder, rows),
            lambda key: ExpertsSegment(key, last - first, decoder.num_columns),
            most_rows=MOST_ROWS,
        )

    def one_by_one(self) -> list[PreparedSpan]:
        """Every layer by itself: somebody wants to see or change what happens between gate and experts."""
        return self._one_by_one

    def spans(self, banks: Mapping[int, ExpertBank] | None) -> list[PreparedSpan]:
        """How a step runs where `banks` are all here; the same mapping gives the same spans."""
        if not self.joins or banks is None:
            return self._one_by_one
        if banks is not self._banks:
            self._banks, self._spans = banks, self._prepared(banks)
        return self._spans

    def _prepared(self, banks: Mapping[int, ExpertBank]) -> list[PreparedSpan]:
        decoder, parts = self._decoder, {}
        for layer in range(decoder.first_layer, decoder.last_layer):
            slices = None if self.gates is None else self.gates.layer(layer)
            part = decoder.layer_in_run(layer, banks.get(layer), slices)
            if part is not None and bind_layers([part]) is not None:
                parts[layer] = part
        prepared = []
        for span in spans_of(decoder.first_layer, decoder.last_layer, parts.__contains__):
            run = self._bound(span, parts) if span.is_here else None
            prepared.append(PreparedSpan(span, run))
        return prepared

    def _bound(self, span: Span, parts: Mapping[int, RunLayer]) -> LayerRun | None:
        return bind_layers([parts[layer] for layer in range(span.first, span.last)])

    def segments(
        self, row_request: NDArray[np.int32], tiers: NDArray[np.int32] | None
    ) -> tuple[AttentionSegment, ExpertsSegment]:
        """The segments of a step, with what its rows want in them.

        row_request [T] int32, the slice of each row; tiers [S] int32 of the slices. None: all run everything
        """
        num_rows, gates = len(row_request), self.gates
        if tiers is None or gates is None or gates.chooses_experts:
            return self.table.get(num_rows, 0)
        key, budget = (num_rows, tiers.tobytes()), self._last[1]
        if num_rows == len(tiers) and key == self._last[0]:  # decode, and the tiers of the step before
            found = self.table.get(num_rows, budget)
            if found[1] is self._last[2]:
                return found
        wanted = gates.wanted_by_layer(self._layers, torch.from_numpy(tiers[row_request]))
        budget = 0 if wanted is None else budget_of(wanted.view(-1).tolist(), gates.elasticity.full_tier)
        found = self.table.get(num_rows, budget)
        if wanted is not None and found[1].sliced is not None:
            found[1].sliced[0].copy_(wanted)
        self._last = key, budget, found[1]
        return found


def run_span(
    run: LayerRun,
    first: int,
    hidden: Tensor,
    batch: AttentionBatch,
    attention: AttentionSegment,
    experts: ExpertsSegment,
) -> Ran:
    """Run a span's layers over a step; `first` is its first layer, counted from the decoder's.

    hidden [T, D] is changed; chosen ids and weights are in attention.buffers from line `first` on.
    """
    b = attention.buffers
    sliced = None
    if experts.sliced is not None:
        tiers, masks, dropped = experts.sliced
        sliced = tiers[first:], masks, dropped[first:]
    return run.run(
        hidden,
        b.x,
        batch[:4],
        b.scratch,
        b.gate_logits,
        b.ids[first:],
        b.weights[first:],
        b.expert_out,
        b.dense_out,
        b.zeros if batch.counted is None else batch.counted,
        sliced,
    )
