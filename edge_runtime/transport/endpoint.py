"""Sockets: a `Server` that many peers talk to, a `Channel` to one peer. The only module that touches ZeroMQ's sockets.

Plain blocking sockets with a deadline on every wait. `send` never waits: it says whether the message was taken. A
socket belongs to the thread that uses it; only `Waker.wake` may be called from another. Nothing here knows what a
message is for.
"""

import contextlib
import enum
import errno
import math
import os
import socket as tcp
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import ConfigError, DeadlinePassed, PeerLost, ProtocolError
from edge_runtime.protocol import (
    MAX_FRAME_BYTES,
    MAX_TENSORS,
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
from edge_runtime.transport.keys import Doorkeeper, Keys, require_keys_for

HIGH_WATER = 256  # messages per peer and direction; credits keep a queue from ever reaching it
_ZERO_COPY_BYTES = 64 << 10  # below, a copy costs less than its bookkeeping
_HANDSHAKE_MS = 5000
_PING_MS, _PING_TIMEOUT_MS = 2000, 6000  # finds links that were cut without a word
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_LAST, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)

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


class Pollable(Protocol):
    def pollables(self) -> tuple[Any, ...]:
        """ZeroMQ sockets or file descriptors that become readable when there is something to do."""


def wait_any(sources: Sequence[Pollable], timeout_s: float) -> list[Pollable]:
    """Sleep until one of `sources` has something to read, `timeout_s` at most; the ones that have, in order."""
    poller = zmq.Poller()
    owner: dict[Any, Pollable] = {}
    for source in sources:
        for pollable in source.pollables():
            poller.register(pollable, zmq.POLLIN)
            owner[pollable] = source
    ready = {id(owner[pollable]) for pollable, _ in poller.poll(_ms(timeout_s))}
    return [source for source in sources if id(source) in ready]


class Waker:
    """Lets one thread end another's `wait_any`."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the other side has plenty to wake up for
            os.write(self._writer, b"!")

    def clear(self) -> None:
        """Forget all wake-ups so far. Call it before looking for work, so that none is missed."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 65536)

    def pollables(self) -> tuple[Any, ...]:
        return (self._reader,)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Server:
    """Answers many peers at one address.

    A peer is known by the id that its connection got here: a new connection is a new peer, and no peer can choose an
    id. Whatever a peer sends, `receive` never raises for it: what is no message of ours is dropped and counted in
    `counters` as "bad_<kind>".

    address     where it listens really, also when asked for port 0
    key_owner   with keys: whose key signed the message last received
    """

    def __init__(
        self,
        address: str,
        *,
        keys: Keys | None = None,
        high_water: int = HIGH_WATER,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        clock: Clock | None = None,
    ) -> None:
        require_keys_for(address, keys)
        self.counters: Counter[str] = Counter()
        self.key_owner = ""
        self._clock = clock or SystemClock()
        self._context = zmq.Context() if keys else zmq.Context.instance()
        self._doorkeeper = Doorkeeper(self._context, keys) if keys else None
        self._socket = self._context.socket(zmq.ROUTER)
        _set_common_options(self._socket, high_water, max_frame_bytes)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._timeout_ms = -1
        try:
            if keys:
                self._socket.set(zmq.CURVE_SERVER, 1)
                self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.set(zmq.IPV6, "[" in address)
            self._socket.bind(_endpoint(address))
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(address, error) from error
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def receive(self, timeout_s: float) -> tuple[bytes, Envelope] | None:
        """The next message and who sent it; None when none came in time."""
        give_up = None
        while True:
            self._set_timeout(timeout_s if give_up is None else give_up - self._clock.now())
            try:
                first, frames = _read_frames(self._socket)
            except zmq.Again:
                return None
            peer = first.bytes
            if self._doorkeeper:
                self.key_owner = str(first.get("User-Id"))
            try:
                envelope = decode(frames)
            except VersionMismatch as mismatch:
                self.counters["bad_version"] += 1
                self.send(
                    peer,
                    Refused("version", f"this side speaks protocol {PROTOCOL_VERSION}, you {mismatch.found}"),
                )
            except BadMessage as error:
                self.counters[f"bad_{error.kind}"] += 1
            else:
                self.counters["received"] += 1
                return peer, envelope
            give_up = give_up or self._clock.now() + timeout_s

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
        """Queue a message for a peer. zero_copy: the arrays will not change until the message has left."""
        frames = encode(message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=tensors)
        try:
            _write_frames(self._socket, [peer, *frames], zero_copy)
        except zmq.Again:
            self.counters["send_full"] += 1
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.counters["send_unreachable"] += 1
            return Sent.UNREACHABLE
        return Sent.OK

    @property
    def bad_messages(self) -> int:
        """How many messages were dropped because they were not ours."""
        return sum(number for name, number in self.counters.items() if name.startswith("bad_"))

    def pollables(self) -> tuple[Any, ...]:
        return (self._socket,)

    def close(self) -> None:
        self._socket.close(linger=0)
        if self._doorkeeper:
            self._doorkeeper.close()
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_timeout(self, timeout_s: float) -> None:
        timeout_ms = _ms(timeout_s)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.set(zmq.RCVTIMEO, timeout_ms)


class Channel:
    """A connection to one server.

    It may be opened before the server is there. Once it was up and went down it stays lost until `reconnect`, which
    forgets everything that was on its way: the other side may be another process by then, and wants a Hello.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "",
        keys: Keys | None = None,
        server_key: bytes | str | None = None,
        high_water: int = HIGH_WATER,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """name: of the peer, for errors and to find its key in `keys` if no `server_key` is given."""
        require_keys_for(address, keys)
        self.address = address
        self.name = name or address
        self._clock = clock or SystemClock()
        self._keys = keys
        self._server_key = keys.of_peer(name) if keys and server_key is None else server_key
        self._high_water = high_water
        self._max_frame_bytes = max_frame_bytes
        self._open()

    def _open(self) -> None:
        self._is_up = self._was_lost = False
        self._trouble = ""
        self._timeout_ms = -1
        self.last_heard_s: float | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _set_common_options(self._socket, self._high_water, self._max_frame_bytes)
        self._socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        try:
            if self._keys:
                self._socket.set(zmq.CURVE_SERVERKEY, self._server_key)
                self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
                self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
            self._socket.set(zmq.IPV6, "[" in self.address)
            self._socket.connect(_endpoint(self.address))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"{self.address!r} is not an address to connect to ({error.strerror}); write host:port"
            ) from error

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
        """Queue a message. zero_copy: the arrays will not change until the message has left."""
        return self.send_frames(
            encode(message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=tensors), zero_copy=zero_copy
        )

    def send_frames(self, frames: Sequence[Frame], *, zero_copy: bool = False) -> Sent:
        """Queue an encoded message."""
        try:
            _write_frames(self._socket, frames, zero_copy)
        except zmq.Again:
            self._read_events()
            return Sent.FULL if self._is_up else Sent.UNREACHABLE
        return Sent.OK

    def receive(self, timeout_s: float) -> Envelope | None:
        """The next message; None when none came in time; ProtocolError when what came is not a message of ours."""
        timeout_ms = _ms(timeout_s)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.set(zmq.RCVTIMEO, timeout_ms)
        try:
            first, rest = _read_frames(self._socket)
        except zmq.Again:
            return None
        return decode([first.buffer, *rest])

    def request(
        self,
        message: Message,
        expected: type[Message] | tuple[type[Message], ...],
        timeout_s: float,
        *,
        epoch: int = 0,
    ) -> Envelope:
        """Send, once the peer is there, and wait for the answer of an expected type.

        Raises Refusal when the peer says no, DeadlinePassed, PeerLost, or ProtocolError.
        """
        deadline = self._clock.now() + timeout_s
        call_id = next_call_id()
        if not self._socket.poll(_ms(timeout_s), zmq.POLLOUT):
            raise DeadlinePassed(
                f"{self._who()} could not be reached within {timeout_s:g} s: {self._why_unreachable()}"
            )
        self.send(message, call_id=call_id, epoch=epoch, ttl_s=timeout_s)
        while (left := deadline - self._clock.now()) > 0:
            try:
                envelope = self.receive(min(left, 0.05))
            except BadMessage as error:
                raise ProtocolError(
                    f"{self._who()} answered {type(message).__name__} wrongly: {error}"
                ) from error
            if envelope is None:
                if self.is_lost():
                    raise self.lost_error()
            elif isinstance(envelope.message, Refused) and (
                envelope.call_id == call_id or envelope.message.reason == "version"
            ):
                raise envelope.message.as_error()
            elif envelope.call_id == call_id:
                if not isinstance(envelope.message, expected):
                    raise ProtocolError(
                        f"{self._who()} answered {type(message).__name__} with {type(envelope.message).__name__}"
                    )
                return envelope
        raise DeadlinePassed(f"{self._who()} did not answer {type(message).__name__} within {timeout_s:g} s")

    def is_up(self) -> bool:
        """Whether the peer is connected now."""
        self._read_events()
        return self._is_up

    def is_lost(self) -> bool:
        """Whether the connection went down since it was opened. Costs a look at a queue, no wait."""
        self._read_events()
        return self._was_lost

    def lost_error(self) -> PeerLost:
        return PeerLost(f"{self._who()} is gone: its connection ended")

    def reconnect(self) -> None:
        """Start over with a new connection. Replies to what was sent on the old one never arrive."""
        self.close()
        self._open()

    def pollables(self) -> tuple[Any, ...]:
        return (self._socket, self._monitor)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _who(self) -> str:
        return self.name if self.name == self.address else f"{self.name} at {self.address}"

    def _read_events(self) -> None:
        while self._monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._was_lost = self._was_lost or self._is_up
                self._is_up = False
            else:
                self._trouble = (
                    "it does not accept the key, or is not the owner of the key expected; compare the keys"
                )

    def _why_unreachable(self) -> str:
        """What a plain connection meets, for the error message."""
        self._read_events()
        if self._trouble:
            return self._trouble
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        try:
            tcp.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except OSError as error:
            return f"{error.strerror or error}; is its daemon running?"
        return "it accepts connections but does not speak as expected; does it need keys, or is it another program?"


def _endpoint(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"


def _ms(timeout_s: float) -> int:
    return max(0, math.ceil(timeout_s * 1000))


def _set_common_options(socket: zmq.Socket[bytes], high_water: int, max_frame_bytes: int) -> None:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, high_water)
    socket.set(zmq.RCVHWM, high_water)
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.set(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _PING_TIMEOUT_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.set(zmq.TCP_KEEPALIVE_CNT, 3)


def _read_frames(socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, list[memoryview]]:
    """The first frame and those after it, of which only as many are kept as a message can have, and one more."""
    first = frame = socket.recv(copy=False)
    rest: list[memoryview] = []
    while frame.more:
        frame = socket.recv(copy=False)
        if len(rest) <= 1 + MAX_TENSORS:
            rest.append(frame.buffer)
    return first, rest


def _write_frames(socket: zmq.Socket[bytes], frames: Sequence[Frame], zero_copy: bool) -> None:
    """Hand the frames of one message to the socket, all or none: zmq.Again means that the queue has no room."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = _LAST if index == last else _MORE
        copy = not zero_copy or memoryview(frame).nbytes < _ZERO_COPY_BYTES
        try:
            socket.send(frame, flags, copy)
        except zmq.Again:
            socket.get(
                zmq.EVENTS
            )  # ZeroMQ looks for room made meanwhile once a millisecond, or when asked like this
            socket.send(frame, flags, copy)


def _bind_error(address: str, error: zmq.ZMQError) -> ConfigError:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    match error.errno:
        case errno.EADDRINUSE:
            why = f"port {port} of {host} is in use; stop the other program or choose another port"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            why = f"this machine has no address {host}; write one of its own"
        case errno.EACCES:
            why = f"port {port} of {host} needs rights that this process lacks; choose one above 1023"
        case _:
            why = f"{address!r} is not an address to listen on ({error.strerror}); write host:port"
    return ConfigError(f"cannot listen: {why}")
