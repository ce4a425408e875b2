"""Running requests as the coordinator sees them: which client waits, which node answers, what may be sent now.

Pure. A slow client never fills a queue: it has a window of messages, and what comes while the window is used up is
merged into few messages that wait.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from edge_runtime.protocol import (
    Failed,
    Finished,
    Handoff,
    StillRunning,
    Submit,
    TokenLogprobs,
    Tokens,
)
from edge_runtime.transport.credits import Window

MERGED_TOKENS = (
    1024  # of one message at most; with 20 logprobs each that is a quarter of what a message may hold
)
MERGED_CHARS = 128 << 10

Phase = Literal["prefill", "decode"]

Loss = Literal["ended", "away", "moving"]
"""What became of a home: its process ended; it is silent, or cannot go on; another placement has it not."""

MAX_ENDED = (
    3  # processes that may end with a request, without a token of any, before it counts as what ends them
)
PATIENT_AFTER = 3  # homes in a row without a token, after which the next is not tried at once
PATIENCE_S = 0.5


class Delivery(NamedTuple):
    """A message for a client."""

    client: bytes
    message: Tokens | Finished | Failed


@dataclass
class Lost:
    """An answer that began under another coordinator, until its client comes back for it.

    since_s  when it was told of; ended: how it ended meanwhile
    """

    since_s: float
    text: str
    logprobs: list[TokenLogprobs]
    ended: Finished | Failed | None = None


@dataclass
class Stream:
    """One request on its way.

    node       its home; empty while it has none
    window     of Tokens messages that may still be sent before the client grants more
    token_ids  the answer so far, whether or not the client has it yet: another home goes on after these
    phase      `prefill` while a node computes its prompt for others, else `decode`
    prefilled  where its prompt was computed and what that cost; None before, and where home and prefill are one
    signature, hashes  of its prompt, once computed: for a home, and for the next one should that be lost
    ahead, num_ahead   while its prompt is computed: its likely home, and how many blocks that was told to fetch
    moves      how often it lost its home since a token came; num_ended: how often since that process ended
    waited_s   how long it was without a home since then, before it lost this one
    homeless_s  since when it has none; lost_node, why: which it was, what happened
    is_aborted  its client wants no more of it
    lost       of one whose client has still to come back: what the client may lack. None once it has
    ledger     of its quality budget, as its home said last: for the next home
    """

    submit: Submit
    client: bytes
    node: str
    window: Window
    waiting: list[Tokens] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    moves: int = 0
    num_ended: int = 0
    waited_s: float = 0.0
    homeless_s: float = 0.0
    lost_node: str = ""
    why: str = ""
    is_aborted: bool = False
    phase: Phase = "decode"
    prefilled: Handoff | None = None
    signature: np.ndarray | None = None
    hashes: tuple[bytes, ...] = ()
    ahead: str = ""
    num_ahead: int = 0
    lost: "Lost | None" = None
    ledger: list[float] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def has_ended(self) -> bool:
        """It is only kept for its client to come back for it."""
        return self.lost is not None and self.lost.ended is not None

    def is_hopeless(self, now: float, homeless_s: float) -> bool:
        """Without a home: whether none is looked for any longer. homeless_s: how long one is."""
        return self.num_ended > MAX_ENDED or self.waited_s + now - self.homeless_s > homeless_s

    def may_try(self, now: float) -> bool:
        """Whether the next home is tried now: those who all give it back at once are not asked all the time."""
        return self.moves <= PATIENT_AFTER or now - self.homeless_s >= PATIENCE_S

    def next_message(self) -> Tokens:
        """Take the oldest of what waits, with as much of what follows as fits in one message."""
        waiting, num_tokens, num_chars, count = self.waiting, 0, 0, 0
        for part in waiting:
            num_tokens += len(part.token_ids)
            num_chars += len(part.text)
            if count and (num_tokens > MERGED_TOKENS or num_chars > MERGED_CHARS):
                break
            count += 1
        parts, self.waiting = waiting[:count], waiting[count:]
        return parts[0] if count == 1 else _merged(parts)


def _merged(parts: list[Tokens]) -> Tokens:
    """Consecutive messages of one request as one."""
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return Tokens(
        request_id=parts[0].request_id,
        index=parts[0].index,
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        text="".join(part.text for part in parts),
        logprobs=logprobs or None,
    )


class Streams:
    """All running requests."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._in_flight: Counter[tuple[str, Phase]] = Counter()
        self._expected: Counter[str] = Counter()
        self.num_finished = 0
        self.num_failed = 0
        self.num_refused = 0  # ended through the fault of who asked: no failure of the cluster

    def __len__(self) -> int:
        """How many run."""
        return sum(not stream.has_ended for stream in self._streams.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, submit: Submit, client: bytes, node: str, phase: Phase = "decode") -> None:
        """A request was routed to `node`. Its id must be new. Its client may have some of the answer already."""
        assert submit.request_id not in self._streams, f"request {submit.request_id} is already running"
        window = Window(max(1, submit.credit))
        so_far = list(submit.output_ids)
        submit = msgspec.structs.replace(submit, output_ids=[])
        self._streams[submit.request_id] = Stream(submit, client, node, window, token_ids=so_far, phase=phase)
        self._in_flight[node, phase] += 1

    def adopt(self, message: StillRunning, node: str, now: float) -> None:
        """A request runs at `node`, or has ended there, under a coordinator that is gone. Its id must be new."""
        fields = {name: getattr(message, name) for name in Submit.__struct_fields__}
        submit = Submit(**(fields | {"output_ids": [], "ledger": []}))
        lost = Lost(now, message.text, list(message.logprobs or ()), message.ended)
        assert submit.request_id not in self._streams, f"request {submit.request_id} is already running"
        home = node if message.ended is None else ""
        stream = Stream(submit, b"", home, Window(0), token_ids=list(message.output_ids), lost=lost)
        stream.ledger = list(message.ledger)
        self._streams[submit.request_id] = stream
        if home:
            self._in_flight[home, "decode"] += 1

    def attach(
        self, request_id: str, client: bytes, num_tokens: int, num_chars: int, credit: int
    ) -> list[Delivery] | None:
        """Its client is back, and has that much of it: what goes to it now. None if nobody waits to be taken up so."""
        stream = self._streams.get(request_id)
        if stream is None or stream.lost is None:
            return None
        lost, stream.lost, stream.client = stream.lost, None, client
        stream.window = Window(max(1, credit))
        token_ids, text = stream.token_ids[num_tokens:], lost.text[num_chars:]
        if token_ids or text:
            logprobs = lost.logprobs[num_tokens:] or None
            stream.waiting.append(Tokens(request_id, num_tokens, token_ids, text, logprobs))
        return self.end(lost.ended) if lost.ended is not None else _release(stream)

    def forsaken(self, before_s: float) -> list[str]:
        """Requests that were told of before that moment and whose clients have not come back."""
        return [
            stream.request_id
            for stream in self._streams.values()
            if stream.lost is not None and stream.lost.since_s < before_s
        ]

    def lose_home(self, request_id: str, why: str, now: float, loss: Loss = "ended") -> None:
        """The request's home is gone, or is not to be its home any longer; `why` is told if no other takes it."""
        stream = self._streams[request_id]
        self._in_flight[stream.node, stream.phase] -= 1
        stream.node, stream.lost_node, stream.why = "", stream.node, why
        stream.moves += loss != "moving"
        stream.num_ended += loss == "ended"
        stream.homeless_s = now

    def homeless(self) -> list[Stream]:
        """Requests that wait for another home, in the order in which they were submitted."""
        return [stream for stream in self._streams.values() if not stream.node and not stream.has_ended]

    def move(self, request_id: str, node: str, now: float, phase: Phase = "decode") -> None:
        """`node` goes on with a request that had no home."""
        stream = self._streams[request_id]
        stream.waited_s += now - stream.homeless_s
        stream.node, stream.phase = node, phase
        self._in_flight[node, phase] += 1
        self.look_ahead(request_id, "", 0)

    def abort(self, request_id: str) -> None:
        """The client wants no more of the request; it ends when its home says so."""
        if request_id in self._streams:
            self._streams[request_id].is_aborted = True

    def is_aborted(self, request_id: str) -> bool:
        """Whether the request is here and its client wants no more of it."""
        return request_id in self._streams and self._streams[request_id].is_aborted

    def prefilled(
        self,
        request_id: str,
        handoff: Handoff,
        hashes: Sequence[bytes],
        signature: np.ndarray | None,
        now: float,
    ) -> Stream:
        """Its prompt is computed: it waits for a home, and no node has it in hand."""
        stream = self._streams[request_id]
        self._in_flight[stream.node, stream.phase] -= 1
        stream.node, stream.phase, stream.homeless_s = "", "decode", now
        stream.prefilled, stream.hashes, stream.signature = handoff, tuple(hashes), signature
        return stream

    def look_ahead(self, request_id: str, node: str, num_blocks: int) -> None:
        """`node` was told to fetch so many blocks of a prompt that is still being computed: it counts as its home's."""
        stream = self._streams[request_id]
        if stream.ahead != node:
            self._expected[stream.ahead] -= 1
            self._expected[node] += 1
        stream.ahead, stream.num_ahead = node, num_blocks

    def expected(self, node: str, but: str = "") -> int:
        """Requests that will probably come to that node once their prompts are computed; `but` is not counted."""
        stream = self._streams.get(but)
        return self._expected[node] - (stream is not None and stream.ahead == node)

    def in_flight(self, node: str, phase: Phase | None = None) -> int:
        """Requests routed to that node that have not ended; of one phase, or of both."""
        if phase is not None:
            return self._in_flight[node, phase]
        return self._in_flight[node, "prefill"] + self._in_flight[node, "decode"]

    def get(self, request_id: str) -> Stream | None:
        """The request, if it runs."""
        return self._streams.get(request_id)

    def node_of(self, request_id: str) -> str | None:
        stream = self._streams.get(request_id)
        return stream.node if stream else None

    def client_of(self, request_id: str) -> bytes | None:
        stream = self._streams.get(request_id)
        return stream.client if stream else None

    def tokens(self, message: Tokens) -> list[Delivery]:
        """Tokens came from the node: what goes to the client now. Nothing if unknown, or not what comes next."""
        stream = self._streams.get(message.request_id)
        if stream is None or message.index != len(stream.token_ids):
            return []
        stream.token_ids += message.token_ids
        stream.moves, stream.num_ended, stream.waited_s = 0, 0, 0.0  # whoever answers it is not ended by it
        if message.ledger:  # between homes, and nothing to clients
            stream.ledger, message = message.ledger, msgspec.structs.replace(message, ledger=[])
        if stream.lost is not None:
            stream.lost.text += message.text
            stream.lost.logprobs += message.logprobs or ()
            return []
        stream.waiting.append(message)
        return _release(stream)

    def grant(self, request_id: str, count: int) -> list[Delivery]:
        """The client takes `count` more messages."""
        stream = self._streams.get(request_id)
        if stream is None:
            return []
        stream.window.give(count)
        return _release(stream)

    def end(self, message: Finished | Failed) -> list[Delivery]:
        """The request ended: what waits goes first, then the end, whatever the window says."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            return []
        if stream.node:
            self._in_flight[stream.node, stream.phase] -= 1
        self.look_ahead(message.request_id, "", 0)
        if stream.lost is not None and not stream.is_aborted:  # kept until its client is back
            stream.lost.ended, stream.node = message, ""
            return []
        del self._streams[message.request_id]
        if isinstance(message, Failed) and message.kind == "user":
            self.num_refused += 1
        elif isinstance(message, Failed):
            self.num_failed += 1
        else:
            self.num_finished += 1
        if stream.lost is not None:
            return []  # nobody came back for it
        deliveries = []
        while stream.waiting:
            deliveries.append(Delivery(stream.client, stream.next_message()))
        return [*deliveries, Delivery(stream.client, message)]

    def of_node(self, node: str) -> list[str]:
        """Requests that run at that node."""
        return [stream.request_id for stream in self._streams.values() if stream.node == node]

    def of_client(self, client: bytes) -> list[str]:
        """Requests that client waits for."""
        return [stream.request_id for stream in self._streams.values() if stream.client == client]

    def stalled_clients(self) -> set[bytes]:
        """Clients to whom nothing can be sent until they grant more: nothing else would tell that they are gone."""
        return {s.client for s in self._streams.values() if s.lost is None and not s.window.free}


def _release(stream: Stream) -> list[Delivery]:
    deliveries = []
    while stream.waiting and stream.window.take():
        deliveries.append(Delivery(stream.client, stream.next_message()))
    return deliveries
