"""Servers and channels within one process and thread, over links that delay, lose, reorder and break on demand.

Everything goes through the same bytes as on sockets, and over the links of `shaper.py`, here as datagrams: jitter
reorders and losses are final, which is worse than any connection. Time is the clock that is passed in: a wait lets the
clock sleep until the next message is due, so with a `ManualClock` nothing waits really, and a seed makes every run the
same.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError
from edge_runtime.protocol import Envelope, Frame
from edge_runtime.transport.interface import HIGH_WATER, AnyChannel, AnyServer, Sent
from edge_runtime.transport.shaper import Link, LinkState


class MemoryNetwork:
    """The links, and what is on its way on them."""

    def __init__(self, clock: Clock, *, seed: int = 0, link: Link | None = None) -> None:
        self.clock = clock
        self.num_lost = 0
        self._random = random.Random(seed)
        self._default = link or Link()
        self._links: dict[str, tuple[LinkState, LinkState]] = {}  # by address: to it, from it
        self._servers: dict[str, MemoryServer] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def server(self, address: str, *, high_water: int = HIGH_WATER) -> "MemoryServer":
        if address in self._servers:
            raise ConfigError(f"cannot listen: {address} is in use; choose another address")
        self._servers[address] = MemoryServer(self, address, high_water)
        return self._servers[address]

    def channel(self, address: str, *, name: str = "", high_water: int = HIGH_WATER) -> "MemoryChannel":
        return MemoryChannel(self, address, name, high_water)

    def links(self, address: str) -> tuple[LinkState, LinkState]:
        """The link to an address and the one back."""
        if address not in self._links:
            make = lambda: LinkState(self._default, self._random, is_stream=False)  # noqa: E731
            self._links[address] = (make(), make())
        return self._links[address]

    def is_cut(self, address: str) -> bool:
        return any(link.is_cut(self.clock.now()) for link in self.links(address))

    def shape(self, address: str, *, is_cut: bool | None = None, **changes: Any) -> None:
        """Change fields of both links of `address`. Cutting them ends its connections, and loses what is on its way."""
        for link in self.links(address):
            link.link = replace(link.link, **changes)
            if is_cut is not None:
                (link.cut if is_cut else link.heal)(self.clock.now())
        if is_cut and address in self._servers:
            self._servers[address].drop_peers()

    def next_due_s(self) -> float | None:
        """When the next message arrives, None if none is on its way."""
        return self._due[0][0] if self._due else None

    def deliver_due(self) -> None:
        """Let everything arrive that is due by now."""
        while self._due and self._due[0][0] <= self.clock.now():
            heapq.heappop(self._due)[2]()

    def carry(
        self, link: LinkState, frames: Sequence[Frame], arrive: Callable[[], None], vanish: Callable[[], None]
    ) -> None:
        """Put one message on a link: one of the two is called, `vanish` at once."""
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        due_s = link.release_time(self.clock.now(), num_bytes)
        if due_s is None:
            self.num_lost += 1
            vanish()
        else:
            heapq.heappush(self._due, (due_s, next(self._order), arrive))

    def wait_for(self, inbox: deque[Any], timeout_s: float) -> bool:
        """Let time pass until `inbox` holds something, `timeout_s` at most."""
        deadline_s = self.clock.now() + max(0.0, timeout_s)
        while True:
            self.deliver_due()
            now = self.clock.now()
            if inbox or now >= deadline_s:
                return bool(inbox)
            due_s = self.next_due_s()
            self.clock.sleep(min(deadline_s, deadline_s if due_s is None else due_s) - now)

    def connect(self, channel: "MemoryChannel") -> "MemoryServer | None":
        server = self._servers.get(channel.address)
        if server is None or self.is_cut(channel.address):
            return None
        server.peers[channel.id] = channel
        return server

    def forget(self, server: "MemoryServer") -> None:
        if self._servers.get(server.address) is server:
            del self._servers[server.address]


class MemoryServer(AnyServer):
    """answer: if set, is called with (peer, envelope) as each message arrives, instead of waiting for `receive`."""

    def __init__(self, network: MemoryNetwork, address: str, high_water: int) -> None:
        super().__init__(network.clock)
        self.address = address
        self.answer: Callable[[bytes, Envelope], None] | None = None
        self.peers: dict[bytes, MemoryChannel] = {}
        self.inbox: deque[tuple[bytes, list[Any]]] = deque()
        self._network = network
        self._high_water = high_water

    def arrive(self, peer: bytes, frames: list[Any]) -> None:
        self.inbox.append((peer, frames))
        if self.answer and (received := self.receive(0)):
            self.answer(*received)

    def _take(self, timeout_s: float) -> tuple[bytes, list[Any]] | None:
        if not self.inbox and not self._network.wait_for(self.inbox, timeout_s):
            return None
        peer, frames = self.inbox.popleft()
        if channel := self.peers.get(peer):
            channel.unread_there -= 1
        return peer, frames

    def _give(self, peer: bytes, frames: list[Frame], zero_copy: bool) -> Sent:
        channel = self.peers.get(peer)
        if channel is None:
            return Sent.UNREACHABLE
        if channel.unread_here >= self._high_water:
            return Sent.FULL
        copies = _copied(frames)
        channel.unread_here += 1
        back = self._network.links(self.address)[1]
        self._network.carry(
            back, copies, lambda: channel.arrive(peer, copies), lambda: channel.vanished(peer)
        )
        return Sent.OK

    def drop_peers(self) -> None:
        """End all connections."""
        for channel in self.peers.values():
            channel.hang_up()
        self.peers.clear()
        self.inbox.clear()

    def close(self) -> None:
        self.drop_peers()
        self._network.forget(self)


class MemoryChannel(AnyChannel):
    def __init__(self, network: MemoryNetwork, address: str, name: str, high_water: int) -> None:
        super().__init__(address, name, network.clock)
        self._network = network
        self._high_water = high_water
        self._ids = count(1)
        self._open()

    def _open(self) -> None:
        self.id = f"{id(self)}.{next(self._ids)}".encode()
        self.inbox: deque[list[Any]] = deque()
        self.unread_here = self.unread_there = 0  # on their way or waiting to be read
        self.last_heard_s = None
        self._was_lost = False
        self._server = self._network.connect(self)

    def send_frames(self, frames: Sequence[Frame], *, zero_copy: bool = False) -> Sent:
        if not self.is_up() or self._server is None:
            return Sent.UNREACHABLE
        if self.unread_there >= self._high_water:
            return Sent.FULL
        copies, peer, server = _copied(frames), self.id, self._server
        self.unread_there += 1

        def arrive() -> None:
            if peer in server.peers:
                server.arrive(peer, copies)

        def vanish() -> None:
            self.unread_there -= 1

        self._network.carry(self._network.links(self.address)[0], copies, arrive, vanish)
        return Sent.OK

    def _take(self, timeout_s: float) -> list[Any] | None:
        if not self._network.wait_for(self.inbox, timeout_s):
            return None
        self.unread_here -= 1
        return self.inbox.popleft()

    def arrive(self, peer: bytes, frames: list[Any]) -> None:
        if peer == self.id and self._server is not None:
            self.inbox.append(frames)

    def vanished(self, peer: bytes) -> None:
        if peer == self.id:
            self.unread_here -= 1

    def hang_up(self) -> None:
        self._was_lost = True
        self._server = None

    def wait_until_up(self, timeout_s: float) -> bool:
        if not self.is_up():
            self._network.wait_for(deque(), timeout_s)  # time passes; a server may have come meanwhile
        return self.is_up()

    def is_up(self) -> bool:
        if self._server is None and not self._was_lost:
            self._server = self._network.connect(self)
        return self._server is not None

    def is_lost(self) -> bool:
        return self._was_lost

    def why_unreachable(self) -> str:
        return "its link is cut" if self._network.is_cut(self.address) else "nobody listens at that address"

    def reconnect(self) -> None:
        self.close()
        self._open()

    def close(self) -> None:
        if self._server is not None:
            self._server.peers.pop(self.id, None)
            self._server = None


def _copied(frames: Sequence[Frame]) -> list[Any]:
    return [memoryview(bytearray(frame)) for frame in frames]
