"""The engine of a decode group of several stages: schedules, runs the first layers, and has later stages do the rest.

As many steps are under way as there are stages, each of requests of its own, so that every stage has one to work on. A
step that is lost on the way is planned again: nothing of it counts before its result is here, and computing it twice
writes the same numbers twice. Knows no socket: `LaterStages` sends, and results come in through `take`.
"""

import logging
import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import msgspec
import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.engine.bill import Account, StagesAccounts, served_in_stages
from edge_runtime.engine.engine import HELD_S, Engine, Output
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request
from edge_runtime.engine.runner import HostedExperts, Runner, tiers_of
from edge_runtime.engine.scheduler import Scheduler
from edge_runtime.engine.stage_quality import is_of, layers_of, sent_allowances, sent_trace, taken_back
from edge_runtime.engine.stage_step import NO_COUNTS, own_logprobs, sent_step
from edge_runtime.engine.step_books import StepBooks
from edge_runtime.protocol import StageResult, StageStep
from kernels.transfers import on_host

log = logging.getLogger(__name__)

LOOK_S = 0.05  # how often the connection is looked at while results are awaited


class LaterStages(Protocol):
    """How the first stage reaches the others."""

    @property
    def nodes(self) -> Sequence[str]:
        """Of the whole group, in the order of the layers."""

    def look(self) -> str:
        """Notice what became of the connection to the next stage: why nothing can be sent to it, empty if it can."""

    def send(self, step: StageStep, tensors: Sequence[Any]) -> str:
        """Send a step on its way: why that did not work, empty if it did."""


@dataclass
class StageTimes:
    """Sums since the start, over steps that came back. by_stage: seconds computed, in the order of the layers."""

    steps: int = 0
    round_s: float = 0.0
    by_stage: tuple[float, ...] = ()


@dataclass
class _UnderWay:
    """A step whose result is awaited.

    books    what its rows may spend of quality, and have spent here
    counted  slices that end a prompt whose counts are wanted
    """

    plan: StepPlan
    sent_s: float
    books: StepBooks | None = None
    counted: Sequence[int] = ()


class PipelineEngine(Engine):
    """Steps over the requests it was given, with the layers after its own elsewhere.

    runner      the first layers
    patience_s  how long a step may take for each stage, and how long the next stage may be out of reach, before the
                requests are given back: another group may go on with them
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, stages: LaterStages, clock: Clock, patience_s: float
    ) -> None:
        if not 0 == runner.first_layer < runner.last_layer < runner.num_layers:
            raise ValueError(
                f"a first stage has the first of {runner.num_layers} layers and not the last, found "
                f"[{runner.first_layer}, {runner.last_layer})"
            )
        self._begin(scheduler, runner, clock)
        self.stages = stages
        self.stage_times = StageTimes()
        self._first = runner
        self._patience_s = patience_s
        self._under_way: dict[int, _UnderWay] = {}
        self._accounts = StagesAccounts(runner.port.host_names[0])
        self._trouble_s: float | None = None  # since when no step gets through
        self._may_start = True
        self._new_run()

    def _new_run(self) -> None:
        self._run, self._opens = secrets.token_hex(8), True

    @property
    def num_under_way(self) -> int:
        """Steps whose result is awaited."""
        return len(self._under_way)

    def submit(self, request: Request, before: Account | None = None) -> None:
        """See Engine."""
        request.wants_counts &= self._first.signatures is not None
        super().submit(request, before)

    # Steps.

    def step(self) -> list[Output]:
        """Start one more step if a stage could be without work, and give up what takes too long."""
        now = self.clock.now()
        self._may_start = False
        patience_s = self._patience_s * len(self.stages.nodes)
        if any(now - step.sent_s > patience_s for step in self._under_way.values()):
            nodes = ", ".join(self.stages.nodes[1:])
            return self._give_back(f"no result came from {nodes} within {patience_s:g} s")
        why = self.stages.look()
        if why:
            self.abandon_all()  # what was on its way went with the connection
            return self._in_trouble(why)
        if len(self._under_way) >= len(self.stages.nodes):
            return []
        waiting = -(-max(1, self.scheduler.num_running) // len(self.stages.nodes))
        plan = self.scheduler.plan_step(now, most_decodes=waiting)
        self.runner.times.plan += self.clock.now() - now
        return self._start(plan) if plan is not None else []

    def _start(self, plan: StepPlan) -> list[Output]:
        began, num_slices = self.clock.now(), len(plan.slices)
        rows, tiers = self._first.rows(plan), tiers_of(plan)
        books = None
        if self.books is not None and rows.encoder_tokens is None:
            books = self.books.begin_step(plan)
        spans = [(piece.request.block_table, piece.start, piece.count) for piece in plan.slices]
        ran = self._first.run_rows(
            rows,
            num_slices,
            counted=self._first.begin_counting(plan.num_rows, spans),
            books=books,
            tiers=tiers,
        )
        if ran.waits:
            self._abandon(_UnderWay(plan, began, books))
            self.is_held = True
            return []
        sent = sent_step(plan, rows)
        hosts, served = served_in_stages(
            (),
            np.zeros((num_slices, 1), dtype=np.float32),
            self._first.port.host_names,
            self._first.served(num_slices),
        )
        counted, counts = self._counts_of(plan)
        now = self.clock.now()
        message = StageStep(
            run=self._run,
            step=plan.step_index,
            opens=self._opens,
            choices=sent.choices,
            hosts=hosts,
            failed=list(ran.failed.items()),
            seconds=[now - began],
            tiers=tiers,
            dropped=self._first.dropped.of_step() if tiers else [],
            counted=counted,
        )
        if self.books is not None and books is not None:
            message = msgspec.structs.replace(
                message,
                allowances=sent_allowances(books),
                start_price=self.books.start_price,
                traced=list(books.traced),
                trace=sent_trace(books),
            )
        step = _UnderWay(plan, now, books, counted)
        tensors = (on_host(ran.hidden).numpy(), sent.slices, sent.blocks, sent.tokens, served, counts)
        why = self.stages.send(message, tensors)
        if why:
            self._abandon(step)
            return self._in_trouble(why)
        self._opens = False
        self._under_way[plan.step_index] = step
        self._may_start = True
        return []

    def _counts_of(self, plan: StepPlan) -> tuple[list[int], np.ndarray]:
        """Slices that end a prompt whose choices of experts are wanted, and [c, L, E] int16 those of the first layers."""
        counted = [
            index
            for index, piece in enumerate(plan.slices)
            if piece.request.wants_counts and piece.start + piece.count == len(piece.request.prompt_ids)
        ]
        found = [self._first.prompt_counts(plan.slices[index].request) for index in counted]
        own = [each for each in found if each is not None]
        return counted, np.stack(own) if own else NO_COUNTS

    def take(self, result: StageResult, served: np.ndarray, counts: np.ndarray = NO_COUNTS) -> list[Output]:
        """Take in what became of a step; nothing if it was given up meanwhile. Tensors as in StageResult."""
        step = self._under_way.get(result.step) if result.run == self._run else None
        if step is None:
            return []
        if result.outcome == "unknown run":
            return self._start_over(result.why)
        del self._under_way[result.step]
        if result.outcome != "ran" or not self._fits(result, served, step):
            self._abandon(step)
            if result.outcome == "waits":
                self.is_held = True
                return []
            return self._in_trouble(result.why or "the last stage sent a result of another step")
        self._trouble_s = None
        slices, now = step.plan.slices, self.clock.now()
        runs = [piece.request.state == "running" for piece in slices]  # the others ended meanwhile
        running = [piece.request.request_id for piece in slices if piece.request.state == "running"]
        self._accounts.book(running, result.hosts, served[runs])
        if self.books is not None and step.books is not None:
            self.books.end_step(step.plan, step.books, layers_of(result.trace))
            self.books.learn_start_price(result.start_price)
        for piece, sums in zip(slices, result.dropped, strict=False):
            if piece.request.state == "running":
                self._first.dropped.book(piece.request.request_id, sums, piece.count)
        self._take_counts(step, counts)
        times, self_times = self.stage_times, self.runner.times
        times.steps += 1
        times.round_s += now - step.sent_s
        before = times.by_stage or (0.0,) * len(result.seconds)
        times.by_stage = tuple(a + b for a, b in zip(before, result.seconds, strict=False))
        self_times.steps += 1
        self_times.rows_computed += step.plan.num_rows
        failed = {slices[index].request.request_id: why for index, why in reversed(result.failed)}
        return self._settle(step.plan, result.token_ids, own_logprobs(result.logprobs), failed)

    def _fits(self, result: StageResult, served: np.ndarray, step: _UnderWay) -> bool:
        """Whether a result is one of this step; the last stage is not trusted with our arrays, nor with our ledgers.

        What the stages have spent is then in the step's books.
        """
        plan, books = step.plan, step.books
        num_sampling = sum(piece.samples for piece in plan.slices)
        return (
            len(result.token_ids) == num_sampling
            and max(result.token_ids, default=0) < self.scheduler.settings.vocab_size
            and len(result.logprobs) in (0, num_sampling)
            and served.shape == (len(plan.slices), 1 + 2 * len(result.hosts))
            and all(index < len(plan.slices) for index, _ in result.failed)
            and len(result.dropped) == (len(plan.slices) if tiers_of(plan) else 0)
            and all(map(math.isfinite, [*chain.from_iterable(result.dropped), result.start_price]))
            and is_of(result.trace, books.traced if books is not None else ())
            and (books is None or taken_back(books, result.allowances))
        )

    def _take_counts(self, step: _UnderWay, counts: np.ndarray) -> None:
        """Which experts prompts chose, where every stage has counted."""
        is_whole = len(counts) == len(step.counted)
        for place, index in enumerate(step.counted):
            request = step.plan.slices[index].request
            request.wants_counts = False
            request.prompt_counts = counts[place] if is_whole else None

    # When a step does not get through.

    def _in_trouble(self, why: str) -> list[Output]:
        """Nothing can be sent now: try again for a while, then let another group go on with the requests."""
        self.is_held = True
        now = self.clock.now()
        if self.scheduler.is_idle:
            self._trouble_s = None
        elif self._trouble_s is None:
            self._trouble_s = now
            log.warning("steps are held: %s", why)
        elif now - self._trouble_s > self._patience_s:
            return self._give_back(why)
        return []

    def _start_over(self, why: str) -> list[Output]:
        """A stage has lost what its blocks held: everything is computed again, under another run."""
        log.warning("computing everything again: %s", why)
        self.give_up_steps()
        self.scheduler.start_over()
        self._new_run()
        return self._in_trouble(why)

    def _give_back(self, why: str) -> list[Output]:
        self.abandon_all()
        self._trouble_s = None
        outputs = []
        for request in self.scheduler.requests():
            finished = self.scheduler.finish(request.request_id, "error", error=why)
            assert finished is not None, "the scheduler has it"
            output = self._ended(finished, None, None)
            assert output.ended is not None, "it has just ended"
            outputs.append(output._replace(ended=output.ended._replace(cause="stage")))
        return outputs

    def abandon_all(self) -> None:
        """Await no result any more: what was under way is planned again."""
        for step in self._under_way.values():
            self._abandon(step)
        self._under_way.clear()
        self._may_start = True

    def _abandon(self, step: _UnderWay) -> None:
        """A step did not happen: its requests are planned again, and may spend again what was held for it."""
        self.scheduler.abandon(step.plan)
        self._release(step)

    def give_up_steps(self) -> None:
        """See Engine."""
        for step in self._under_way.values():
            self._release(step)
        self._under_way.clear()

    def _release(self, step: _UnderWay) -> None:
        if self.books is not None and step.books is not None:
            self.books.give_up(step.books)

    def peers_changed(self, alive: Collection[str]) -> None:
        """The coordinator's word on who serves: nothing comes back through a node that does not."""
        if not set(self.stages.nodes) <= set(alive):
            self.abandon_all()

    # The thread, and changes of placement.

    def woken(self) -> None:
        super().woken()
        self._may_start = True

    def rest_s(self) -> float | None:
        if self.is_held:
            return HELD_S
        if self.scheduler.is_idle:
            return None
        return 0.0 if self._may_start else LOOK_S

    def switch_stages(self, runner: Runner, port: HostedExperts, stages: LaterStages) -> None:
        """Let another placement serve from the next step on; blocks stay where the stages have kept them."""
        self.abandon_all()
        self._carry_accounts_of(self)
        runner.switch_port(port)
        self.stages = stages

    def close(self) -> None:
        self._under_way.clear()
        super().close()

    def _take_account(self, request_id: str) -> Account:
        return self._accounts.take(request_id)

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)
