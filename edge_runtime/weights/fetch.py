"""Fetches chunks of a model from whoever has them, checks each, and keeps it in the cache.

Digests come from the coordinator alone; bytes from any source. A source that breaks off, lies or falls silent is left
for another, and what was kept so far is not fetched again. Runs in the thread that loads a share.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError, PeerError, ProtocolError, Refusal
from edge_runtime.protocol import (
    ChunkData,
    ChunkQuery,
    Hello,
    Manifest,
    ManifestQuery,
    RangesHeld,
    RangesQuery,
    Refused,
    Welcome,
    refuse_mismatch,
)
from edge_runtime.transport.endpoint import Channel, next_call_id
from edge_runtime.transport.interface import AnyChannel
from edge_runtime.transport.keys import Keys
from edge_runtime.weights.manifest import Chunk, batches, check_manifest, digest_of
from edge_runtime.weights.sources import Source, choose_source, failed
from edge_runtime.weights.stores import CacheFolder

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
BATCH_CHUNKS = 64  # asked for at a time: 16 MB
WINDOW = 8  # chunks on their way at a time
ASK_S = 5.0  # for an answer without weights in it
MEET_S = 0.5  # for all sources to be connected with, before the first is chosen
STALL_S = 20.0  # of silence after which a source is left, if nobody else is served by it meanwhile
GIVE_UP_S = 60.0  # without a single chunk, from any source
SLICE_S = 0.1
REPORT_S = 0.25

Progress = Callable[[int, int, str], None]


class Address(NamedTuple):
    """Where a source may be asked. server_key: of its CURVE key, None to look it up by name."""

    name: str
    address: str
    bandwidth_bps: float = 0.0
    server_key: str | None = None


class _Left(Exception):
    """This source is no good now; says why."""


class _Unwanted(Refusal):
    """Nobody wants these weights any more."""


class Link:
    """A connection to one source: greeted when it is first used, anew after it broke."""

    def __init__(self, channel: AnyChannel, identity: Hello) -> None:
        self.channel = channel
        self._identity = identity
        self._is_greeted = False

    def greet(self, timeout_s: float = ASK_S) -> Welcome:
        """Raises PeerError or Refusal."""
        if self.channel.is_lost():
            self.channel.reconnect()
        welcome = self.channel.request(self._identity, Welcome, timeout_s).message
        assert isinstance(welcome, Welcome)
        if (mismatch := refuse_mismatch(welcome, self._identity)) is not None:
            raise mismatch.as_error()
        self._is_greeted = True
        return welcome

    def be_greeted(self) -> None:
        if not self._is_greeted or self.channel.is_lost():
            self.greet()

    def forget(self) -> None:
        """Whatever is still on its way is not for us."""
        self._is_greeted = False
        self.channel.reconnect()


class Fetcher:
    """Brings chunks of one model into a cache.

    bytes_fetched  over the network, since it was made
    """

    def __init__(
        self,
        cache: CacheFolder,
        identity: Hello,
        coordinator: Address,
        peers: Sequence[Address],
        *,
        keys: Keys | None,
        clock: Clock,
        is_wanted: Callable[[], bool] = lambda: True,
        give_up_s: float = GIVE_UP_S,
        stall_s: float = STALL_S,
    ) -> None:
        """is_wanted: asked now and then; when it says no, `fetch` ends with a Refusal."""
        self.bytes_fetched = 0
        self._cache = cache
        self._clock = clock
        self._is_wanted = is_wanted
        self._give_up_s = give_up_s
        self._stall_s = stall_s
        self._taker = identity.node
        self._links: dict[str, Link] = {}
        self._sources: dict[str, Source] = {}
        self._why: dict[str, str] = {}  # source -> why it was left last
        hello = msgspec.structs.replace(
            identity, role="loader", model_hash=cache.manifest.model_hash, incarnation=""
        )
        for address in (coordinator, *(peer for peer in peers if peer.name != identity.node)):
            try:
                channel = Channel(
                    address.address,
                    name=address.name,
                    keys=keys,
                    server_key=address.server_key,
                    clock=clock,
                )
            except ConfigError as error:  # a peer whose key is not known here
                log.warning("no weights from %s: %s", address.name, error)
                continue
            is_coordinator = address is coordinator
            self._links[address.name] = Link(channel, hello)
            self._sources[address.name] = Source(address.name, address.bandwidth_bps, is_coordinator)

    def fetch(self, chunks: Sequence[Chunk], progress: Progress) -> None:
        """Return when all chunks are in the cache. Bytes that are there are not counted in what `progress` is told.

        Raises Refusal when nobody has given anything for `give_up_s`, ConfigError when they cannot be kept.
        """
        missing = self._cache.missing(chunks)
        total = sum(chunk.num_bytes for chunk in missing)
        self._cache.refuse_if_full(total)
        if not missing:
            return
        self._meet()
        meter = _Meter(self._clock, total, progress)
        for batch in batches(missing, BATCH_CHUNKS):
            with self._cache.locked(batch):
                wanted = self._cache.missing(batch)  # another process may have been here before us
                meter.skip(sum(chunk.num_bytes for chunk in batch) - sum(c.num_bytes for c in wanted))
                self._fetch_batch(wanted, meter)
        log.info("%d bytes of weights fetched at %s", meter.done, meter.rate_text())

    def _meet(self) -> None:
        """Give those that are there the moment that a connection takes."""
        until_s = self._clock.now() + MEET_S
        for link in self._links.values():
            link.channel.wait_until_up(max(0.0, until_s - self._clock.now()))

    def close(self) -> None:
        for link in self._links.values():
            link.channel.close()

    def _fetch_batch(self, wanted: Sequence[Chunk], meter: "_Meter") -> None:
        digests: dict[Chunk, str] = {}
        missing = list(wanted)
        give_up_at_s = self._clock.now() + self._give_up_s
        while missing:
            before = len(missing)
            try:
                if not digests:
                    digests = self._digests_of(missing)
                name, held = self._choose(missing)
                for chunk, data in self._stream(name, held):
                    if digest_of(data) != digests[chunk]:
                        raise self._left(
                            name,
                            f"{name} sent bytes {chunk.start} to {chunk.end} of "
                            f"{self._cache.manifest.files[chunk.file].name} that are not the model's",
                        )
                    self._cache.write(chunk, data, digests[chunk])
                    missing.remove(chunk)
                    self.bytes_fetched += chunk.num_bytes
                    meter.add(chunk.num_bytes, name)
                    give_up_at_s = self._clock.now() + self._give_up_s
            except _Left as left:
                if self._clock.now() >= give_up_at_s:
                    reasons = "; ".join(self._why.values()) or str(left)
                    raise Refusal(
                        "weights",
                        f"{self._taker} has nobody to fetch its weights from: nothing came for "
                        f"{self._give_up_s:g} s ({reasons})",
                    ) from left
                if len(missing) == before:
                    self._rest(SLICE_S)

    def _rest(self, seconds: float) -> None:
        self._refuse_if_unwanted()
        self._clock.sleep(seconds)

    def _refuse_if_unwanted(self) -> None:
        if not self._is_wanted():
            raise _Unwanted("released", "the share is not wanted any more")

    # Asking.

    def _digests_of(self, chunks: Sequence[Chunk]) -> dict[Chunk, str]:
        """From the coordinator; _Left while it is not there."""
        held = self._ask(COORDINATOR, chunks, wants_digests=True)
        if len(held.digests) != len(chunks):
            raise self._left(
                COORDINATOR, f"the coordinator told {len(held.digests)} digests of {len(chunks)} chunks"
            )
        return dict(zip(chunks, held.digests, strict=True))

    def _choose(self, chunks: Sequence[Chunk]) -> tuple[str, list[Chunk]]:
        """A source and what it has of these; _Left if nobody has any now."""
        now = self._clock.now()
        held: dict[str, list[Chunk]] = {}
        for name, source in list(self._sources.items()):
            if now < source.retry_at_s:
                continue
            if source.is_coordinator:
                held[name] = list(chunks)
            elif self._links[name].channel.is_up() or self._links[name].channel.is_lost():
                try:
                    answer = self._ask(name, chunks, wants_digests=False)
                except _Left:
                    continue
                held[name] = [chunk for chunk, is_held in zip(chunks, answer.held, strict=False) if is_held]
        counts = {name: len(found) for name, found in held.items()}
        chosen = choose_source(self._sources.values(), counts, self._taker, now)
        if chosen is None:
            raise _Left("no source can be reached now")
        return chosen, held[chosen]

    def _ask(self, name: str, chunks: Sequence[Chunk], *, wants_digests: bool) -> RangesHeld:
        query = RangesQuery(self._cache.manifest.model_hash, [*chunks], wants_digests)
        link = self._links[name]
        try:
            link.be_greeted()
            answer = link.channel.request(query, RangesHeld, ASK_S).message
        except (PeerError, Refusal) as error:
            raise self._left(name, str(error)) from error
        assert isinstance(answer, RangesHeld)
        return answer

    def _left(self, name: str, why: str) -> _Left:
        log.warning("no weights from %s for now: %s", name, why)
        self._sources[name] = failed(self._sources[name], self._clock.now())
        self._why[name] = why
        self._links[name].forget()
        return _Left(why)

    def _stream(self, name: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, memoryview]]:
        """The chunks in the order in which they come, some of them on their way at a time."""
        try:
            yield from self._stream_from(self._links[name], chunks)
        except _Unwanted:
            raise
        except _Left as left:
            raise self._left(name, str(left)) from left
        except (PeerError, Refusal) as error:
            raise self._left(name, str(error)) from error

    def _stream_from(self, link: Link, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, memoryview]]:
        link.be_greeted()
        channel = link.channel
        asked: dict[int, Chunk] = {}
        ahead = list(reversed(chunks))
        heard_s = self._clock.now()
        while ahead or asked:
            self._refuse_if_unwanted()
            while ahead and len(asked) < WINDOW:
                chunk, call_id = ahead.pop(), next_call_id()
                asked[call_id] = chunk
                if not channel.send(ChunkQuery(self._cache.manifest.model_hash, *chunk), call_id=call_id):
                    raise channel.lost_error()
            envelope = channel.receive(SLICE_S)
            if envelope is None:
                if channel.is_lost():
                    raise channel.lost_error()
                if self._clock.now() - heard_s > self._stall_s:
                    raise _Left(f"{channel.who} sent no weights for {self._stall_s:g} s")
                continue
            chunk_or_none = asked.pop(envelope.call_id, None)
            if chunk_or_none is None:
                continue  # not an answer to what we asked on this connection
            chunk, heard_s = chunk_or_none, self._clock.now()
            match envelope.message:
                case ChunkData():
                    data = envelope.tensors[0]
                    if data.nbytes != chunk.num_bytes:
                        raise _Left(f"{channel.who} sent {data.nbytes} bytes of {chunk.num_bytes}")
                    yield chunk, data.data
                case Refused(reason="busy") as refused:
                    ahead.append(chunk)
                    self._rest(refused.retry_after_s or SLICE_S)
                case Refused() as refused:
                    raise refused.as_error()
                case other:
                    raise ProtocolError(f"{channel.who} answered ChunkQuery with {type(other).__name__}")


class _Meter:
    """How far it is, told at most a few times a second."""

    def __init__(self, clock: Clock, total: int, progress: Progress) -> None:
        self.done = 0
        self._skipped = 0
        self._clock = clock
        self._total = total
        self._progress = progress
        self._began_s = self._tell_at_s = clock.now()

    def skip(self, num_bytes: int) -> None:
        self._skipped += num_bytes

    def add(self, num_bytes: int, name: str) -> None:
        self.done += num_bytes
        now = self._clock.now()
        if now >= self._tell_at_s or self.done + self._skipped >= self._total:
            self._tell_at_s = now + REPORT_S
            what = f"fetching weights from {name} at {self.rate_text()}"
            self._progress(self.done + self._skipped, self._total, what)

    def rate_text(self) -> str:
        seconds = max(self._clock.now() - self._began_s, 1e-3)
        return f"{8 * self.done / seconds / 1e6:.0f} Mbit/s"


def ask_manifest(link: Link) -> Manifest:
    """What the model of this coordinator is made of. Raises PeerError or Refusal."""
    manifest = link.channel.request(ManifestQuery(), Manifest, ASK_S).message
    assert isinstance(manifest, Manifest)
    check_manifest(manifest)
    return manifest
