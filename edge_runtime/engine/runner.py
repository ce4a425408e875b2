"""Runs one step plan over a range of layers: rows to tensors, attention and MoE segments in turn, and at the end of the
model logits of the rows that sample.

Knows the model's arithmetic and the ExpertPort; knows no socket, no scheduler and no text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from edge_runtime.cache.block_pool import blocks_for
from edge_runtime.cache.pages import KVPages
from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.clock import Clock
from edge_runtime.elastic.gates import SlicedRows, TierGates
from edge_runtime.engine.bill import Account, ServedWeight
from edge_runtime.engine.captured import CapturedStep, CapturedSteps
from edge_runtime.engine.dropped import Dropped, DroppedMass
from edge_runtime.engine.graphs import SegmentCounts, Span
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.prepared import (
    AttentionSegment,
    ExpertsSegment,
    PreparedSpan,
    PreparedSteps,
    run_span,
)
from edge_runtime.engine.quality import QualityBooks
from edge_runtime.engine.request import Request
from edge_runtime.engine.request_table import RequestTable, StepRows
from edge_runtime.engine.step_books import StepBooks
from edge_runtime.model.attention import AttentionBatch
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.encoder_decoder import two_halves
from edge_runtime.model.moe import ExpertPort, Missing, Owed, joined
from kernels import ops
from kernels.layer_runs import LayerRun
from kernels.replay import Recorder
from kernels.transfers import on_device, on_host


class HostedExperts(ExpertPort, Protocol):
    """An ExpertPort that can say which host serves each slot (0 is the home itself)."""

    host_names: list[str]

    def served_by(self) -> np.ndarray | None:
        """[T, K] int32 host of every slot of the layer just run; None when the home served them all."""

    def begin_step(self) -> None:
        """Called before the first layer of a step."""

    def take_owed(self) -> Owed | None:
        """What the layer before the one just run let come late, waited for now; None if nothing."""

    def may_be_replaced(self) -> bool:
        """Whether what is missing now may have a host soon: the step is better tried again than failed."""


LOOK_EVERY = 16  # steps: a look costs 10 us a layer


@dataclass
class StepTimes:
    """Seconds spent since the start, by part of a step.

    attended_tokens  tokens of KV that the rows of steps attended to, each row's summed, in one layer
    touched_layers, touched_rows, touched_experts  of every 16th decode step its layers with experts, their rows, and the
                                                   distinct experts that these chose, each summed over the layers
    """

    plan: float = 0.0
    rows: float = 0.0
    attention: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    sample: float = 0.0
    steps: int = 0
    rows_computed: int = 0
    attended_tokens: int = 0
    touched_layers: int = 0
    touched_rows: int = 0
    touched_experts: int = 0


class StepResult(NamedTuple):
    """What a step produced. T rows, D width, V vocabulary; views of buffers that the next step overwrites."""

    logits: Tensor | None  # [samples, V] float32, in slice order of those that sample; None if there are none
    hidden: Tensor | None  # [T, D] float32 for the stage after this one; None after the last layer
    failed: dict[str, str]  # request id -> why, for requests whose experts did not come
    waits: bool = False  # experts did not come but may soon have another host: the step did not happen, nothing is booked


class RowsResult(NamedTuple):
    """What layers made of the rows of a step. Views of buffers that the next step overwrites."""

    hidden: Tensor  # [T, D] float32, the residual after the last of them, where it was computed
    failed: dict[int, str]  # slice -> why, where experts did not come
    waits: bool = False  # experts did not come but may soon have another host: the step did not happen


@dataclass
class Runner:
    """Runs layers [first, last) of one model on one home.

    The last layer's rows become logits only where the plan samples. A request whose experts are missing is
    named in `failed`; its rows go on with what came and are thrown away by the caller, so the other requests
    of the step never notice.

    signatures  where the decoder counts the experts that rows choose; None where it does not
    books       what requests may spend of quality, and have spent; None: every slot is exact
    pages       where the decoder keeps keys and values, for those who hand blocks on
    gates       who chooses the slices of rows at a tier; None where experts are whole
    joins       layers between which nobody is asked run as one call; see `prepared`
    record      how segments of decode steps are recorded; None: layers run by themselves, or joined
    dropped     what those rows left out
    """

    decoder: Decoder
    port: HostedExperts
    table: RequestTable
    clock: Clock
    times: StepTimes = field(default_factory=StepTimes)
    signatures: SignatureCache | None = None
    books: QualityBooks | None = None
    pages: KVPages | None = None
    gates: TierGates | None = None
    joins: bool = True
    record: Recorder | None = None
    dropped: DroppedMass = field(default_factory=DroppedMass)

    def __post_init__(self) -> None:
        self._prepared: PreparedSteps | None = None
        self._captured: CapturedSteps | None = None
        self._served = ServedWeight(len(self.port.host_names))
        routed = [index for index, layer in enumerate(self.decoder.spec.layers) if layer.gate is not None]
        self._routed_after = {index: len(routed) - place for place, index in enumerate(routed)}
        self._weight_is_one = {
            index: None if layer.gate is None else layer.gate.weights_sum_to_one
            for index, layer in enumerate(self.decoder.spec.layers)
        }

    @property
    def prepared(self) -> PreparedSteps:
        """The segments of its steps, made anew when other gates choose."""
        found = self._prepared
        if found is None or found.gates is not self.gates or found.joins != self.joins:
            found = self._prepared = PreparedSteps(self.decoder, self.gates, joins=self.joins)
        return found

    @property
    def captured(self) -> CapturedSteps | None:
        """The recorded segments of its steps, likewise; None where nothing is recorded."""
        found, record = self._captured, self.record
        if record is None:
            return None
        if found is None or found.gates is not self.gates or found.record is not record:
            found = CapturedSteps(self.decoder, self.gates, record, num_blocks=self.table.most_blocks)
            self._captured = found
        return found

    def touch(self) -> None:
        """Have the memory of its pages there before the first step, see `KVPages`."""
        if self.pages is not None:
            self.pages.touch()

    def give_back(self) -> None:
        """Let the system have the memory of pages and buffers; no step follows."""
        if self.pages is not None:
            self.pages.give_back()
        self.decoder.give_back()

    def segment_counts(self) -> SegmentCounts:
        """What of its steps is kept ready. May be asked by another thread."""
        captured = self.captured
        return self.prepared.table.counts() if captured is None else captured.table.counts()

    @property
    def first_layer(self) -> int:
        return self.decoder.first_layer

    @property
    def last_layer(self) -> int:
        return self.decoder.last_layer

    @property
    def num_layers(self) -> int:
        return self.decoder.spec.num_layers

    def run(self, plan: StepPlan, hidden: Tensor | None = None) -> StepResult:
        """Compute every row of the plan.

        hidden  [T, D] float32, what the layers before gave, changed in place; None where layer 0 is here
        """
        rows = self.rows(plan)
        books = self.books if rows.encoder_tokens is None else None
        step = books.begin_step(plan) if books is not None else None
        tiers = tiers_of(plan)
        spans = [(piece.request.block_table, piece.start, piece.count) for piece in plan.slices]
        ran = self.run_rows(
            rows,
            len(plan.slices),
            hidden,
            counted=self.begin_counting(plan.num_rows, spans),
            books=step,
            tiers=tiers,
        )
        if ran.waits:
            if books is not None and step is not None:
                books.give_up(step)
            return StepResult(None, None, {}, waits=True)
        request_ids = [piece.request.request_id for piece in plan.slices]
        self._served.end_step(request_ids)
        if books is not None and step is not None:
            books.end_step(plan, step)
        if tiers:
            self.dropped.end_step(request_ids)
        is_last = self.last_layer == self.num_layers
        logits = self.head(ran.hidden, rows) if is_last else None
        why_of = {plan.slices[index].request.request_id: why for index, why in ran.failed.items()}
        return StepResult(logits, None if is_last else on_host(ran.hidden), why_of)

    def rows(self, plan: StepPlan) -> StepRows:
        """The rows of a plan."""
        began = self.clock.now()
        rows = self.table.rows(plan)
        self.times.rows += self.clock.now() - began
        return rows

    def run_rows(
        self,
        rows: StepRows,
        num_slices: int,
        hidden: Tensor | None = None,
        counted: Tensor | None = None,
        books: StepBooks | None = None,
        tiers: Sequence[int] = (),
        dropped: Sequence[Sequence[float]] = (),
    ) -> RowsResult:
        """Compute rows; keys and values of each are in their blocks afterwards.

        hidden   [T, D] float32, what the stage before gave, changed in place; None where layer 0 is here
        counted  [T] int32, which rows count in their blocks; None: none do
        books    what the rows may spend of quality, and have spent at the stages before; None: every slot is exact
        tiers    [S] sub-experts of each slice's rows, 0 for all; none where all run everything
        dropped  [S] what the stages before left out of each slice, see `DroppedMass`
        """
        times, now = self.times, self.clock.now
        began = now()
        batch: Any = AttentionBatch(
            positions=rows.positions,
            slots=rows.slots,
            row_request=rows.row_request,
            block_tables=rows.block_tables,
            counted=counted,
        )
        if rows.encoder_tokens is not None:
            batch = two_halves(batch, rows.encoder_tokens)
        batch = on_device(batch)
        self._served.begin_step(rows.row_request.numpy(), num_slices)
        times.attended_tokens += int(rows.positions.sum()) + len(rows.positions)
        times.rows += now() - began

        if self.first_layer == 0:
            assert hidden is None, "layer 0 starts from token ids, not from another stage's rows"
            hidden = self.decoder.embed(on_device(rows.token_ids), batch)
        shape = (len(rows.positions), self.decoder.spec.width)
        assert hidden is not None and hidden.shape == shape, f"layer {self.first_layer} needs rows of {shape}"
        hidden = on_device(hidden)
        self.port.begin_step()
        row_request, stands_in = rows.row_request.numpy(), books is not None
        if tiers and self.gates is not None:
            self.dropped.begin_step(row_request, num_slices, dropped)
            stands_in = stands_in and not self.gates.chooses_experts
        step = _Step(rows, batch, books, hidden, tiers=tiers, stands_in=stands_in)
        step.is_looked_at = times.steps % LOOK_EVERY == 0 and len(rows.positions) == num_slices
        step.captured = self._begin_captured(step, num_slices)
        hidden = step.hidden
        spans = self._spans(step)
        if any(run is not None for _, run in spans):  # on a GPU none is, and nothing is kept ready for it
            of_slice = np.array(tiers, dtype=np.int32) if tiers else None
            step.segments = self.prepared.segments(row_request, of_slice)
        for span, run in spans:
            if run is None:
                self._run_layer(span.first, step)
            else:
                self._run_span(span, run, step)
        self._end_captured(step)
        if step.failed and self.port.may_be_replaced():
            return RowsResult(hidden, {}, waits=True)
        self._served.add_local_layers(step.local_layers, step.num_slots)
        return RowsResult(hidden, step.failed)

    def _spans(self, step: "_Step") -> list[PreparedSpan]:
        """How the step runs: in one call where nobody has to see or change what happens between gate and experts."""
        if step.captured is not None or not self._is_unseen(step):
            return self.prepared.one_by_one()
        return self.prepared.spans(self.port.banks_here())  # type: ignore[attr-defined]

    def _is_unseen(self, step: "_Step") -> bool:
        """Whether nobody has to see or change what happens between gate and experts."""
        books, gates = step.books, self.gates
        return not (
            getattr(self.port, "banks_here", None) is None
            or step.rows.encoder_tokens is not None
            or (books is not None and (books.is_open or books.is_traced))
            or (len(step.tiers) > 0 and gates is not None and gates.chooses_experts)
        )

    def _begin_captured(self, step: "_Step", num_slices: int) -> CapturedStep | None:
        """The recorded segments of a step of one row for each request; None where it has none."""
        captured, rows = self.captured, step.rows
        if captured is None or rows.encoder_tokens is not None or len(rows.positions) != num_slices:
            return None
        is_unseen = self._is_unseen(step)
        tiers = None
        if is_unseen and step.tiers:
            tiers = torch.tensor(step.tiers, dtype=torch.int32)[rows.row_request.long()]
        banks = self.port.banks_here() if is_unseen else captured.banks  # type: ignore[attr-defined]
        found = captured.begin(step.batch, step.hidden, tiers, banks)
        if found is not None:
            step.hidden, step.batch, step.runs_recorded = found.hidden, found.batch, is_unseen
        return found

    def _end_captured(self, step: "_Step") -> None:
        """Look at what recorded experts gave, once for all layers: nobody could meanwhile."""
        found, captured = step.captured, self.captured
        if found is None or captured is None or not found.layers:
            return
        spoilt = captured.not_finite(found)
        if spoilt is not None:
            first, last = found.layers[0], found.layers[-1]
            why = f"layers {first} to {last} on {self.port.host_names[0]} gave numbers that are not finite"
            for index in torch.unique(step.rows.row_request[on_host(spoilt)]).tolist():
                step.failed.setdefault(index, why)
        experts = found.experts
        if experts.tiers is not None and experts.dropped is not None and self.gates is not None:
            lines = [layer - self.first_layer for layer in found.layers]
            shares = on_host(experts.dropped[lines]).numpy()
            lost = self.gates.lost_by_layer(found.layers, shares)
            self.dropped.add_layers(shares, lost, on_host(experts.tiers[lines]).numpy())

    def _run_span(self, span: Span, run: LayerRun, step: "_Step") -> None:
        """Layers whose experts are all here, in one call."""
        times, began, at = self.times, self.clock.now(), span.first - self.first_layer
        assert step.segments is not None, "a step with a run in it has segments"
        attention, experts = step.segments
        ran = run_span(run, at, step.hidden, step.batch, attention, experts)
        count = ran.stopped + 1 if ran.stopped >= 0 else span.last - span.first
        layers = range(span.first, span.first + count)
        routed = [layer for layer in layers if self._weight_is_one[layer] is not None]
        buffers = attention.buffers
        if routed:
            lines: Any = slice(at, at + count)
            if len(routed) < count:
                lines = [layer - self.first_layer for layer in routed]
            step.num_slots = self.decoder.num_columns
            if all(self._weight_is_one[layer] for layer in routed):
                step.local_layers += len(routed)
            else:
                self._served.add_home_layers(buffers.weights[lines].numpy())
            if experts.sliced is not None and self.gates is not None:
                ran_slices, _, dropped = experts.sliced
                shares = dropped[lines].numpy()
                lost = self.gates.lost_by_layer(routed, shares)
                self.dropped.add_layers(shares, lost, ran_slices[lines].numpy())
            self.port.ran_here(buffers.ids[lines], ran.experts_s)  # type: ignore[attr-defined]
            if step.is_looked_at:
                self._look_at(buffers.ids[lines])
        times.attention += ran.attention_s
        times.experts += self.clock.now() - began - ran.attention_s
        if ran.stopped >= 0:
            ids = buffers.ids[at + ran.stopped]
            self._note_missing(self.decoder.not_finite(layers[-1], ids, self.port), step)
            for layer in range(layers[-1] + 1, span.last):
                self._run_layer(layer, step)

    def _run_layer(self, layer: int, step: "_Step") -> None:
        """One layer, and what others compute of it."""
        times, now, books, hidden = self.times, self.clock.now, step.books, step.hidden
        began = now()
        if step.captured is None:
            x, expert_ids, gate_weights = self.decoder.attention_segment(layer, hidden, step.batch)
        else:
            x, expert_ids, gate_weights = step.captured.run_attention(layer)
        late: Tensor | None = None
        attended = now()
        if step.captured is not None and step.runs_recorded and step.captured.run_experts(layer):
            times.attention += attended - began
            times.experts += now() - attended
            self._note_recorded(layer, expert_ids, gate_weights, step)
            return
        if books is not None and expert_ids is not None:
            books.begin_layer(self._routed_after[layer], len(self._routed_after))
        if (
            books is not None
            and step.stands_in
            and books.is_open
            and expert_ids is not None
            and gate_weights is not None
        ):
            logits = self.decoder.gate_logits(len(expert_ids))
            may_defer = not step.tiers and self._may_defer(layer)
            expert_ids, gate_weights, late = books.stand_in(
                layer, expert_ids, gate_weights, logits, may_defer=may_defer
            )
        ran = None
        if self.gates is not None and expert_ids is not None and gate_weights is not None:
            row_tiers = step.row_tiers()
            if row_tiers is not None:
                ran = self._slices(layer, x, expert_ids, gate_weights, row_tiers, books)
        if ran is not None and ran.expert_ids is not None:
            expert_ids, gate_weights = ran.expert_ids, ran.gate_weights
        sliced = None if ran is None else ran.slices
        now_weights = gate_weights
        if late is not None and gate_weights is not None:
            now_weights = gate_weights.masked_fill(late, 0.0)
        missing = self.decoder.moe_segment(layer, hidden, x, expert_ids, now_weights, self.port, sliced)
        if step.late_weights is not None:  # of the layer before, whose requests are those of this one
            missing = joined(missing, self._add_owed(hidden, step.late_weights))
        step.late_weights = None if late is None or gate_weights is None else gate_weights.clone()
        if books is not None and books.is_open and expert_ids is not None:
            books.end_layer()
        times.attention += attended - began
        times.experts += now() - attended
        if expert_ids is None or gate_weights is None:  # a dense layer
            return
        step.num_slots = expert_ids.shape[1]
        if step.is_looked_at:
            self._look_at(expert_ids[None])
        hosts = self.port.served_by()
        routed = None if self.decoder.routed is None else on_host(self.decoder.routed)
        if books is not None and books.is_traced and routed is None:
            books.trace(layer, hosts, gate_weights)
        if ran is not None and ran.expert_ids is not None and hosts is None:
            hosts = np.where(on_host(ran.slices.masks).numpy() == 0, -1, 0)  # slots of which nothing ran
        if hosts is None and self._weight_is_one[layer] and routed is None:
            step.local_layers += 1
        else:
            served_by = np.zeros(expert_ids.shape, dtype=np.int32) if hosts is None else hosts
            self._served.add_layer(
                served_by, on_host(gate_weights).numpy(), None if routed is None else routed.numpy()
            )
        self._note_missing(missing, step)

    def _note_recorded(
        self, layer: int, expert_ids: Tensor | None, gate_weights: Tensor | None, step: "_Step"
    ) -> None:
        """Book a layer whose experts ran recorded, so all of them here."""
        assert expert_ids is not None and gate_weights is not None, "only routed layers have experts"
        step.num_slots = expert_ids.shape[1]
        if step.is_looked_at:
            self._look_at(expert_ids[None])
        if self._weight_is_one[layer]:
            step.local_layers += 1
        else:
            self._served.add_layer(
                np.zeros(expert_ids.shape, dtype=np.int32), on_host(gate_weights).numpy(), None
            )

    def _look_at(self, expert_ids: Tensor) -> None:
        """Count how many experts the rows of layers touch. expert_ids [layers, T, K] int32."""
        times = self.times
        times.touched_layers += len(expert_ids)
        times.touched_rows += expert_ids.shape[0] * expert_ids.shape[1]
        times.touched_experts += sum(len(np.unique(ids)) for ids in on_host(expert_ids).numpy())

    def _note_missing(self, missing: Missing | None, step: "_Step") -> None:
        """The requests whose experts did not come fail."""
        if missing is None:
            return
        routed = None if self.decoder.routed is None else on_host(self.decoder.routed)
        row_request = step.rows.row_request
        of_slot = missing.slots // step.num_slots
        for index in torch.unique(row_request[of_slot if routed is None else routed[of_slot]]).tolist():
            step.failed.setdefault(index, missing.why)

    def _may_defer(self, layer: int) -> bool:
        """Whether what a layer's experts give may be added after the next layer: sums of the residual, both in this range."""
        decoder = self.decoder
        is_plain = (
            decoder.adds_experts(layer) and layer + 1 < self.last_layer and decoder.adds_experts(layer + 1)
        )
        return is_plain and decoder.routed is None

    def _add_owed(self, hidden: Tensor, gate_weights: Tensor) -> Missing | None:
        """hidden [T, D] += what the layer before let come late; what did not come at all is returned."""
        owed = self.port.take_owed()
        if owed is None:
            return None
        slots = torch.full((gate_weights.numel(),), -1, dtype=torch.int32)
        slots[owed.slots] = torch.arange(len(owed.slots), dtype=torch.int32)
        ops.combine(owed.outputs, on_device(slots.view(gate_weights.shape)), gate_weights, hidden)
        return owed.missing

    def _slices(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        row_tiers: Tensor,
        books: StepBooks | None,
    ) -> SlicedRows | None:
        assert self.gates is not None, "rows have tiers where nobody can choose slices"
        caps = books.caps() if books is not None else None
        chosen = self.gates.choose(layer, x, expert_ids, gate_weights, row_tiers, caps)
        if chosen is None:
            return None
        dropped, lost = on_host(chosen.dropped).numpy(), chosen.lost
        self.dropped.add_layer(dropped, lost, on_host(chosen.ran).numpy())
        if books is not None:
            books.leave_out(dropped, lost)
        return chosen

    def served(self, num_slices: int) -> np.ndarray:
        """[2, S, N] float64: gate weight and slots of the step just run, by slice and host. Not booked on anybody."""
        return self._served.of_step(num_slices)

    def head(self, hidden: Tensor, rows: StepRows) -> Tensor | None:
        """Logits [samples, V] float32 of the rows that sample, in the host's memory; None if none does."""
        if not len(rows.sampled_rows):
            return None
        began = self.clock.now()
        if len(rows.sampled_rows) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(rows.sampled_rows)]
        logits = on_host(self.decoder.head(hidden))
        self.times.head += self.clock.now() - began
        return logits

    def switch_port(self, port: HostedExperts) -> None:
        """Let another placement serve from the next step on. Open accounts must have been taken before."""
        assert not len(self._served), "an account is open, and its hosts are those of the old placement"
        self.port = port
        self._served = ServedWeight(len(port.host_names))

    def take_account(self, request_id: str) -> Account:
        """Close a request's account: where its gate weight was served."""
        return Account(self._served.take(request_id), self.port.host_names)

    def take_dropped(self, request_id: str) -> Dropped:
        """Close a request's sums of what its tier left out."""
        return self.dropped.take(request_id)

    @property
    def num_accounts(self) -> int:
        """Accounts that are open: of requests that run, or ran and were preempted."""
        return len(self._served)

    def begin_counting(self, num_rows: int, spans: Iterable[tuple[Sequence[int], int, int]]) -> Tensor | None:
        """Which rows of a step count in their blocks; None where nothing is counted.

        spans  block table, first position and rows of each request
        """
        if self.signatures is None:
            return None
        # What others compute may not come, and the step be tried again.
        may_fail = len(self.port.host_names) > 1 or self.last_layer - self.first_layer < self.num_layers
        return self.signatures.begin_step(num_rows, spans if may_fail else ())

    def prompt_counts(self, request: Request) -> np.ndarray | None:
        """[L, E] int16: how many of the prompt's tokens chose each expert in each MoE layer here.

        To be asked after the step that computed the prompt's last token and before any that computes a later one. None
        where nothing is counted.
        """
        return self.counts_in(request.block_table[: blocks_for(len(request.prompt_ids))])

    def counts_in(self, blocks: Sequence[int]) -> np.ndarray | None:
        """[L, E] int16 of the tokens in these blocks; None where nothing is counted."""
        return None if self.signatures is None else self.signatures.total(blocks)


@dataclass
class _Step:
    """A step on its way through the layers."""

    rows: StepRows
    batch: Any
    books: StepBooks | None
    hidden: Tensor
    tiers: Sequence[int]  # [S], none where all run everything
    stands_in: bool  # whether experts that are elsewhere may be stood in for
    segments: tuple[AttentionSegment, ExpertsSegment] | None = None  # None where every layer runs by itself
    captured: CapturedStep | None = None  # None where nothing of it is recorded
    runs_recorded: bool = False  # of that experts too, and not attention alone
    is_looked_at: bool = False  # whether it is counted how many experts its rows touch
    failed: dict[int, str] = field(default_factory=dict)  # slice -> why
    local_layers: int = 0  # routed, all here, and with weights that sum to 1
    num_slots: int = 0
    late_weights: Tensor | None = None  # [T, K] of the layer before, where some of what it gives comes late
    _row_tiers: Tensor | None = None

    def row_tiers(self) -> Tensor | None:
        """[T] int32 tiers of the rows where they are computed, the same tensor in all layers; None where all run everything."""
        if self._row_tiers is None and self.tiers:
            of_row = torch.tensor(self.tiers, dtype=torch.int32)[self.rows.row_request.long()]
            self._row_tiers = on_device(of_row)
        return self._row_tiers


def tiers_of(plan: StepPlan) -> list[int]:
    """Sub-experts of each slice's rows, 0 for all; none where all run everything."""
    tiers = [piece.request.tier for piece in plan.slices]
    return tiers if any(tiers) else []
