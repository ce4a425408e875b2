"""Fetches KV blocks from nodes that computed prompts, one thread per such node, and hands them to the engine.

`BlockFetch` decides, this carries out. A source that is gone, frozen or short of blocks costs its own requests a moment:
they begin with what came, and the rest of the prompt is computed again.
"""

import collections
import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from edge_runtime.cache.block_store import Blocks, BlockStore
from edge_runtime.cache.handoff import BlockFetch
from edge_runtime.cache.prefix import HASH_BYTES, pack_hashes
from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeError, PeerError, ProtocolError, Refusal
from edge_runtime.protocol import (
    MAX_FRAME_BYTES,
    Hello,
    KvBlocks,
    KvFetch,
    PeerAddress,
    Refused,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.transport.endpoint import Channel, next_call_id
from edge_runtime.transport.keys import Keys

log = logging.getLogger(__name__)

CHUNK_BYTES = 512 << 10  # of one answer: what 100 Mbit/s carry in 40 ms, and a copy of 0.1 ms
MAX_BLOCKS = 1024  # of one question
CONNECT_S = 1.0
STALL_S = 2.0  # a source that says nothing for so long is not waited for
AVOID_S = 2.0  # a source that failed is left alone for so long
LOOK_S = 0.02


class FetchJob:
    """The blocks that one request needs.

    hashes    of its prompt's blocks, in order
    store     where they will go: what is there already is not fetched
    take      called with hashes and blocks as they come; it must not block
    done      called once, with how many came and why not all of them
    is_ahead  the rest of the prompt is still being computed, so nobody waits for these: requests that wait go before it
    """

    def __init__(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        store: BlockStore,
        take: Callable[[Sequence[bytes], Blocks], None],
        done: Callable[[int, str], None],
        *,
        is_ahead: bool = False,
    ) -> None:
        self.is_ahead = is_ahead
        self.request_id = request_id
        self.hashes = hashes
        self.store = store
        self.take = take
        self.done = done
        self.is_cancelled = False


class Jobs:
    """Jobs of one source: those that requests wait for before those that are ahead of theirs, else in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: collections.deque[FetchJob] = collections.deque()
        self._ahead: collections.deque[FetchJob] = collections.deque()
        self._is_closed = False

    def put(self, job: FetchJob) -> None:
        with self._changed:
            (self._ahead if job.is_ahead else self._wanted).append(job)
            self._changed.notify()

    def close(self) -> None:
        """No job is taken any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def take(self) -> FetchJob | None:
        """The next one; waits for it. None once closed."""
        with self._changed:
            while not (self._is_closed or self._wanted or self._ahead):
                self._changed.wait()
            if self._is_closed:
                return None
            return (self._wanted or self._ahead).popleft()

    def holds_up(self, job: FetchJob) -> bool:
        """Whether a request waits behind a job that is ahead of its own: other than that one, which gains by it."""
        return job.is_ahead and any(other.request_id != job.request_id for other in tuple(self._wanted))


class BlockReceiver(threading.Thread):
    """Everything that is fetched from one node, job after job. A fault of ours is kept in `.fault`."""

    def __init__(
        self,
        source: PeerAddress,
        identity: Hello,
        keys: Keys | None,
        clock: Clock,
        *,
        deadline_s: float,
        died: Callable[[], None],
    ) -> None:
        super().__init__(name=f"blocks-from-{source.name}", daemon=True)
        self.fault: BaseException | None = None
        self.num_blocks = 0
        self.num_ahead = 0
        self.num_bytes = 0
        self._source = source
        self._identity = identity
        self._keys = keys
        self._clock = clock
        self._deadline_s = deadline_s
        self._died = died
        self._jobs = Jobs()
        self._channel: Channel | None = None
        self._avoid_until_s = 0.0
        self._why_avoided = ""

    def fetch(self, job: FetchJob) -> None:
        """Queue a job, from any thread."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End after the job in hand."""
        self._jobs.close()

    def run(self) -> None:
        try:
            while (job := self._jobs.take()) is not None:
                job.done(*self._fetch(job))
        except BaseException as fault:
            log.exception("fetching blocks ended on a fault of its own")
            self.fault = fault
            self._died()
        finally:
            self._forget_channel()

    def _fetch(self, job: FetchJob) -> tuple[int, str]:
        began = self._clock.now()
        here = job.store.missing(job.hashes)
        wanted = job.hashes[here:]
        if not wanted:
            return 0, ""
        if began < self._avoid_until_s:
            return 0, self._why_avoided
        chunk = min(max(1, CHUNK_BYTES // job.store.bytes_per_block), MAX_BLOCKS)
        fetch = BlockFetch(
            len(wanted), chunk_blocks=chunk, now=began, deadline_s=self._deadline_s, stall_s=STALL_S
        )
        numbers: dict[int, int] = {}  # call id -> number of the ask
        while not fetch.is_over:
            if job.is_cancelled:
                fetch.give_up("the request ended")
                break
            if self._jobs.holds_up(job):
                fetch.give_up("requests wait for others")
                break
            try:
                channel = self._connected(fetch)
            except (PeerError, Refusal) as error:
                fetch.give_up(str(error))
                break
            try:
                for ask in fetch.asks(self._clock.now()):
                    call_id = next_call_id()
                    numbers[call_id] = ask.number
                    hashes = pack_hashes(wanted[ask.first : ask.first + ask.num_blocks])
                    if not channel.send(KvFetch(), call_id=call_id, tensors=(hashes,)):
                        raise channel.lost_error()
                self._receive(channel, fetch, numbers, job, wanted)
            except PeerError as error:
                self._forget_channel()
                fetch.lost(str(error))
        if fetch.why and not (job.is_cancelled or self._jobs.holds_up(job)):
            self._avoid(fetch)
        return fetch.num_taken, fetch.why

    def _receive(
        self,
        channel: Channel,
        fetch: BlockFetch,
        numbers: dict[int, int],
        job: FetchJob,
        wanted: Sequence[bytes],
    ) -> None:
        envelope = channel.receive(LOOK_S)
        if envelope is None:
            if channel.is_lost():
                raise channel.lost_error()
            return
        number = numbers.pop(envelope.call_id, None)
        match envelope.message:
            case KvBlocks() if number is not None:
                blocks = Blocks(*envelope.tensors)
                taken = fetch.came(number, len(blocks.rows), self._clock.now(), is_sound=blocks.is_sound)
                if taken is not None:
                    self.num_blocks += taken.num_blocks
                    self.num_ahead += taken.num_blocks if job.is_ahead else 0
                    self.num_bytes += blocks.rows.nbytes + blocks.counts.nbytes
                    job.take(wanted[taken.first : taken.first + taken.num_blocks], blocks)
            case Refused() as refused if number is not None:
                fetch.give_up(refused.detail)
            case KvBlocks() | Refused():
                pass  # an answer to what is not awaited any more
            case other:
                raise ProtocolError(f"{channel.who} sent {type(other).__name__} where blocks were asked for")

    def _connected(self, fetch: BlockFetch) -> Channel:
        """The channel to the source, greeted."""
        if self._channel is not None and not self._channel.is_lost():
            return self._channel
        self._forget_channel()
        source = self._source
        channel = Channel(
            source.address, name=source.name, keys=self._keys, server_key=source.public_key or None
        )
        try:
            left_s = min(CONNECT_S, max(fetch.due_s() - self._clock.now(), 0.0))
            answer = channel.request(self._identity, Welcome, left_s).message
            assert isinstance(answer, Welcome)
            mismatch = refuse_mismatch(answer, self._identity)
            if mismatch is not None:
                raise mismatch.as_error()
            if answer.node != source.name:
                raise ProtocolError(f"{source.address} is {answer.node}, expected {source.name}")
        except EdgeError:
            channel.close()
            raise
        self._channel = channel
        return channel

    def _forget_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _avoid(self, fetch: BlockFetch) -> None:
        """Requests behind this one do not wait for a source that does not answer."""
        if self._channel is None or fetch.losses or self._clock.now() >= fetch.due_s():
            self._forget_channel()
            self._avoid_until_s = self._clock.now() + AVOID_S
            self._why_avoided = f"{self._source.name} does not answer: {fetch.why}"


class BlockReceivers:
    """One receiver for each node that blocks come from, made when it is needed."""

    def __init__(
        self, identity: Hello, keys: Keys | None, clock: Clock, *, deadline_s: float, died: Callable[[], None]
    ) -> None:
        self._make = lambda source: BlockReceiver(
            source, identity, keys, clock, deadline_s=deadline_s, died=died
        )
        self._of: dict[PeerAddress, BlockReceiver] = {}

    def fetch(self, source: PeerAddress, job: FetchJob) -> None:
        """Begin a job; it ends by itself."""
        receiver = self._of.get(source)
        if receiver is None:
            receiver = self._of[source] = self._make(source)
            receiver.start()
        receiver.fetch(job)

    @property
    def num_blocks(self) -> int:
        """Blocks fetched since the start."""
        return sum(receiver.num_blocks for receiver in self._of.values())

    @property
    def num_ahead(self) -> int:
        """Those of them that came while the rest of their prompt was still being computed."""
        return sum(receiver.num_ahead for receiver in self._of.values())

    @property
    def sources(self) -> list[str]:
        """Nodes that blocks came from."""
        return [source.name for source in self._of]

    @property
    def num_bytes(self) -> int:
        return sum(receiver.num_bytes for receiver in self._of.values())

    @property
    def fault(self) -> BaseException | None:
        """Of any of them."""
        return next((each.fault for each in self._of.values() if each.fault is not None), None)

    def stop(self, join_s: float) -> None:
        for receiver in self._of.values():
            receiver.stop()
        for receiver in self._of.values():
            receiver.join(join_s)


def answer_fetch(store: BlockStore | None, hashes: np.ndarray, node: str) -> tuple[KvBlocks, Blocks]:
    """What a node answers to KvFetch. Raises Refusal for what it does not serve."""
    if store is None:
        raise Refusal("not_ready", f"{node} holds no KV", 1.0)
    count = len(hashes)
    most = min(MAX_BLOCKS, MAX_FRAME_BYTES // store.bytes_per_block)
    if hashes.shape[1:] != (HASH_BYTES,) or not 1 <= count <= most:
        raise Refusal(
            "shape",
            f"{node} hands on 1 to {most} blocks at a time, named by {HASH_BYTES} bytes each; "
            f"found {list(hashes.shape)}",
        )
    return KvBlocks(), store.read([row.tobytes() for row in hashes])
