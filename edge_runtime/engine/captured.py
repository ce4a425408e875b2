"""Segments of decode steps that are recorded: attention of a layer under the rows of the step, its experts under rows and budget.

For nodes whose kernels are called one by one: captured graphs on a GPU, compiled calls where kernels are plain torch (see
kernels.replay). A step alternates them layer by layer, and whoever is asked for experts is asked between two of them. Rows
stand where they always stand, so recorded work finds them. Knows the Decoder and, of the port, which layers are here.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from edge_runtime.elastic.gates import TierGates
from edge_runtime.engine.graphs import ExpertsKey, SegmentTable
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.decoder import Decoder, attend_and_gate
from edge_runtime.model.moe import Beside, Missing, Slices, run_pairs
from kernels import backends, gathered, slices
from kernels.layer_runs import SliceGate
from kernels.ops import ExpertBank
from kernels.reference.combine import slot_rows
from kernels.replay import Recorder, Replay

MOST_ROWS = 64
"""Rows of a decode step whose segments are recorded."""


class StaticRows:
    """Where rows of decode steps stand, T of them at most, and M blocks of the longest request."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        device = backends.device()
        self._lines = torch.zeros(4, num_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(num_rows * num_blocks, dtype=torch.int32, device=device)
        self._most = num_blocks

    def batch(self, num_rows: int, width: int) -> AttentionBatch:
        """The places of so many rows with tables of so many blocks: views of what all sizes share."""
        positions, slots, row_request, counted = (line[:num_rows] for line in self._lines)
        tables = self._tables[: num_rows * width].view(num_rows, width)
        return AttentionBatch(positions, slots, row_request, tables, counted)

    def width(self, num_blocks: int) -> int:
        """Blocks that tables of recorded work have where the longest request has so many: few widths, so few recordings."""
        return min(self._most, 1 << max(0, num_blocks - 1).bit_length())


def put(static: AttentionBatch, batch: AttentionBatch) -> None:
    """Let a step's batch stand where recorded work looks for it."""
    for place, given in zip(static[:3], batch[:3], strict=True):
        place.copy_(given)
    num_requests, num_blocks = batch.block_tables.shape
    static.block_tables[:num_requests, :num_blocks].copy_(batch.block_tables)
    assert static.counted is not None, "static rows have a place for what counts"
    if batch.counted is None:
        static.counted.zero_()
    else:
        static.counted.copy_(batch.counted)


class AttentionReplays:
    """Attention and gate of each layer for T rows, whatever their budget, recorded when first run at a width of tables."""

    def __init__(self, decoder: Decoder, rows: int) -> None:
        self.rows, self._decoder = rows, decoder
        self.replays: dict[tuple[int, int], Replay] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that a step of this shape needs, and what its recordings hold."""
        buffers = self._decoder.run_buffers(self.rows)
        return sum(tensor.nbytes for tensor in buffers) + sum(each.nbytes for each in self.replays.values())


class ExpertsReplays:
    """Experts of each layer for T rows at a budget: L layers, K columns.

    tiers    [L, T] int32, slices that each row runs, and masks [T, K] int32; None where experts run whole
    dropped  [L, T] float32, share of gate weight left out
    sums     [L] float32: a sum over what a layer gave, by which it is seen whether all of it is finite
    """

    def __init__(self, key: ExpertsKey, num_layers: int, num_columns: int) -> None:
        self.key = key
        device = backends.device()
        self.sums = torch.zeros(num_layers, device=device)
        self.tiers: Tensor | None = None
        self.masks: Tensor | None = None
        self.dropped: Tensor | None = None
        if key.budget:
            self.tiers = torch.zeros(num_layers, key.rows, dtype=torch.int32, device=device)
            self.masks = torch.zeros(key.rows, num_columns, dtype=torch.int32, device=device)
            self.dropped = torch.zeros(num_layers, key.rows, device=device)
        self.replays: dict[int, Replay] = {}

    @property
    def nbytes(self) -> int:
        tensors = [each for each in (self.sums, self.tiers, self.masks, self.dropped) if each is not None]
        return sum(each.nbytes for each in tensors) + sum(each.nbytes for each in self.replays.values())


class _Banks:
    """An ExpertPort whose every expert is here, and that never looks at what it computes."""

    def __init__(self, banks: Mapping[int, ExpertBank]) -> None:
        self.host_names = ["here"]
        self._banks = banks

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        """See ExpertPort."""
        if beside is not None:
            beside()
        rows, _ = slot_rows(*expert_ids.shape, x.device)
        run_pairs(x, rows, expert_ids.view(-1), self._banks[layer], slices, out=out)
        return None

    def add_here(self, *arguments: object) -> bool | None:
        """Nothing in one call: those look whether the sum is finite."""
        return None


class CapturedStep:
    """A decode step that runs on recorded segments. Made by `CapturedSteps.begin`."""

    def __init__(
        self,
        owner: "CapturedSteps",
        batch: AttentionBatch,
        attention: AttentionReplays,
        experts: ExpertsReplays,
    ) -> None:
        self.batch, self._owner = batch, owner
        self.attention, self.experts = attention, experts
        self.hidden = owner.decoder.static_hidden(attention.rows)
        self.layers: list[int] = []  # whose experts ran recorded

    def run_attention(self, layer: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`Decoder.attention_segment` of the step's rows."""
        self._owner.run_attention(layer, self)
        return self._owner.decoder.chosen(layer, self.attention.rows)

    def run_experts(self, layer: int) -> bool:
        """`Decoder.moe_segment`, and the choice of slices before it, if the layer's experts are here; else nothing."""
        if not self._owner.has_experts(layer):
            return False
        self._owner.run_experts(layer, self)
        self.layers.append(layer)
        return True


class CapturedSteps:
    """The recorded segments of one decoder.

    gates       who chooses slices; None where experts are whole
    record      how work is recorded
    num_blocks  most blocks of a request
    """

    def __init__(
        self, decoder: Decoder, gates: TierGates | None, record: Recorder, *, num_blocks: int
    ) -> None:
        self.decoder, self.gates, self.record = decoder, gates, record
        self._banks: Mapping[int, ExpertBank] = {}
        self._stacked: dict[int, gathered.StackedExperts] = {}
        self._most_rows = min(MOST_ROWS, decoder.max_rows)
        self._static = StaticRows(self._most_rows, num_blocks)
        self._is_compiled = record.name == "compiled"
        num_layers = decoder.last_layer - decoder.first_layer
        self.table: SegmentTable[AttentionReplays, ExpertsReplays] = SegmentTable(
            lambda rows: AttentionReplays(decoder, rows),
            lambda key: ExpertsReplays(key, num_layers, decoder.num_columns),
            rounds_up=True,
        )

    @property
    def banks(self) -> Mapping[int, ExpertBank]:
        """Experts of the layers that were all here when last asked."""
        return self._banks

    def begin(
        self,
        batch: AttentionBatch,
        hidden: Tensor,
        tiers: Tensor | None,
        banks: Mapping[int, ExpertBank],
    ) -> CapturedStep | None:
        """Put a decode step where recorded work looks for it; None for a step of too many rows.

        hidden  [T, D] float32, moved to `CapturedStep.hidden` unless it stands there
        tiers   [T] int32 in the host's memory, slices that rows run, 0 for all; None: all run everything
        banks   experts of the layers that are all here, the same object until that changes
        """
        num_rows = len(batch.positions)
        if num_rows > self._most_rows:
            return None
        if banks is not self._banks:
            self._take(banks)
        gates, wanted, budget = self.gates, None, 0
        if tiers is not None and gates is not None:
            layers = range(self.decoder.first_layer, self.decoder.last_layer)
            wanted = gates.wanted_by_layer(layers, tiers)
            if wanted is not None:  # room for the layer that wants most
                budget = min(gates.elasticity.full_tier, math.ceil(int(wanted.sum(1).max()) / num_rows))
        attention, experts = self.table.get(num_rows, budget)
        if wanted is not None and experts.tiers is not None:
            experts.tiers.copy_(wanted)
        static = self._static.batch(num_rows, self._static.width(batch.block_tables.shape[1]))
        put(static, batch)
        step = CapturedStep(self, static, attention, experts)
        if hidden.data_ptr() != step.hidden.data_ptr():
            step.hidden.copy_(hidden)
        return step

    def _take(self, banks: Mapping[int, ExpertBank]) -> None:
        """Other experts are here: what was recorded reads those that were."""
        self._banks, self._stacked = banks, {}
        self.table.clear()
        if not self._is_compiled:
            return
        for layer, bank in banks.items():
            stacked = gathered.stack_experts(bank) if self.decoder.is_plain_moe(layer) else None
            if stacked is not None:
                self._stacked[layer] = stacked

    def has_experts(self, layer: int) -> bool:
        """Whether the experts of a layer can run recorded."""
        return layer in (self._stacked if self._is_compiled else self._banks)

    def run_attention(self, layer: int, step: CapturedStep) -> None:
        """One layer's attention and gate."""
        key = layer, step.batch.block_tables.shape[1]
        replay = step.attention.replays.get(key)
        decoder, batch, hidden = self.decoder, step.batch, step.hidden
        if replay is None:
            if self._is_compiled:
                replay = self.record(attend_and_gate, *decoder.attention_call(layer, hidden, batch))
            else:
                assert batch.counted is not None, "static rows have a place for what counts"
                counted = batch.counted.clone()
                batch.counted.zero_()  # what runs to be recorded does not count
                replay = self.record(decoder.attention_segment, layer, hidden, batch, restored=(hidden,))
                batch.counted.copy_(counted)
            step.attention.replays[key] = replay
        replay()
        if self._is_compiled:
            decoder.count_chosen(layer, batch)

    def run_experts(self, layer: int, step: CapturedStep) -> None:
        """One layer's experts."""
        replay = step.experts.replays.get(layer)
        if replay is None:
            if self._is_compiled:
                replay = self._compiled_experts(layer, step)
            else:
                replay = self.record(self._experts, layer, step, restored=(step.hidden,))
            step.experts.replays[layer] = replay
        replay()

    def _place(self, layer: int) -> int:
        return layer - self.decoder.first_layer

    def _experts(self, layer: int, step: CapturedStep) -> None:
        """What is recorded of one layer's experts: choice of slices, experts, their sum, all that stands beside them."""
        decoder, segment, at = self.decoder, step.experts, self._place(layer)
        x, ids, weights = decoder.chosen(layer, step.attention.rows)
        gate = None if self.gates is None else self.gates.layer(layer)
        sliced = None
        if segment.tiers is not None and gate is not None:
            assert self.gates is not None and segment.masks is not None and segment.dropped is not None
            assert ids is not None and weights is not None, "slices are of routed experts"
            out = segment.masks, segment.dropped[at]
            slices.choose_by_neurons(x, ids, weights, *gate, segment.tiers[at], out=out)
            sliced = Slices(segment.masks, self.gates.elasticity.num_parts)
        decoder.recorded_sum = segment.sums[at]
        try:
            decoder.moe_segment(layer, step.hidden, x, ids, weights, _Banks(self._banks), sliced)
        finally:
            decoder.recorded_sum = None

    def _compiled_experts(self, layer: int, step: CapturedStep) -> Replay:
        segment, at = step.experts, self._place(layer)
        x, ids, weights = self.decoder.chosen(layer, step.attention.rows)
        gate = None if self.gates is None else self.gates.layer(layer)
        found = self._stacked[layer], x, ids, weights, step.hidden, segment.sums[at]
        if segment.tiers is None or segment.masks is None or segment.dropped is None or gate is None:
            return self.record(whole_experts, *found)
        assert self.gates is not None, "whoever has a gate of slices has gates"
        num_parts = self.gates.elasticity.num_parts
        room = segment.key.rows * segment.key.budget
        chosen = segment.tiers[at], segment.masks, segment.dropped[at]
        work = self.record(sliced_experts, *found, segment.masks, num_parts, room)
        return _Chosen(gate, x, ids, weights, chosen, work)

    def not_finite(self, step: CapturedStep) -> Tensor | None:
        """Rows [n] int64 of a finished step in which numbers are not finite; None if all are. Waits for the device."""
        if not step.layers:
            return None
        if math.isfinite(float(step.experts.sums[[self._place(layer) for layer in step.layers]].sum())):
            return None
        return (~step.hidden.isfinite().all(dim=1)).nonzero().view(-1)


class _Chosen:
    """Slices chosen by the plain path, whose gate neurons may be codes, and then what is recorded."""

    def __init__(
        self,
        gate: SliceGate,
        x: Tensor,
        ids: Tensor | None,
        weights: Tensor | None,
        chosen: tuple[Tensor, Tensor, Tensor],
        work: Replay,
    ) -> None:
        assert ids is not None and weights is not None, "a routed layer has both"
        self._asked, self._gate, self._chosen, self._work = (x, ids, weights), gate, chosen, work

    @property
    def nbytes(self) -> int:
        return self._work.nbytes

    def __call__(self) -> None:
        tiers, masks, dropped = self._chosen
        slices.choose_by_neurons(*self._asked, *self._gate, tiers, out=(masks, dropped))
        self._work()


def whole_experts(
    experts: gathered.StackedExperts, x: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor, total: Tensor
) -> None:
    """`gathered.add_experts`; total [] is a sum over what is there afterwards."""
    gathered.add_experts(experts, x, ids, weights, hidden)
    total.copy_(hidden.sum())


def sliced_experts(
    experts: gathered.StackedExperts,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    hidden: Tensor,
    total: Tensor,
    masks: Tensor,
    num_parts: int,
    room: int,
) -> None:
    """`gathered.add_slices`, likewise."""
    gathered.add_slices(experts, x, ids, weights, masks, num_parts, room, hidden)
    total.copy_(hidden.sum())
