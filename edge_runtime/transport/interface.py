"""What every transport offers: a server that many peers talk to, a channel to one peer. The carriers fill in the wire.

Here is all that does not depend on the carrier: encoding and decoding, refusing a foreign version, counting what is not
ours, and the handshake-like request with its deadline. Nothing here knows sockets or what a message is for.
"""

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any, Self

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DeadlinePassed, PeerLost, ProtocolError
from edge_runtime.protocol import (
    PROTOCOL_VERSION,
    BadMessage,
    Envelope,
    Frame,
    Message,
    Refused,
    VersionMismatch,
    decode,
    encode,
)

HIGH_WATER = 256  # messages per peer and direction; credits keep a queue from ever reaching it
SLICE_S = 0.02  # how often a wait for a peer looks whether the peer is still there

next_call_id = count(
    1
).__next__  # one sequence for the process, so that no two calls on a channel share an id


class Sent(enum.Enum):
    """What became of a message given to `send`. True only if it was taken."""

    OK = "sent"
    UNREACHABLE = "no connection to that peer"
    FULL = "the peer's queue is full"

    def __bool__(self) -> bool:
        return self is Sent.OK


class AnyServer(ABC):
    """Answers many peers at one address.

    A peer is known by the id that its connection got here: a new connection is a new peer, and no peer can choose an
    id. Whatever a peer sends, `receive` never raises for it: what is no message of ours is dropped and counted in
    `counters` as "bad_<kind>" ("received", "send_full" and "send_unreachable" are there too).
    """

    address: str

    def __init__(self, clock: Clock | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.clock = clock or SystemClock()

    @abstractmethod
    def _take(self, timeout_s: float) -> tuple[bytes, list[Any]] | None:
        """The next message's sender and frames, None if none comes in time."""

    @abstractmethod
    def _give(self, peer: bytes, frames: list[Frame], zero_copy: bool) -> Sent:
        """Queue frames for a peer, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening; what is queued is lost."""

    def receive(self, timeout_s: float) -> tuple[bytes, Envelope] | None:
        """The next message and who sent it; None when none came in time."""
        give_up = None
        while True:
            taken = self._take(timeout_s if give_up is None else give_up - self.clock.now())
            if taken is None:
                return None
            peer, frames = taken
            try:
                envelope = decode(frames)
            except VersionMismatch as mismatch:
                self.counters["bad_version"] += 1
                versions = f"this side speaks protocol {PROTOCOL_VERSION}, you {mismatch.found}"
                self.send(peer, Refused("version", versions))
            except BadMessage as error:
                self.counters[f"bad_{error.kind}"] += 1
            else:
                self.counters["received"] += 1
                return peer, envelope
            if give_up is None:
                give_up = self.clock.now() + timeout_s
            elif self.clock.now() > give_up:
                return None

    def send(
        self,
        peer: bytes,
        message: Message,
        *,
        call_id: int = 0,
        epoch: int = 0,
        ttl_s: float | None = None,
        tensors: Sequence[Any] = (),
        zero_copy: bool = False,
    ) -> Sent:
        """Queue a message for a peer; never waits. zero_copy: the arrays will not change until it has left."""
        frames = encode(message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=tensors)
        sent = self._give(peer, frames, zero_copy)
        if sent is not Sent.OK:
            self.counters["send_full" if sent is Sent.FULL else "send_unreachable"] += 1
        return sent

    @property
    def bad_messages(self) -> int:
        """How many messages were dropped because they were not ours."""
        return sum(number for name, number in list(self.counters.items()) if name.startswith("bad_"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AnyChannel(ABC):
    """A connection to one server.

    It may be opened before the server is there. Once it was up and went down it stays lost until `reconnect`, which
    forgets everything that was on its way: the other side may be another process by then, and wants a Hello.
    """

    def __init__(self, address: str, name: str = "", clock: Clock | None = None) -> None:
        """name: of the peer, for errors."""
        self.address = address
        self.name = name or address
        self.clock = clock or SystemClock()
        self.last_heard_s: float | None = None

    @abstractmethod
    def send_frames(self, frames: Sequence[Frame], *, zero_copy: bool = False) -> Sent:
        """Queue an encoded message, without waiting."""

    @abstractmethod
    def _take(self, timeout_s: float) -> list[Any] | None:
        """The next message's frames, None if none comes in time."""

    @abstractmethod
    def wait_until_up(self, timeout_s: float) -> bool:
        """Wait until something can be sent; False if that was not so in time."""

    @abstractmethod
    def is_up(self) -> bool:
        """Whether the peer is connected now."""

    @abstractmethod
    def is_lost(self) -> bool:
        """Whether the connection went down since it was opened. Costs a look at a queue, no wait."""

    @abstractmethod
    def why_unreachable(self) -> str:
        """What keeps the connection from coming up, for an error message."""

    @abstractmethod
    def reconnect(self) -> None:
        """Start over with a new connection. Replies to what was sent on the old one never arrive."""

    @abstractmethod
    def close(self) -> None:
        """End the connection; what is queued is lost."""

    def send(
        self,
        message: Message,
        *,
        call_id: int = 0,
        epoch: int = 0,
        ttl_s: float | None = None,
        tensors: Sequence[Any] = (),
        zero_copy: bool = False,
    ) -> Sent:
        """Queue a message; never waits. zero_copy: the arrays will not change until it has left."""
        frames = encode(message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=tensors)
        return self.send_frames(frames, zero_copy=zero_copy)

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message; None when none came in time; BadMessage when what came is not a message of ours."""
        frames = self._take(timeout_s)
        if frames is None:
            return None
        self.last_heard_s = self.clock.now()
        return decode(frames)

    def request(
        self,
        message: Message,
        expected: type[Message] | tuple[type[Message], ...],
        timeout_s: float,
        *,
        epoch: int = 0,
        tensors: Sequence[Any] = (),
    ) -> Envelope:
        """Send, once the peer is there, and wait for the answer of an expected type.

        Raises Refusal when the peer says no, DeadlinePassed, PeerLost, or ProtocolError.
        """
        asked = type(message).__name__
        deadline = self.clock.now() + timeout_s
        while not self.is_lost() and not self.wait_until_up(
            min(SLICE_S, max(0.0, deadline - self.clock.now()))
        ):
            if self.clock.now() >= deadline:
                raise DeadlinePassed(
                    f"{self.who} could not be reached within {timeout_s:g} s: {self.why_unreachable()}"
                )
        if self.is_lost():
            raise self.lost_error()
        call_id = next_call_id()
        if not self.send(message, call_id=call_id, epoch=epoch, ttl_s=timeout_s, tensors=tensors):
            raise self.lost_error()
        while (left := deadline - self.clock.now()) > 0:
            try:
                envelope = self.receive(min(left, SLICE_S))
            except BadMessage as error:
                raise ProtocolError(
                    f"{self.who} answered {asked} with what is not a message: {error}"
                ) from error
            if envelope is None:
                if self.is_lost():
                    raise self.lost_error()
                continue
            answer = envelope.message
            is_ours = envelope.call_id == call_id
            if isinstance(answer, Refused) and (is_ours or answer.reason == "version"):
                raise answer.as_error()
            if is_ours and isinstance(answer, expected):
                return envelope
            if is_ours:
                raise ProtocolError(f"{self.who} answered {asked} with {type(answer).__name__}")
        raise DeadlinePassed(f"{self.who} did not answer {asked} within {timeout_s:g} s")

    @property
    def who(self) -> str:
        return self.name if self.name == self.address else f"{self.name} at {self.address}"

    def lost_error(self) -> PeerLost:
        """The error that says that this peer is gone, and when it was last heard."""
        if self.last_heard_s is None:
            return PeerLost(f"{self.who} is gone: there is no connection, and nothing was heard on it")
        silent_s = self.clock.now() - self.last_heard_s
        return PeerLost(f"{self.who} is gone: its connection ended; last heard {silent_s:.3f} s ago")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
