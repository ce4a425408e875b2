"""Runs a later stage's layers for steps that come from the stage before, and samples at the end of the model.

Knows no request: blocks are handed out by the group's first stage, and a step brings all it needs. Knows no socket.
"""

from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from edge_runtime.clock import Clock
from edge_runtime.engine.bill import served_in_stages
from edge_runtime.engine.runner import HostedExperts, Runner
from edge_runtime.engine.stage_quality import books_at, sent_allowances, sent_trace
from edge_runtime.engine.stage_step import (
    COUNT,
    NO_COUNTS,
    START,
    StageLimits,
    counts_with,
    rows_of,
    sampled_rows,
    wire_logprobs,
)
from edge_runtime.engine.step_books import StepBooks
from edge_runtime.errors import Refusal
from edge_runtime.model.sampling import Sampler
from edge_runtime.protocol import StageResult, StageStep
from edge_runtime.selector.choose import Choice, Slots
from kernels.transfers import on_host

Tensors = tuple[Any, ...]
Done = tuple[StageStep | StageResult, Tensors]
NOTHING = (np.zeros((0, 1), dtype=np.float32), NO_COUNTS)


class SelectingExperts(HostedExperts, Protocol):
    """HostedExperts that can do without some, for rows that may spend quality. See `QualityBooks`."""

    @property
    def drag_per_deviation(self) -> float: ...

    def choose(self, layer: int, slots: Slots, may_defer: bool = False) -> Choice | None: ...

    def take_late(self) -> Choice | None: ...

    def start_price(self) -> float: ...


class LaterStage:
    """Layers [first, last) with first above 0, and the blocks of one run of a first stage.

    sampler  at the end of the model, else None
    """

    def __init__(self, runner: Runner, sampler: Sampler | None, clock: Clock, limits: StageLimits) -> None:
        assert runner.first_layer > 0, "layer 0 is the first stage's"
        assert (sampler is not None) == (runner.last_layer == runner.num_layers), "the last stage samples"
        self.runner = runner
        self.num_steps = 0
        self._sampler = sampler
        self._clock = clock
        self._limits = limits
        self._run = ""  # whose keys and values the blocks hold
        self._last_step = 0

    def run(self, step: StageStep, tensors: Tensors, port: SelectingExperts) -> Done | None:
        """Compute a step with the experts of `port`: what goes to the next stage, or to the first. None: too late.

        A step that was overtaken by a later one was given up by the first stage, and its blocks may be others' now.
        """
        if step.opens and step.run != self._run:
            self._run, self._last_step = step.run, 0
        if step.run != self._run:
            return no_result(
                step, "unknown run", "the keys and values of the steps before this one are not here"
            )
        if step.step <= self._last_step:
            return None
        try:
            return self._compute(step, *tensors, port=port)
        except Refusal as refusal:
            return no_result(step, "lost", str(refusal))

    def _compute(
        self,
        step: StageStep,
        hidden: np.ndarray,
        slices: np.ndarray,
        blocks: np.ndarray,
        tokens: np.ndarray,
        served: np.ndarray,
        counts: np.ndarray,
        *,
        port: SelectingExperts,
    ) -> Done:
        began, runner = self._clock.now(), self.runner
        rows = rows_of(slices, blocks, len(hidden), self._limits)
        sampling = sampled_rows(slices, step.choices, tokens, self._limits)
        if hidden.shape[1] != runner.decoder.spec.width:
            raise Refusal("shape", f"rows are {runner.decoder.spec.width} wide, found {hidden.shape[1]}")
        if served.shape != (len(slices), 1 + 2 * len(step.hosts)):
            raise Refusal("shape", f"{served.shape} numbers came of {len(step.hosts)} hosts")
        if step.tiers:
            self._refuse_tiers(step, len(slices))
        books = self._books_of(step, slices, port)
        self._last_step = step.step
        if runner.port is not port:
            runner.switch_port(port)
        tables = rows.block_tables.numpy()
        spans = [
            (table.tolist(), start, count)
            for table, start, count in zip(
                tables, slices[:, START].tolist(), slices[:, COUNT].tolist(), strict=True
            )
        ]
        # A copy, since the layers change it in place and the frame may be read-only.
        ran = runner.run_rows(
            rows,
            len(slices),
            torch.from_numpy(hidden.copy()),
            counted=runner.begin_counting(len(hidden), spans),
            books=books,
            tiers=step.tiers,
            dropped=step.dropped,
        )
        if ran.waits:
            return no_result(step, "waits", "experts have no host, and may have one soon")
        counts = counts_with(counts, step.counted, slices, tables, runner.counts_in)
        dropped = runner.dropped.of_step() if step.tiers else []
        allowances, trace, start_price = step.allowances, step.trace, step.start_price
        if books is not None:
            allowances, trace = sent_allowances(books), [*trace, *sent_trace(books)]
            start_price = start_price or port.start_price()
        hosts, served = served_in_stages(step.hosts, served, port.host_names, runner.served(len(slices)))
        failed = [*step.failed, *((index, why) for index, why in ran.failed.items())]
        self.num_steps += 1
        runner.times.steps += 1
        runner.times.rows_computed += len(hidden)
        if self._sampler is None:
            seconds = [*step.seconds, self._clock.now() - began]
            message = msgspec.structs.replace(
                step,
                hosts=hosts,
                failed=failed,
                seconds=seconds,
                dropped=dropped,
                allowances=allowances,
                start_price=start_price,
                trace=trace,
            )
            return message, (on_host(ran.hidden).numpy(), slices, blocks, tokens, served, counts)
        logits = runner.head(ran.hidden, rows)
        sampled_at = self._clock.now()
        sampled = self._sampler.sample(logits, sampling) if logits is not None else None
        runner.times.sample += self._clock.now() - sampled_at
        return StageResult(
            run=step.run,
            step=step.step,
            token_ids=[] if sampled is None else sampled.token_ids.tolist(),
            logprobs=[] if sampled is None else wire_logprobs(sampled),
            hosts=hosts,
            failed=failed,
            seconds=[*step.seconds, self._clock.now() - began],
            dropped=dropped,
            allowances=allowances,
            start_price=start_price,
            trace=trace,
        ), (served, counts)

    def _refuse_tiers(self, step: StageStep, num_slices: int) -> None:
        gates = self.runner.gates
        if gates is None:
            raise Refusal("tiers", "rows at a tier came, and experts are whole here")
        if not (len(step.tiers) == len(step.dropped) == num_slices) or (
            max(step.tiers) > gates.elasticity.full_tier
        ):
            raise Refusal("shape", f"{len(step.tiers)} tiers came for {num_slices} slices, or one beyond all")

    def _books_of(self, step: StageStep, slices: np.ndarray, port: SelectingExperts) -> StepBooks | None:
        """What rows may spend; None where nobody may, and nobody looks."""
        if not (step.allowances or step.traced):
            return None
        counts = slices[:, COUNT].astype(np.int64)
        return books_at(
            step.allowances, step.traced, counts, port.choose, port.take_late, port.drag_per_deviation
        )


def no_result(step: StageStep, outcome: Any, why: str) -> Done:
    """Tell the first stage that a step did not happen."""
    return StageResult(step.run, step.step, outcome, why), NOTHING
