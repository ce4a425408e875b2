"""Carries out what `shaper.py` decides, for all sockets of one process: stamps what goes, keeps what comes too early.

Stamps are moments of CLOCK_MONOTONIC, which only processes of one machine share. A process that does not shape has no
`Shaping`, and its sockets do nothing of this.
"""

import math
import select
import threading
from collections.abc import Sequence

import zmq

from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError
from edge_runtime.protocol import Frame, LinkShaped, ShapeLink, Stamp, stamped
from edge_runtime.transport.interface import Sent
from edge_runtime.transport.keys import is_loopback
from edge_runtime.transport.shaper import MAX_WAITING, Connection, Link, LinkChange, LinkState, Shaper
from topology.cluster import Cluster

MAX_NAME_BYTES = 64  # of a text in a message's header


class Shaping:
    """The links of one process. Its threads share them, as they share the wire."""

    def __init__(self, shaper: Shaper, clock: Clock) -> None:
        self._shaper = shaper
        self._clock = clock
        self._lock = threading.Lock()

    def stamp(self, peer: str, opened_s: float, frames: Sequence[Frame]) -> list[Frame] | Sent:
        """The frames of one message to `peer`, with the moment at which it may be seen; or why it cannot go."""
        num_bytes = sum(memoryview(frame).nbytes for frame in frames)
        with self._lock:
            now = self._clock.now()
            if self._shaper.connection(peer, opened_s, now) != "up":
                return Sent.UNREACHABLE
            link = self._shaper.state(self._shaper.own, peer)
            if link.num_waiting(now) >= MAX_WAITING:
                return Sent.FULL
            release_s = link.release_time(now, num_bytes)
        assert release_s is not None, "a stream loses nothing"
        return stamped(frames, Stamp(release_s, self._shaper.own))

    def link_from(self, peer: str) -> LinkState:
        """The link from `peer` to this process."""
        return self._shaper.state(peer, self._shaper.own)

    def connection(self, peer: str, opened_s: float) -> Connection:
        return self._shaper.connection(peer, opened_s, self._clock.now())

    def change(self, message: ShapeLink) -> LinkShaped:
        """Change a link of this process as a person asked for, and say what it is like now."""
        change = LinkChange(**{name: getattr(message, name) for name in LinkChange._fields})
        with self._lock:
            now = self._clock.now()
            state = self._shaper.change(message.source, message.target, change, now)
            link, cut_s = state.link, state.opens_s(now) - now
        return LinkShaped(
            source=message.source,
            target=message.target,
            delay_s=link.delay_s,
            jitter_s=link.jitter_s,
            rate_bps=None if math.isinf(link.rate_bps) else link.rate_bps,
            loss=link.loss,
            is_cut=cut_s > 0,
            cut_s=cut_s if 0 < cut_s < math.inf else None,
        )


def wait_readable(socket: "zmq.Socket[bytes]", seconds: float) -> None:
    """Wait until something has come, to the microsecond where ZeroMQ knows milliseconds. May end for nothing."""
    if not int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
        select.select([socket.fileno()], [], [], max(0.0, seconds))


def cluster_shaper(cluster: Cluster, own: str, seed: int = 0) -> Shaper:
    """The links of a topology file as the process `own` has them; ConfigError unless all of it is this machine.

    Half of a link's `rtt` is its delay. The coordinator's links are perfect until somebody changes them.
    """
    addresses = {"coordinator": cluster.coordinator, **{node.name: node.address for node in cluster.nodes}}
    for name, address in addresses.items():
        if not is_loopback(address):
            raise ConfigError(
                f"links are shaped on one machine only, and {name} is at {address}; give it a loopback address"
            )
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ConfigError(
                f"the name {name} is too long for shaped links; at most {MAX_NAME_BYTES} bytes fit"
            )
    names = set(cluster.node_names)

    def link_of(source: str, target: str) -> Link:
        if source == target or not {source, target} <= names:
            return Link()
        link = cluster.link(source, target)
        return Link(delay_s=link.rtt_s / 2, rate_bps=link.bandwidth_bps)

    return Shaper(own, link_of, seed)


_of_process: Shaping | None = None


def shape_this_process(cluster: Cluster, own: str, clock: Clock, seed: int = 0) -> None:
    """Shape the links of every socket that this process opens from now on. `own`: its name in the file."""
    global _of_process
    _of_process = Shaping(cluster_shaper(cluster, own, seed), clock)


def of_process() -> Shaping | None:
    return _of_process
