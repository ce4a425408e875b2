"""Gives weights away: reads and hashes in a thread of its own, below everything else's priority and at a limited rate.

Whoever owns the socket hands questions in with `offer` and sends what `replies` brings. Knows no socket.
"""

import collections
import contextlib
import logging
import os
import queue
import threading
from typing import Any, NamedTuple

import numpy

from edge_runtime.clock import Clock
from edge_runtime.protocol import (
    ChunkData,
    ChunkQuery,
    ManifestQuery,
    Message,
    RangesHeld,
    RangesQuery,
    Refused,
)
from edge_runtime.weights.manifest import MAX_CHUNKS, Chunk, why_not_served
from edge_runtime.weights.pacing import Pacer
from edge_runtime.weights.stores import Store

log = logging.getLogger(__name__)

MAX_WAITING = 128  # questions; whoever asks more is told to come again
BUSY_RETRY_S = 0.2
BUSY_S = 0.005  # how long the owner of the socket may wait for messages while replies are being made
NICENESS = 10
SLICE_S = 0.1  # of a wait, after which it is seen whether to stop

Query = ManifestQuery | RangesQuery | ChunkQuery


class Reply(NamedTuple):
    peer: bytes
    call_id: int
    message: Message
    tensors: tuple[Any, ...] = ()


class WeightsService:
    """What one process gives away of the model.

    bytes_served  since the start of the process
    """

    def __init__(
        self, store: Store | None, clock: Clock, rate_bps: float | None = None, *, gives_digests: bool = False
    ) -> None:
        """rate_bps: of all that leaves, bits per second. gives_digests: whether nodes may believe this process."""
        self.bytes_served = 0
        self._store = store
        self._gives_digests = gives_digests
        self._clock = clock
        self._pacer = Pacer(rate_bps)
        self._questions: queue.SimpleQueue[tuple[bytes, int, Query] | None] = queue.SimpleQueue()
        self._replies: collections.deque[Reply] = collections.deque()
        self._num_open = 0
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def is_busy(self) -> bool:
        """Whether replies are to come: look for them soon."""
        return self._num_open > 0

    def offer(self, peer: bytes, call_id: int, message: Message) -> Refused | None:
        """Take a question, whose answer `replies` brings later; or say at once why not."""
        if not isinstance(message, ManifestQuery | RangesQuery | ChunkQuery):
            return Refused("unexpected", f"{type(message).__name__} asks for no weights")
        if self._store is None:
            return Refused("weights", "this process has no model files to give away")
        if self._num_open >= MAX_WAITING:
            return Refused("busy", f"{self._num_open} questions for weights wait already", BUSY_RETRY_S)
        if isinstance(message, RangesQuery) and len(message.chunks) > MAX_CHUNKS:
            return Refused(
                "weights", f"{len(message.chunks)} chunks in one question; at most {MAX_CHUNKS} are allowed"
            )
        self._num_open += 1
        self._questions.put((peer, call_id, message))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-service", daemon=True)
            self._thread.start()
        return None

    def replies(self) -> list[Reply]:
        """What is ready to be sent."""
        found = []
        while self._replies:
            found.append(self._replies.popleft())
        self._num_open -= len(found)
        return found

    def stop(self) -> None:
        self._stopping = True
        self._questions.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # not everywhere may a thread be slower than its process
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (question := self._questions.get()) is not None and not self._stopping:
            peer, call_id, query = question
            try:
                message, tensors = self._answer(query)
            except OSError as error:
                log.warning("weights cannot be given away: %s", error)
                message, tensors = Refused("weights", f"the files here cannot be read: {error}"), ()
            self._replies.append(Reply(peer, call_id, message, tensors))

    def _answer(self, query: Query) -> tuple[Message, tuple[Any, ...]]:
        store = self._store
        assert store is not None, "a question was taken without files"
        if isinstance(query, ManifestQuery):
            return store.manifest, ()
        if query.model_hash != store.manifest.model_hash:
            detail = f"the files here are of model {store.manifest.model_hash}, asked for {query.model_hash}"
            return Refused("model", detail), ()
        chunks = (
            [Chunk(*found) for found in query.chunks]
            if isinstance(query, RangesQuery)
            else [Chunk(query.file, query.start, query.end)]
        )
        for chunk in chunks:
            if why := why_not_served(store.manifest, chunk):
                return Refused("weights", why), ()
        if isinstance(query, ChunkQuery):
            return self._read(chunks[0])
        held = [store.holds(chunk) for chunk in chunks]
        if not query.wants_digests:
            return RangesHeld(held), ()
        if not self._gives_digests:
            return Refused("weights", "digests are the coordinator's to tell"), ()
        return RangesHeld(held, [store.digest(chunk) for chunk in chunks]), ()

    def _read(self, chunk: Chunk) -> tuple[Message, tuple[Any, ...]]:
        assert self._store is not None
        if not self._store.holds(chunk):
            return Refused("not_held", f"bytes {chunk.start} to {chunk.end} are not here"), ()
        data = numpy.frombuffer(self._store.read(chunk), numpy.uint8)
        while not self._stopping and (wait_s := self._pacer.wait_s(self._clock.now())) > 0:
            self._clock.sleep(min(wait_s, SLICE_S))
        self._pacer.spend(chunk.num_bytes, self._clock.now())
        self.bytes_served += chunk.num_bytes
        return ChunkData(chunk.file, chunk.start), (data,)
