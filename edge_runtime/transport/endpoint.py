"""Servers and channels over ZeroMQ, whose errors end here; `keys.py` and `shaping.py` alone touch it besides.

Plain blocking sockets with a deadline on every wait. A socket belongs to the thread that uses it; only `Waker.wake` may
be called from another. Nothing here knows what a message is for. With shaped links what comes is kept until its time,
while other peers' messages pass.
"""

import contextlib
import errno
import math
import os
import socket as tcp
from collections.abc import Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError
from edge_runtime.protocol import MAX_FRAME_BYTES, MAX_TENSORS, Envelope, Frame, ShapeLink, decode
from edge_runtime.transport import shaping as shapings
from edge_runtime.transport.interface import HIGH_WATER, AnyChannel, AnyServer, Sent, next_call_id
from edge_runtime.transport.keys import Doorkeeper, Keys, require_keys_for
from edge_runtime.transport.shaper import Held
from edge_runtime.transport.shaping import Shaping, wait_readable

__all__ = ["HIGH_WATER", "Channel", "Sent", "Server", "Waker", "next_call_id", "wait_any"]

_ZERO_COPY_BYTES = (
    1 << 20
)  # below, a copy costs less than its bookkeeping: 128 KB take 155 us copied, 184 us not
_HANDSHAKE_MS = 5000
_PING_MS, _PING_TIMEOUT_MS = 2000, 6000  # finds links that were cut without a word
_RECONNECT_MS, _RECONNECT_MAX_MS = 50, 1000
_RETRY_REJECTED_S = 1.0  # ZeroMQ never tries again where a key was refused, but keys come and go
_MAX_NAMES = 1024  # connections remembered with the name of their shaped link
_LAST, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class Pollable(Protocol):
    def pollables(self) -> tuple[Any, ...]:
        """ZeroMQ sockets or file descriptors that become readable when there is something to do."""

    def notice(self) -> None:
        """Take in what the transport itself wants to know, so that it does not end the next wait as well."""

    def due_in_s(self) -> float:
        """Seconds until there is something to do without anything coming, infinity if there is nothing."""


def wait_any(sources: Sequence[Pollable], timeout_s: float) -> list[Pollable]:
    """Sleep until one of `sources` has something to tell, `timeout_s` at most; the ones that have, in order.

    A channel has something to tell also when its connection came up or went down.
    """
    poller = zmq.Poller()
    owner: dict[Any, Pollable] = {}
    for source in sources:
        for pollable in source.pollables():
            poller.register(pollable, zmq.POLLIN)
            owner[pollable] = source
    timeout_s = min(timeout_s, *(source.due_in_s() for source in sources))
    ready = {id(owner[pollable]) for pollable, _ in poller.poll(_ms(timeout_s))}
    told = [source for source in sources if id(source) in ready or source.due_in_s() <= 0]
    for source in told:
        source.notice()
    return told


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

    def notice(self) -> None:
        pass

    def due_in_s(self) -> float:
        return math.inf

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class Server(AnyServer):
    """A ROUTER socket.

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
        shaping: Shaping | None = None,
    ) -> None:
        """address: "host:port". ConfigError if it cannot be had, or is open to other machines without keys.

        shaping: of its links; default: that of this process, which mostly has none.
        """
        super().__init__(clock)
        host, port = split_address(address)
        require_keys_for(address, keys)
        self.key_owner = ""
        shaping = shaping or shapings.of_process()
        self._shaped = _ShapedPeers(shaping) if shaping else None
        self._timeout_ms = -1
        self._context = (
            zmq.Context() if keys else zmq.Context.instance()
        )  # a doorkeeper guards a whole context
        self._doorkeeper = Doorkeeper(self._context, keys) if keys else None
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        _set_common_options(self._socket, address, high_water, max_frame_bytes)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            if keys:
                self._socket.set(zmq.CURVE_SERVER, 1)
                self._socket.set(zmq.CURVE_PUBLICKEY, keys.public)
                self._socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(host, port, error) from error
        self.address = str(self._socket.get_string(zmq.LAST_ENDPOINT)).removeprefix("tcp://")

    def _take(self, timeout_s: float) -> tuple[bytes, list[Any]] | None:
        timeout_ms = _ms(timeout_s)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.set(zmq.RCVTIMEO, timeout_ms)
        try:
            peer, frames = _read_frames(self._socket)
        except zmq.Again:
            return None
        if self._doorkeeper:
            self.key_owner = str(peer.get("User-Id"))
        return peer.bytes, frames

    def _give(self, peer: bytes, frames: list[Frame], zero_copy: bool) -> Sent:
        if self._shaped is not None:
            stamped = self._shaped.stamp(peer, frames)
            if isinstance(stamped, Sent):
                return stamped
            frames = stamped
        try:
            _write_frames(self._socket, [peer, *frames], zero_copy)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return Sent.UNREACHABLE
        return Sent.OK

    def receive(self, timeout_s: float) -> tuple[bytes, Envelope] | None:
        if self._shaped is None:
            return super().receive(timeout_s)
        return self._receive_shaped(self._shaped, timeout_s)

    def _receive_shaped(self, shaped: "_ShapedPeers", timeout_s: float) -> tuple[bytes, Envelope] | None:
        """What has come is looked through for what may be seen now; a message that must wait holds up no other peer."""
        deadline_s = self.clock.now() + timeout_s
        while True:
            now = self.clock.now()
            held = shaped.held.take(now)
            if held is not None:
                peer, envelope, self.key_owner = held
                return peer, envelope
            received = super().receive(0)
            if received is None:
                if now >= deadline_s:
                    return None
                wait_readable(self._socket, min(deadline_s, shaped.held.due_s(now)) - now)
                continue
            peer, envelope = received
            if isinstance(envelope.message, ShapeLink):
                self.send(peer, shaped.shaping.change(envelope.message), call_id=envelope.call_id)
            elif envelope.stamp is None:
                return received
            elif not shaped.keep(peer, envelope, self.key_owner, now):
                self.counters["bad_stamp"] += 1

    def pollables(self) -> tuple[Any, ...]:
        return (self._socket,)

    def notice(self) -> None:
        pass

    def due_in_s(self) -> float:
        if self._shaped is None:
            return math.inf
        now = self.clock.now()
        return self._shaped.held.due_s(now) - now

    def close(self) -> None:
        self._socket.close(linger=0)
        if self._doorkeeper:
            self._doorkeeper.close()
            self._context.term()


class _ShapedPeers:
    """A server's peers on shaped links: who they are, as their stamps say, and what they sent too early."""

    def __init__(self, shaping: Shaping) -> None:
        self.shaping = shaping
        self.held: Held[tuple[bytes, Envelope, str]] = Held(shaping.link_from)
        self._names: dict[bytes, tuple[str, float]] = {}  # by connection: name and when it was first heard

    def keep(self, peer: bytes, envelope: Envelope, key_owner: str, now: float) -> bool:
        assert envelope.stamp is not None, "only a stamped message waits"
        release_s, name = envelope.stamp
        if peer not in self._names:
            while len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
            self._names[peer] = (name, now)
        return self.held.put(peer, name, release_s, now, (peer, envelope, key_owner))

    def stamp(self, peer: bytes, frames: list[Frame]) -> list[Frame] | Sent:
        """The frames to send to a peer; as they are to one that does not shape."""
        known = self._names.get(peer)
        return self.shaping.stamp(*known, frames) if known else frames


class Channel(AnyChannel):
    """A DEALER socket with a monitor, so that the end of its connection is known at once."""

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
        shaping: Shaping | None = None,
    ) -> None:
        """name: of the peer, for errors, its link, and to find its key in `keys` if no `server_key` is given.

        shaping: of its link; default: that of this process, which mostly has none.
        """
        super().__init__(address, name, clock)
        self._shaping = shaping or shapings.of_process()
        self._host, self._port = split_address(address)
        require_keys_for(address, keys)
        self._keys = keys
        self._given_key = server_key.encode() if isinstance(server_key, str) else server_key
        self._server_key: bytes | str | None = None
        self._high_water = high_water
        self._max_frame_bytes = max_frame_bytes
        self._open()

    def _expected_key(self) -> bytes | str | None:
        """The peer's key as the folder has it now; where it has none, the one given, or the last it had."""
        if self._keys is None:
            return None
        known = self._keys.peers.get(self.name) or self._given_key or self._server_key
        return known or self._keys.of_peer(self.name)

    def _open(self) -> None:
        self._is_up = self._was_lost = self._was_rejected = False
        self._timeout_ms = -1
        self.last_heard_s = None
        self._opened_s = self.clock.now()
        self._server_key = self._expected_key()
        self._held: Held[Envelope] | None = Held(self._shaping.link_from) if self._shaping else None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _set_common_options(self._socket, self.address, self._high_water, self._max_frame_bytes)
        self._socket.set(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        try:
            if self._keys:
                self._socket.set(zmq.CURVE_SERVERKEY, self._server_key)
                self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public)
                self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
            self._socket.connect(f"tcp://{self._host}:{self._port}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot connect to {self.address!r} ({error.strerror}); write host:port, and a server's key as in its file"
            ) from error

    def send_frames(self, frames: Sequence[Frame], *, zero_copy: bool = False) -> Sent:
        if self._shaping is not None:
            stamped = self._shaping.stamp(self.name, self._opened_s, frames)
            if isinstance(stamped, Sent):
                return stamped
            frames = stamped
        try:
            _write_frames(self._socket, frames, zero_copy)
        except zmq.Again:
            return Sent.FULL if self.is_up() else Sent.UNREACHABLE
        return Sent.OK

    def _take(self, timeout_s: float) -> list[Any] | None:
        timeout_ms = _ms(timeout_s)
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.set(zmq.RCVTIMEO, timeout_ms)
        try:
            first, rest = _read_frames(self._socket)
        except zmq.Again:
            return None
        return [first.buffer, *rest]

    def receive(self, timeout_s: float) -> Envelope | None:
        if self._held is None:
            return super().receive(timeout_s)
        deadline_s = self.clock.now() + timeout_s
        while True:
            now = self.clock.now()
            envelope = self._held.take(now)
            if envelope is None:
                frames = self._take(0)
                if frames is None:
                    if now >= deadline_s:
                        return None
                    wait_readable(self._socket, min(deadline_s, self._held.due_s(now)) - now)
                    continue
                envelope = decode(frames)
                if envelope.stamp is not None:
                    self._held.put(self.name, self.name, envelope.stamp.release_s, now, envelope)
                    continue
            self.last_heard_s = now
            return envelope

    def _is_cut_off(self, *how: str) -> bool:
        """Whether its shaped link makes the connection one of "down" and "lost"."""
        return self._shaping is not None and self._shaping.connection(self.name, self._opened_s) in how

    def _retry_with_keys(self) -> None:
        """Connect anew with the keys as they are now, some time after a handshake failed or if the peer's changed."""
        is_due = self.clock.now() - self._opened_s >= _RETRY_REJECTED_S
        if not is_due or self._keys is None or self._is_up or self._was_lost:
            return
        was_rejected = self._was_rejected
        if was_rejected or self._expected_key() != self._server_key:
            self.reconnect()
            self._was_rejected = was_rejected

    def wait_until_up(self, timeout_s: float) -> bool:
        self._read_events()
        self._retry_with_keys()
        if self._is_cut_off("down", "lost"):
            self.clock.sleep(timeout_s)
            return False
        if not self._socket.poll(_ms(timeout_s), zmq.POLLOUT):
            return False
        self._is_up = True  # the monitor may say so a little later
        return True

    def is_up(self) -> bool:
        self._read_events()
        self._retry_with_keys()
        return self._is_up and not self._is_cut_off("down", "lost")

    def is_lost(self) -> bool:
        self._read_events()
        return self._was_lost or self._is_cut_off("lost")

    def why_unreachable(self) -> str:
        self._read_events()
        if self._is_cut_off("down", "lost"):
            return "its emulated link is cut"
        if self._was_rejected and self._keys is None:
            return "it wants keys and there are none here; name the folder of the cluster's keys"
        if self._was_rejected:
            return "the key handshake failed; compare its key and ours with the files on both machines"
        try:
            tcp.create_connection((self._host.strip("[]"), self._port), timeout=1).close()
        except OSError as error:
            return f"{error}; is its daemon running, and is that its address?"
        return "something accepts connections there but does not answer as a node of ours"

    def reconnect(self) -> None:
        self.close()
        self._open()

    def pollables(self) -> tuple[Any, ...]:
        return (self._socket, self._monitor)

    def notice(self) -> None:
        self._read_events()

    def due_in_s(self) -> float:
        if self._held is None:
            return math.inf
        now = self.clock.now()
        return self._held.due_s(now) - now

    def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _read_events(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_up = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._was_lost = self._was_lost or self._is_up
                self._is_up = False
            else:
                self._was_rejected = True


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; ConfigError if that is not what it is. ZeroMQ would cut a large port short."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{address!r} is not an address; write host:port, with a port of 0 to 65535")
    return host, int(port)


def _ms(timeout_s: float) -> int:
    return max(0, math.ceil(timeout_s * 1000))


def _set_common_options(
    socket: zmq.Socket[bytes], address: str, high_water: int, max_frame_bytes: int
) -> None:
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
    socket.set(zmq.IPV6, "[" in address)


def _read_frames(socket: zmq.Socket[bytes]) -> tuple[zmq.Frame, list[memoryview]]:
    """The first frame and those after it, of which only one more is kept than a message can have."""
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


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> ConfigError:
    match error.errno:
        case errno.EADDRINUSE:
            why = f"port {port} of {host} is in use; stop the other program or choose another port"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            why = f"this machine has no address {host}; write one of its own"
        case errno.EACCES:
            why = f"port {port} of {host} needs rights that this process lacks; choose one above 1023"
        case _:
            why = f"{host}:{port} is not an address to listen on ({error.strerror}); write host:port"
    return ConfigError(f"cannot listen: {why}")
