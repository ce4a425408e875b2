"""Tries a node's own share before it serves, through the code that will serve: what do its steps and its experts take?

A few decode steps of one, of sixteen and of four rows, the last of them after longer prompts, on made-up tokens, with the
experts that are resident standing in for those that are not. Parts are timed apart and a node's speed is fitted to them.
Touches no socket; whoever calls it does so before the share is used, since a trial writes into KV blocks that nobody owns yet.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BlockPool, blocks_for
from edge_runtime.clock import Clock
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.errors import CheckpointError
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.moe import Beside, ExpertStore, LocalExperts, Missing, Slices
from edge_runtime.model.sampling import Sampler
from edge_runtime.protocol import ExpertCall, encode
from kernels import backends, ops
from kernels.transfers import on_device, on_host
from topology.costs import ModelFootprint
from topology.speeds import ExpertSpeed, NodeSpeed, SpeedSample, fit_speed
from topology.step_time import operations

BUDGET_S = 0.25  # after so long nothing further is begun
# Rows -> tokens of the prompts before them: at the longer ones it shows what attention takes.
BATCHES = {1: 12, 16: 8, 4: 60}
STEPS = 8  # decode steps of each batch
CONTEXT_TOKENS = max(BATCHES.values()) + STEPS
QUANTILE = 0.25  # of the times of equal steps: neighbours only ever make them longer
CALLS = 20


class _Part(NamedTuple):
    """One step of so many rows, in seconds by part."""

    rows: int
    trunk: float
    experts: float
    head: float
    rest: float
    touched: float
    pairs: float
    context: float


class _Resident(LocalExperts):
    """An ExpertPort that computes every slot, with resident experts in place of those that are elsewhere."""

    def __init__(self, store: ExpertStore, clock: Clock) -> None:
        super().__init__(store)
        self._own, self._clock = store, clock
        self._stand_ins: dict[int, Tensor] = {}
        self.seconds = self.touched = self.pairs = 0.0

    def served_by(self) -> np.ndarray | None:
        return None

    def begin_step(self) -> None:
        self.seconds = self.touched = self.pairs = 0.0

    def take_owed(self) -> None:
        return None

    def may_be_replaced(self) -> bool:
        return False

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        bank = self._own.bank(layer)
        if bank is None:
            if beside is not None:
                beside()
            out.zero_()
            return None
        if layer not in self._stand_ins:
            held = torch.tensor(sorted(bank.resident), dtype=torch.int32)
            num_experts = max(int(expert_ids.max()) + 1, int(held[-1]) + 1, 1024)
            self._stand_ins[layer] = on_device(held[torch.arange(num_experts) % len(held)])
        chosen = self._stand_ins[layer][expert_ids.long()]
        began = self._clock.now()
        missing = super().run(layer, x, chosen, out, beside, slices)
        self._count(began, chosen)
        return missing

    def add_here(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        hidden: Tensor,
        out: Tensor,
        slices: Slices | None = None,
    ) -> bool | None:
        began = self._clock.now()
        is_finite = super().add_here(layer, x, expert_ids, gate_weights, hidden, out, slices)
        if is_finite is not None:
            self._count(began, expert_ids)
        return is_finite

    def ran_here(self, expert_ids: Tensor, seconds: float) -> None:
        for chosen in expert_ids:
            self._note(chosen)
        self.seconds += seconds

    def _count(self, began: float, chosen: Tensor) -> None:
        self.seconds += self._clock.now() - began
        self._note(chosen)

    def _note(self, chosen: Tensor) -> None:
        self.touched += len(np.unique(on_host(chosen).numpy()))
        self.pairs += chosen.numel()


def try_home(
    footprint: ModelFootprint,
    decoder: Decoder,
    store: ExpertStore,
    *,
    weight_format: str,
    num_blocks: int,
    max_rows: int,
    context_tokens: int,
    clock: Clock,
) -> NodeSpeed | None:
    """The speed of a node that runs layers, from steps on made-up tokens; None where not even one request has room."""
    spec = decoder.spec
    port = _Resident(store, clock)
    most = max(BATCHES)
    runner = Runner(
        decoder=decoder,
        port=port,
        table=RequestTable(most, min(context_tokens, CONTEXT_TOKENS)),
        clock=clock,
    )
    settings = SchedulerSettings(
        vocab_size=spec.vocab_size,
        context_tokens=min(context_tokens, CONTEXT_TOKENS),
        max_rows=max(max_rows, most),
        max_running=min(most, max_rows),
    )
    scheduler = Scheduler(settings, BlockPool(num_blocks), model_hash="trial", tokenizer_hash="")
    steps = _Steps(scheduler, runner, Sampler(spec.vocab_size), port, clock)
    fitting = [
        batch
        for batch, prompt in BATCHES.items()
        if batch <= settings.max_running
        and batch * prompt <= settings.max_rows
        and batch * blocks_for(prompt + STEPS) <= num_blocks
        and prompt + STEPS <= settings.context_tokens
    ]
    if not backends.is_on_host():
        for batch in fitting:  # a kernel is compiled when it is first called, which takes seconds
            steps.run(batch, math.inf)
    until = clock.now() + BUDGET_S
    parts: list[_Part] = []
    for batch in fitting:
        if clock.now() >= until:
            break
        parts += steps.run(batch, until)
    if not parts:
        return None
    return _speed_of(footprint, typical(parts), weight_format, decoder.first_layer, decoder.last_layer)


class _Steps:
    """Turns an engine's steps by hand, for a range of layers as well as for all of them."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, sampler: Sampler, port: _Resident, clock: Clock
    ) -> None:
        self._scheduler, self._runner, self._sampler = scheduler, runner, sampler
        self._port, self._clock = port, clock
        self._random = np.random.default_rng(0)

    def run(self, batch: int, until: float) -> list[_Part]:
        """`batch` requests together; the first step is their prompts, and counts as well if the rest takes too long."""
        vocab = self._scheduler.settings.vocab_size
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
        now = self._clock.now()
        requests = []
        for index in range(batch):
            prompt = self._random.integers(0, vocab, BATCHES[batch]).tolist()
            requests.append(Request(f"{batch}/{index}", prompt, params, now))
            self._scheduler.add(requests[-1])
        parts: list[_Part] = []
        while not self._scheduler.is_idle and (not parts or self._clock.now() < until):
            parts.append(self._step())
        for request in requests:
            self._scheduler.abort(request.request_id)
        return parts

    def _step(self) -> _Part:
        runner, clock = self._runner, self._clock
        began, before = clock.now(), replace(runner.times)
        plan = self._scheduler.plan_step(began)
        assert plan is not None, "requests wait, and none of them can run"
        hidden = None
        if runner.first_layer:
            hidden = torch.zeros(plan.num_rows, runner.decoder.spec.width)
        context = sum((piece.start + piece.count) * piece.count for piece in plan.slices)
        result = runner.run(plan, hidden)
        if result.failed:
            raise _broken(next(iter(result.failed.values())))
        sampling = [piece.request for piece in plan.slices if piece.samples]
        chosen = [0] * len(sampling)
        if result.logits is not None:
            chosen = self._sampler.sample(result.logits, sampling).token_ids.tolist()
            if min(chosen, default=0) < 0:
                raise _broken(
                    f"layers to {runner.decoder.last_layer} and the head gave logits that are not finite"
                )
        tokens = {request.request_id: token for request, token in zip(sampling, chosen, strict=True)}
        self._scheduler.complete(plan, tokens, clock.now())
        times = runner.times
        experts, head = self._port.seconds, times.head - before.head
        trunk = times.attention - before.attention + times.experts - before.experts - experts
        rest = clock.now() - began - experts - head - trunk
        return _Part(plan.num_rows, trunk, experts, head, rest, self._port.touched, self._port.pairs, context)


def _broken(why: str) -> CheckpointError:
    return CheckpointError(
        f"steps on made-up tokens fail: {why}; look for NaN, infinite or huge numbers there, or copy the model's files again"
    )


def typical(parts: Sequence[_Part]) -> list[_Part]:
    """One for each number of rows: of each of its numbers the lower quartile, of what was done the mean."""
    found = []
    for rows in sorted({part.rows for part in parts}):
        table = np.array([part for part in parts if part.rows == rows])
        low, mean = np.quantile(table, QUANTILE, axis=0), table.mean(axis=0)
        found.append(_Part(rows, *(float(value) for value in (*low[1:5], *mean[5:]))))
    return found


def _speed_of(
    footprint: ModelFootprint, parts: Sequence[_Part], weight_format: str, first: int, last: int
) -> NodeSpeed:
    """Fit a speed to the parts of steps through layers [first, last)."""
    layers = range(first, last)
    trunk_bytes = sum(footprint.layer_bytes[layer] for layer in layers)
    kv_bytes = sum(footprint.kv_bytes_per_token[layer] for layer in layers)
    head_bytes = footprint.head_bytes + (footprint.embed_bytes if footprint.head_is_tied else 0)
    samples = []
    # Of a prompt's rows few are sampled and few tables are laid out: they say little of what a row of decoding takes.
    decoding = [part for part in parts if part.rows in BATCHES] or parts
    for part in decoding:
        work, attended = operations(footprint, trunk_bytes, part.rows), part.context * kv_bytes
        samples.append(
            SpeedSample(trunk_bytes, work, part.trunk, layers=len(layers), attended_bytes=attended)
        )
        if last == footprint.num_layers:
            samples.append(SpeedSample(head_bytes, operations(footprint, head_bytes, part.rows), part.head))
    fitted = fit_speed(samples)
    per_row, fixed = _line([part.rows for part in decoding], [part.rest for part in decoding])
    moe_layers = [layer for layer in footprint.moe_layers if layer in layers]
    return replace(
        fitted,
        step_overhead_s=max(fixed, 1e-6),
        row_overhead_s=max(per_row, 0.0),
        send_overhead_s=NodeSpeed.send_overhead_s,
        experts=_expert_speed(footprint, decoding, weight_format, len(moe_layers)),
    )


def _expert_speed(
    footprint: ModelFootprint, parts: Sequence[_Part], weight_format: str, num_layers: int
) -> ExpertSpeed | None:
    """Fit an expert speed to what was computed; None where nothing was."""
    sizes = [size for size in footprint.expert_bytes[weight_format] if size]
    stored = [size for size in footprint.expert_bytes["as_stored"] if size]
    done = [part for part in parts if part.pairs]
    if not done or not sizes:
        return None
    size, of_row = sum(sizes) / len(sizes), operations(footprint, sum(stored) / len(stored))
    fitted = fit_speed(
        [
            SpeedSample(part.touched * size, part.pairs * of_row, part.experts, layers=num_layers)
            for part in done
        ]
    )
    return ExpertSpeed(
        bytes_per_s=fitted.memory_bytes_per_s, flops=fitted.flops, overhead_s=fitted.layer_overhead_s
    )


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and height at 0 of the line through the first and the last point; slope 0 with one point."""
    if len(xs) < 2:
        return 0.0, float(ys[0])
    slope = max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
    return slope, float(ys[0]) - slope * xs[0]


def try_experts(
    footprint: ModelFootprint, store: ExpertStore, *, weight_format: str, clock: Clock
) -> NodeSpeed:
    """The speed of a node that only runs experts: calls of one, of sixteen and of four rows, layer after layer."""
    generator = torch.Generator().manual_seed(0)
    layers = [layer for layer in footprint.moe_layers if store.bank(layer) is not None]

    def call(batch: int, layer: int) -> _Part:
        bank = store.bank(layer)
        assert bank is not None
        held = torch.tensor(sorted(bank.resident), dtype=torch.int32)
        num_pairs = batch * footprint.top_k
        x = torch.randn(batch, footprint.width, generator=generator)
        rows = torch.arange(batch, dtype=torch.int32).repeat_interleave(footprint.top_k)
        chosen = held[torch.randint(len(held), (num_pairs,), generator=generator)]
        began = clock.now()
        found = on_host(ops.grouped_ffn(*on_device((x, rows, chosen)), bank))
        took = clock.now() - began
        if len(wrong := chosen[~found.isfinite().all(dim=1)].unique().tolist()):
            experts = ", ".join(map(str, wrong))
            raise _broken(f"layer {layer} experts {experts} gave numbers that are not finite")
        return _Part(batch, 0.0, took, 0.0, 0.0, len(np.unique(chosen.numpy())), num_pairs, 0)

    if not backends.is_on_host():
        for batch in BATCHES:  # kernels are compiled when they are first called
            for layer in layers[:1]:
                call(batch, layer)
    parts: list[_Part] = []
    until = clock.now() + BUDGET_S
    for batch in BATCHES:
        for layer in (*layers[:1], *layers):  # the first time warms up
            if clock.now() >= until:
                break
            parts.append(call(batch, layer))
    found = typical(parts)
    speed = _expert_speed(footprint, found, weight_format, 1) if found else None
    if speed is None:
        return NodeSpeed()
    return NodeSpeed(memory_bytes_per_s=speed.bytes_per_s, flops=speed.flops, experts=speed)


def send_seconds(footprint: ModelFootprint, clock: Clock) -> float:
    """What laying out and encoding one call takes; putting it on the wire is not in it."""
    if not footprint.width or not footprint.experts_per_layer:
        return NodeSpeed.send_overhead_s
    generator = torch.Generator().manual_seed(0)
    num_experts, columns = footprint.experts_per_layer, footprint.top_k
    ids = torch.randint(num_experts, (4, columns), generator=generator, dtype=torch.int32)
    table = torch.ones(num_experts, dtype=torch.int32)
    x = np.zeros((4, footprint.width), dtype=np.float32)
    took = []
    for _ in range(CALLS):
        began = clock.now()
        split = ops.dispatch(ids, table, 2)
        pairs, rows, pair_rows = split.pairs.numpy(), split.rows.numpy(), split.pair_rows.numpy()
        encode(
            ExpertCall(0),
            call_id=1,
            epoch=1,
            ttl_s=1.0,
            tensors=(x[rows], pair_rows, ids.numpy().reshape(-1)[pairs]),
        )
        took.append(clock.now() - began)
    return float(np.quantile(took, QUANTILE))
