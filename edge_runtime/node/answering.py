"""Answers the requests whose home this node is: hands them to the engine, and what it gives to the coordinator.

Runs on the control loop's thread. Knows the engine's thread and where blocks of KV come from; no socket, and of
placements only the one that the engine steps by.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from edge_runtime.cache.block_store import Blocks
from edge_runtime.cache.prefix import HASH_BYTES
from edge_runtime.clock import Clock
from edge_runtime.engine.engine import Ended, Engine, EngineThread, Output
from edge_runtime.engine.request import read_params
from edge_runtime.errors import RequestError
from edge_runtime.model.spec import EncoderSpec
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.answers import AnswerStream
from edge_runtime.node.handoff import BlockReceivers, FetchJob
from edge_runtime.node.requests import (
    HomeRequest,
    account_of,
    ended_by,
    make_request,
    prefilled_tensors,
)
from edge_runtime.node.share import LoadedShare
from edge_runtime.protocol import (
    Failed,
    FetchAhead,
    Finished,
    Generate,
    Handoff,
    Message,
    Prefilled,
    Prefilling,
)

log = logging.getLogger(__name__)

# How long answers go on without a coordinator, and those that ended are kept for the next one; of these at most so many.
ORPHAN_S = 60.0
MAX_ENDED = 256


class Answering:
    """The requests of one home, from Generate to their end.

    engine  the thread that computes them; None: this node answers nobody now
    """

    def __init__(
        self,
        node: str,
        tokenizer: Tokenizer,
        encoder: EncoderSpec | None,
        clock: Clock,
        receivers: BlockReceivers,
        *,
        serves_by: Callable[[], LoadedShare | None],
        tell: Callable[[Message, Sequence[Any]], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """encoder  of an encoder-decoder model

        serves_by  gives the share that the engine steps by
        tell       sends the coordinator a message with its tensors, and drops it while there is none
        post       has the control loop call something, from any thread
        """
        self.engine: EngineThread | None = None
        self._node = node
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._clock = clock
        self._receivers = receivers
        self._serves_by = serves_by
        self._tell = tell
        self._post = post
        self._requests: dict[str, HomeRequest] = {}
        self._aborting: set[str] = set()  # of them, those that the engine was told to end
        self._again: dict[str, Generate] = {}  # and what comes in their place
        # A coordinator may be gone before it passed their end on.
        self._just_ended: dict[str, HomeRequest] = {}
        self._fetching: dict[str, FetchJob] = {}  # of requests whose KV is on its way
        self._ahead: dict[str, list[FetchJob]] = {}  # of requests that will probably come, by id

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def start(self, engine: Engine, died: Callable[[], None]) -> None:
        """Answer with this engine from now on; `died` is called on its thread if that ends on a fault."""
        self.engine = EngineThread(
            engine, lambda outputs: self._post(lambda: self._take_outputs(outputs)), died
        )
        self.engine.start()

    def stop(self, why: str, *, is_planned: bool = False) -> None:
        """Stop answering: another home goes on. is_planned: another placement wants it so."""
        if self.engine is not None:
            self.engine.stop()
            self.engine.join()
            self.engine = None
        for request_id in self._requests:
            detail = f"node {self._node} {why} while it was answering"
            reason = "moving" if is_planned else "stopping"
            self._tell(Failed(request_id, "cluster", reason, detail, node=self._node), ())
        self._requests.clear()
        self._aborting.clear()
        self._again.clear()
        for job in (*self._fetching.values(), *(job for jobs in self._ahead.values() for job in jobs)):
            job.is_cancelled = True
        self._fetching.clear()
        self._ahead.clear()

    def end_all(self) -> None:
        """The coordinator has moved all of them to other homes."""
        self._just_ended.clear()
        for request_id in list(self._requests):
            self.abort(request_id)

    def tell_all(self) -> None:
        """Tell a coordinator that knows nothing of them which requests run here, and which have ended of late."""
        for home in (*self._just_ended.values(), *self._requests.values()):
            request_id = home.request.request_id
            if home.asked is not None and home.asked.prefill_only:
                self.abort(request_id)  # nobody is told where its blocks are to go
            elif request_id not in self._aborting:
                self._tell(home.still_running(), ())

    def forget(self, now: float, alone_s: float | None) -> None:
        """Without a coordinator for a minute nobody comes back for them; those that ended are kept as long.

        alone_s  seconds without a coordinator; None: there is one
        """
        if alone_s is not None and alone_s > ORPHAN_S:
            for request_id in list(self._requests):
                self.abort(request_id)
        while self._just_ended:
            oldest = next(iter(self._just_ended.values()))
            assert oldest.ended_s is not None, "only requests that ended are kept so"
            if len(self._just_ended) <= MAX_ENDED and now - oldest.ended_s <= ORPHAN_S:
                break
            del self._just_ended[oldest.request.request_id]

    def generate(self, generate: Generate) -> None:
        request_id = generate.request_id
        share = self._serves_by()
        if self.engine is None or share is None or share.engine is None:
            why = f"node {self._node} has no engine for epoch {share.epoch if share else 0}"
            self._tell(Failed(request_id, "cluster", "not_ready", why, node=self._node), ())
            return
        if request_id in self._aborting:  # it was taken away from here and comes back before it has ended
            self._again[request_id] = generate
            return
        if request_id in self._requests:
            why = f"request id {request_id} is in use at node {self._node}; choose another"
            self._tell(Failed(request_id, "user", "request", why, node=self._node), ())
            return
        settings = share.engine.scheduler.settings
        try:
            request = make_request(
                generate,
                self._tokenizer,
                vocab_size=settings.vocab_size,
                context_tokens=settings.context_tokens,
                now=self._clock.now(),
                encoder=self._encoder,
                elasticity=share.elasticity,
            )
        except RequestError as error:
            option = error.field or ""
            self._tell(Failed(request_id, "user", "request", str(error), node=self._node, option=option), ())
            return
        stream = AnswerStream(self._tokenizer.stream(), request.params.stop)
        is_first = share.later is not None
        stages = list(zip(share.first_layers, share.stages, strict=True)) if is_first else ()
        home = self._requests[request_id] = HomeRequest(
            request, stream, self._node, stages=stages, handoff=generate.handoff, asked=generate
        )
        if generate.prefill_only:
            asked = read_params(generate.sampling)
            home.goes_on = lambda: (
                ended_by(
                    request.output_ids,
                    asked,
                    num_tokens=len(request.tokens),
                    eos_ids=settings.eos_ids,
                    context_tokens=settings.context_tokens,
                )
                is None
            )
        ended = home.resume(settings.eos_ids, settings.context_tokens, self._clock.now())
        if ended is not None:
            self._take_outputs([Output(request_id, None, None, ended)])
        elif (
            generate.handoff is not None
            and generate.handoff.source.address
            and generate.handoff.source.name != self._node
        ):
            self._fetch_blocks(home, generate.handoff)
        else:
            self.engine.submit(request, account_of(generate.handoff.served) if generate.handoff else None)

    def _fetch_blocks(self, home: HomeRequest, handoff: Handoff) -> None:
        """Take in what the node that computed the prompt still has of it; the request begins when that is over."""
        request, engine_thread = home.request, self.engine
        assert engine_thread is not None, "a request comes to a node that has an engine"
        store = engine_thread.engine.blocks
        hashes = engine_thread.engine.scheduler.prompt_hashes(request)
        if store is None or not hashes:
            engine_thread.submit(request, account_of(handoff.served))
            return

        def done(num_blocks: int, why: str) -> None:
            self._post(lambda: self._begin_fetched(home, handoff, num_blocks, why))

        job = self._fetching[request.request_id] = FetchJob(
            request.request_id, hashes, store, _taking(engine_thread), done
        )
        self._receivers.fetch(handoff.source, job)

    def fetch_ahead(self, message: FetchAhead, hashes: np.ndarray) -> None:
        """Take in blocks of a prompt that is still being computed: they are cached, and nobody waits for them."""
        request_id, engine_thread = message.request_id, self.engine
        store = engine_thread.engine.blocks if engine_thread is not None else None
        if engine_thread is None or store is None or request_id in self._requests:
            return
        if not len(hashes) or hashes.shape[1] != HASH_BYTES:  # whoever computed the prompt has named them
            return

        job: FetchJob
        done = lambda *_: self._post(lambda: self._ended_ahead(job))  # noqa: E731
        job = FetchJob(
            request_id, [row.tobytes() for row in hashes], store, _taking(engine_thread), done, is_ahead=True
        )
        self._ahead.setdefault(request_id, []).append(job)
        self._receivers.fetch(message.source, job)

    def _ended_ahead(self, job: FetchJob) -> None:
        jobs = self._ahead.get(job.request_id, [])
        if job in jobs:
            jobs.remove(job)
        if not jobs:
            self._ahead.pop(job.request_id, None)

    def _begin_fetched(self, home: HomeRequest, handoff: Handoff, num_blocks: int, why: str) -> None:
        request_id = home.request.request_id
        if self._requests.get(request_id) is not home or self.engine is None:
            return  # it ended meanwhile
        del self._fetching[request_id]
        if why:
            log.info(
                "request %s: %d blocks came from %s: %s", request_id, num_blocks, handoff.source.name, why
            )
        self.engine.submit(home.request, account_of(handoff.served))

    def abort(self, request_id: str) -> None:
        self._again.pop(request_id, None)
        for ahead in self._ahead.pop(request_id, ()):
            ahead.is_cancelled = True
        job = self._fetching.pop(request_id, None)
        if job is not None:
            job.is_cancelled = True
            ended = Ended(self._requests[request_id].request, "abort", "", self._clock.now())
            self._take_outputs([Output(request_id, None, None, ended)])
            return
        if self.engine is not None and request_id in self._requests:
            self._aborting.add(request_id)
            self.engine.abort(request_id)

    def _take_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            home = self._requests.get(output.request_id)
            if home is None:
                continue
            messages, abort = home.take(output)
            if abort and self.engine is not None:
                self.engine.abort(output.request_id)
            for message in messages:
                is_part = isinstance(message, Prefilled | Prefilling)
                self._tell(message, prefilled_tensors(home.request, output.part) if is_part else ())
                if isinstance(message, Finished | Failed | Prefilled):
                    del self._requests[output.request_id]
                    if not isinstance(message, Prefilled):
                        home.ended_s = self._clock.now()
                        self._just_ended[output.request_id] = home
                    self._aborting.discard(output.request_id)
                    again = self._again.pop(output.request_id, None)
                    if again is not None:
                        self.generate(again)


def _taking(thread: EngineThread) -> Callable[[Sequence[bytes], Blocks], None]:
    """Has the engine take in blocks by their hashes, between two steps."""

    def take(hashes: Sequence[bytes], blocks: Blocks) -> None:
        def into(engine: Engine) -> None:
            if engine.blocks is not None:
                engine.blocks.take(hashes, blocks)

        thread.call(into)

    return take
