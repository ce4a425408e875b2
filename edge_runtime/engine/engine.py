"""The engine: scheduler, runner and sampler in one step, and the thread that turns steps.

Requests and aborts come in through a queue, outputs leave through a callback; neither ever waits for the other side.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from edge_runtime.cache.block_pool import BLOCK_SHIFT
from edge_runtime.cache.block_store import BlockStore
from edge_runtime.clock import Clock
from edge_runtime.engine.bill import Account, bill_of, joined_accounts
from edge_runtime.engine.dropped import sliced_bill, whole_bill
from edge_runtime.engine.plan import Finished, StepPlan, StepSlice
from edge_runtime.engine.quality import QualityBooks, traced
from edge_runtime.engine.request import FinishReason, Request
from edge_runtime.engine.runner import HostedExperts, Runner
from edge_runtime.engine.scheduler import Scheduler
from edge_runtime.errors import EdgeError, UserError
from edge_runtime.model.sampling import Sampled, Sampler, TokenLogprobs

log = logging.getLogger(__name__)

NOTHING = Sampled(torch.empty(0, dtype=torch.int64), (), ())
HELD_S = 0.02  # how long a step that lacks experts waits before it is tried again


class Output(NamedTuple):
    """What one step brought one request: a token, an end, or both; or a part of a prompt that is computed for others."""

    request_id: str
    token_id: int | None
    logprobs: TokenLogprobs | None
    ended: "Ended | None"
    part: "PromptPart | None" = None


class PromptPart(NamedTuple):
    """How far a prompt is computed.

    counts  [L, E] int16, which experts its tokens so far chose; None where nothing is counted
    hashes  content hashes of its full blocks so far, in order
    """

    counts: np.ndarray | None
    hashes: tuple[bytes, ...]


class Ended(NamedTuple):
    """How a request ended, and what it cost.

    request        with its tokens and the moments of its life
    finish_reason  `stop`, `length`, `abort` or `error`
    detail         for `error`: one sentence that names node and experts
    cause          for `error`: what was missing
    ended_s        when, on the engine's clock
    is_users_fault whether the request itself could not be served
    slots          expert slots computed for it, by node name
    trace          where its gate weight was served, by layer, if it asked for that
    account        what bill and slots were made of; None if it never was in an engine
    option         for a fault of the user's: which of the request's options, empty if none
    """

    request: Request
    finish_reason: FinishReason
    detail: str
    ended_s: float
    is_users_fault: bool = False
    bill: Mapping[str, float] = MappingProxyType({})
    slots: Mapping[str, int] = MappingProxyType({})
    cause: Literal["experts", "stage"] = "experts"
    trace: list[dict[str, Any]] | None = None
    account: Account | None = None
    option: str = ""


class Engine:
    """Steps over the requests it was given. Not thread-safe: one thread calls everything.

    runner  of all layers of the model
    blocks  its KV by content, where it is handed on and taken in
    """

    blocks: BlockStore | None = None

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        clock: Clock,
        blocks: BlockStore | None = None,
    ) -> None:
        if (runner.first_layer, runner.last_layer) != (0, runner.num_layers):
            raise ValueError(
                f"an engine samples, so it runs all {runner.num_layers} layers, not "
                f"[{runner.first_layer}, {runner.last_layer})"
            )
        self.sampler = sampler
        self.blocks = blocks
        self._begin(scheduler, runner, clock)

    def _begin(self, scheduler: Scheduler, runner: Runner, clock: Clock) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.books: QualityBooks | None = None  # of its runner, where requests may have a quality budget
        self.tokens_generated = 0
        self.is_held = False
        self.is_closed = False
        self._carried: dict[str, list[Account]] = {}  # of running requests, from before a change of placement

    def submit(self, request: Request, before: Account | None = None) -> None:
        """Queue a request. Raises RequestError when it could never fit.

        before  what it has cost elsewhere: it belongs on its bill
        """
        self.scheduler.add(request)
        if before is not None:
            self._carried[request.request_id] = [before]

    def abort(self, request_id: str) -> Output | None:
        """End a request now and free its blocks; None if it is not here (it may have ended by itself)."""
        finished = self.scheduler.abort(request_id)
        return self._ended(finished, None, None) if finished is not None else None

    @property
    def is_idle(self) -> bool:
        """Nothing waits or runs."""
        return self.scheduler.is_idle

    def step(self) -> list[Output]:
        """Plan, run, sample, settle. Empty when nothing can run."""
        times, now = self.runner.times, self.clock.now
        began = now()
        plan = self.scheduler.plan_step(began)
        times.plan += now() - began
        if plan is None:
            return []
        result = self.runner.run(plan)
        self.is_held = result.waits
        if (
            result.waits
        ):  # experts have no host, and another placement is on its way: the same step is tried again
            self.scheduler.abandon(plan)
            return []
        self._take_prompt_counts(plan)
        times.steps += 1
        times.rows_computed += plan.num_rows

        began = now()
        sampling = [piece.request for piece in plan.slices if piece.samples]
        sampled = self.sampler.sample(result.logits, sampling) if result.logits is not None else NOTHING
        times.sample += now() - began
        return self._settle(plan, sampled.token_ids.tolist(), sampled.logprobs, result.failed)

    def _settle(
        self,
        plan: StepPlan,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        failed: Mapping[str, str],
    ) -> list[Output]:
        """Take in what a step brought.

        token_ids  of the requests that sample, in slice order, -1 where the logits were not finite
        logprobs   likewise, or empty
        failed     request id -> why it ends here
        """
        began, now = self.clock.now(), self.clock.now
        sampling = [piece.request for piece in plan.slices if piece.samples]
        tokens: dict[str, int] = {}
        for request, token_id in zip(sampling, token_ids, strict=True):
            request_id = request.request_id
            if request.state != "running":  # it ended while the step was under way
                continue
            if token_id < 0:
                why = f"request {request_id}: the model's logits are not finite"
                failed = {request_id: why} | dict(failed)
            elif request_id not in failed:
                tokens[request_id] = token_id
        ended = self.scheduler.complete(plan, tokens, began, failed=failed)
        finished = {done.request.request_id: done for done in ended}
        self.tokens_generated += len(tokens)

        outputs = []
        for index, request in enumerate(sampling):
            request_id = request.request_id
            chosen = tokens.get(request_id)
            if chosen is not None:
                detail = logprobs[index] if logprobs else None
                done = finished.pop(request_id, None)
                if done is None:
                    outputs.append(Output(request_id, chosen, detail, None))
                else:
                    outputs.append(self._ended(done, chosen, detail))
        outputs.extend(self._ended(done, None, None) for done in finished.values())
        outputs.extend(self._part(piece) for piece in plan.slices if _brings_blocks(piece))
        self.runner.times.plan += now() - began
        return outputs

    def _part(self, piece: StepSlice) -> Output:
        request = piece.request
        counts = self.runner.prompt_counts(request) if request.wants_counts else None
        full = request.num_computed >> BLOCK_SHIFT
        return Output(
            request.request_id, None, None, None, PromptPart(counts, tuple(request.block_hashes[:full]))
        )

    def _take_prompt_counts(self, plan: StepPlan) -> None:
        for piece in plan.slices:
            request = piece.request
            if request.wants_counts and piece.start + piece.count == len(request.prompt_ids):
                request.wants_counts = False
                request.prompt_counts = self.runner.prompt_counts(request)

    def rest_s(self) -> float | None:
        """How long the thread may sleep unless an order comes: 0 if there is something to do, None if there is nothing."""
        if self.is_held:
            return HELD_S
        return None if self.is_idle else 0.0

    def woken(self) -> None:
        """An order came: what was in vain may be tried again."""
        self.is_held = False

    def begin(self) -> None:
        """Steps of it follow: the memory that they write is there from now on, or is found missing now."""
        self.runner.touch()

    def close(self) -> None:
        """No step of it follows: what it kept for them is given back, and none of its blocks can be found."""
        self.is_closed = True
        self.scheduler.pool.forget_all()
        self.runner.give_back()

    def give_up_steps(self) -> None:
        """Nothing that is under way counts any more: another engine goes on with its requests."""

    def switch_port(self, runner: Runner, port: HostedExperts) -> None:
        """Let another placement serve this engine's `runner` from the next step on."""
        self._carry_accounts_of(self)
        runner.switch_port(port)

    def take_over(self, other: "Engine") -> list[Output]:
        """Go on with everything that another engine of the same model has waiting or running.

        What it computed is computed again here: prompt and tokens so far are prefilled. The outputs are of requests
        that cannot go on here.
        """
        other.give_up_steps()
        self._carry_accounts_of(other)
        if self.books is not None and other.books is not None:
            self.books.take_over(other.books)
        self.tokens_generated += other.tokens_generated
        outputs = []
        for old in other.scheduler.requests():
            request = Request(
                old.request_id,
                old.prompt_ids,
                old.params,
                old.arrival_s,
                salt=old.salt,
                exactness=old.exactness,
                output_ids=old.output_ids,
                encoder_tokens=old.encoder_tokens,
                user=old.user,
                trace=old.trace,
                wants_counts=old.wants_counts,
                tier=old.tier,
                is_handed_on=old.is_handed_on,
            )
            request.prompt_counts = old.prompt_counts
            request.first_planned_s, request.first_token_s = old.first_planned_s, old.first_token_s
            try:
                self.submit(request)
            except EdgeError as error:
                self._carried.pop(request.request_id, None)
                outputs.append(
                    Output(request.request_id, None, None, _refused(request, error, self.clock.now()))
                )
        return outputs

    def _carry_accounts_of(self, other: "Engine") -> None:
        for request in other.scheduler.requests():
            carried = self._carried.setdefault(request.request_id, other._carried.pop(request.request_id, []))
            carried.append(other._take_account(request.request_id))

    def _take_account(self, request_id: str) -> Account:
        return self.runner.take_account(request_id)

    @property
    def num_accounts(self) -> int:
        """Accounts that are open: of requests that run, or ran and were preempted."""
        return self.runner.num_accounts

    def _ended(self, finished: Finished, token_id: int | None, logprobs: TokenLogprobs | None) -> Output:
        request = finished.request
        account = self._take_account(request.request_id)
        carried = self._carried.pop(request.request_id, None)
        if carried:
            account = joined_accounts([account, *carried])
        bill, slots = bill_of(account)
        if self.books is not None:
            bill, traced_here = self.books.close(request, bill, float(account.served[0].sum()))
            account = joined_accounts([account, Account(np.zeros((2, 0)), [], 0.0, traced_here)])
        if request.tier:
            bill = sliced_bill(bill, request.tier, self.runner.take_dropped(request.request_id))
        elif self.runner.gates is not None:
            bill = whole_bill(bill, self.runner.gates.elasticity.full_tier)
        ended = Ended(
            request,
            finished.reason,
            finished.error,
            self.clock.now(),
            bill=bill,
            slots=slots,
            trace=traced(account.trace) if request.trace and self.books is not None else None,
            account=account,
        )
        return Output(request.request_id, token_id, logprobs, ended)


def _brings_blocks(piece: StepSlice) -> bool:
    """Whether a slice brought blocks of a prompt that another engine goes on with, and the prompt has more to come."""
    request, end = piece.request, piece.start + piece.count
    return (
        request.is_handed_on
        and request.state == "running"
        and end < len(request.prompt_ids)
        and end >> BLOCK_SHIFT > piece.start >> BLOCK_SHIFT
    )


def _refused(request: Request, error: EdgeError, now: float) -> Ended:
    option = getattr(error, "field", None) or ""
    return Ended(request, "error", str(error), now, isinstance(error, UserError), option=option)


class EngineThread(threading.Thread):
    """Turns an engine's steps in a thread of its own until told to stop.

    outputs_ready(outputs) is called from this thread after every step that brought something; it must not block.
    A fault of ours ends the loop and is kept in `.fault`; died() lets the daemon end loudly.
    """

    def __init__(
        self, engine: Engine, outputs_ready: Callable[[list[Output]], None], died: Callable[[], None]
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.fault: BaseException | None = None
        self._outputs_ready = outputs_ready
        self._died = died
        self._inbox: queue.SimpleQueue[Callable[[Engine], list[Output]] | None] = queue.SimpleQueue()

    def submit(self, request: Request, before: Account | None = None) -> None:
        """Queue a request from any thread; one that cannot run comes back as an output that ended with `error`."""

        def submit(engine: Engine) -> list[Output]:
            try:
                engine.submit(request, before)
            except EdgeError as error:
                ended = _refused(request, error, engine.clock.now())
                return [Output(request.request_id, None, None, ended)]
            return []

        self._inbox.put(submit)

    def abort(self, request_id: str) -> None:
        """Abort from any thread; blocks are free within one step."""

        def abort(engine: Engine) -> list[Output]:
            output = engine.abort(request_id)
            return [output] if output is not None else []

        self._inbox.put(abort)

    def order(self, action: Callable[[Engine], list[Output]]) -> None:
        """Run `action` between two steps; what it brings goes the way of a step's outputs."""
        self._inbox.put(action)

    def call(self, action: Callable[[Engine], None]) -> None:
        """Run `action` between two steps."""

        def run(engine: Engine) -> list[Output]:
            action(engine)
            return []

        self._inbox.put(run)

    def switch(self, action: Callable[[Engine], tuple[Engine, list[Output]]]) -> None:
        """Let `action` say, between two steps, which engine takes the next one, and what it ended on the way."""

        def switch(engine: Engine) -> list[Output]:
            self.engine, outputs = action(engine)
            if self.engine is not engine:
                engine.close()  # first: a node need not have room for both
                self.engine.begin()
            return outputs

        self._inbox.put(switch)

    def stop(self) -> None:
        """End the loop after the step in hand. Join to wait for it."""
        self._inbox.put(None)

    def run(self) -> None:
        try:
            while self._take_orders():
                outputs = self.engine.step()
                if outputs:
                    self._outputs_ready(outputs)
        except BaseException as fault:
            log.exception("the engine ended on a fault of its own")
            self.fault = fault
            self._died()

    def _take_orders(self) -> bool:
        """Carry out what waits in the inbox; sleeps in it while the engine has nothing to do. False: stop."""
        while True:
            rest_s = self.engine.rest_s()
            try:
                order = self._inbox.get(block=rest_s != 0, timeout=rest_s)
            except queue.Empty:
                return True
            self.engine.woken()
            if order is None:
                return False
            outputs = order(self.engine)
            del order  # or a thread that sleeps keeps what the last order knew: a whole share that was closed
            if outputs:
                self._outputs_ready(outputs)
