"""Measures the links to a node's peers, and what a call costs without any link: small messages there and back, then a larger one.

A thread of its own with connections of its own, so that no call waits for it. A few KB and one large message each way for a
peer; whoever does not answer is left out and may be tried again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edge_runtime.clock import Clock
from edge_runtime.errors import EdgeError
from edge_runtime.protocol import Hello, PeerAddress, Probe, Probed, Welcome
from edge_runtime.transport.endpoint import Channel
from edge_runtime.transport.keys import Keys
from topology.speeds import BYTE_BITS, LinkSpeed

log = logging.getLogger(__name__)

ANSWER_S = 1.0
LARGE_ANSWER_S = 5.0
SMALL_NUMBERS, LARGE_NUMBERS = 256, 16384  # float32: 1 KB and 64 KB
SMALL_PROBES, LARGE_PROBES = 8, 2
OWN_ROUNDS, OWN_PROBES = 3, 6  # of the call to oneself, whose processor time counts as well
FASTEST_BPS = 40e9  # where the large message takes no longer than a small one


class Call(NamedTuple):
    """A call to oneself: seconds, and processor seconds of all threads at both ends."""

    seconds: float
    work_s: float


class LinkProber(threading.Thread):
    """Measures once, then calls `done` from its own thread. What it found is in `links` and `call`."""

    def __init__(
        self,
        own: PeerAddress | None,
        peers: Sequence[PeerAddress],
        identity: Hello,
        keys: Keys | None,
        clock: Clock,
        done: Callable[["LinkProber"], None],
    ) -> None:
        """own: this node's address, where a call without a link is measured; None where that is known"""
        super().__init__(name="link-prober", daemon=True)
        self.peers = tuple(peer.name for peer in peers)
        self.links: dict[str, float] = {}  # peer -> seconds of a small message there and back
        self.rates: dict[str, float] = {}
        self.call: Call | None = None
        self._own, self._peers = own, peers
        self._identity, self._keys, self._clock, self._done = identity, keys, clock, done

    def run(self) -> None:
        for peer in (self._own, *self._peers):
            if peer is None:
                continue
            try:
                self._measure(peer)
            except EdgeError as error:
                log.info("the link to %s is not measured: %s", peer.name, error)
        self._done(self)

    def _measure(self, peer: PeerAddress) -> None:
        with Channel(
            peer.address, name=peer.name, keys=self._keys, server_key=peer.public_key or None
        ) as channel:
            channel.request(self._identity, Welcome, ANSWER_S)
            if peer is self._own:
                rounds = [self._own_round(channel) for _ in range(OWN_ROUNDS)]
                self.call = Call(min(r.seconds for r in rounds), min(r.work_s for r in rounds))
                return
            small_s = quartile([self._probe(channel, SMALL_NUMBERS, ANSWER_S) for _ in range(SMALL_PROBES)])
            large_s = min(self._probe(channel, LARGE_NUMBERS, LARGE_ANSWER_S) for _ in range(LARGE_PROBES))
            self.links[peer.name] = small_s
            self.rates[peer.name] = rate_bps(small_s, large_s)

    def _own_round(self, channel: Channel) -> Call:
        before = self._clock.processor_s()
        took = [self._probe(channel, SMALL_NUMBERS, ANSWER_S) for _ in range(OWN_PROBES)]
        return Call(quartile(took), (self._clock.processor_s() - before) / OWN_PROBES)

    def _probe(self, channel: Channel, count: int, timeout_s: float) -> float:
        began = self._clock.now()
        channel.request(Probe(), Probed, timeout_s, tensors=(np.zeros(count, dtype=np.float32),))
        return self._clock.now() - began


def quartile(values: Sequence[float]) -> float:
    """The lower quartile: whatever disturbs a measurement only makes it longer."""
    return float(np.quantile(np.asarray(values), 0.25))


def rate_bps(small_s: float, large_s: float) -> float:
    """Bits per second each way, from a small and a large message that went there and back."""
    bits = 2 * (LARGE_NUMBERS - SMALL_NUMBERS) * 4 * BYTE_BITS
    return min(FASTEST_BPS, bits / max(large_s - small_s, 1e-9))


def link_of(there_and_back_s: float, bits_per_s: float, call_s: float) -> LinkSpeed:
    """A link's own part of what was measured: the rest is what a call costs without any link, `call_s`."""
    return LinkSpeed(rtt_s=max(0.0, there_and_back_s - call_s), bandwidth_bps=bits_per_s)


def refined(link: LinkSpeed, least_s: float, call_s: float, weight: float = 0.3) -> LinkSpeed:
    """A link after calls were served over it, the quickest of which took `least_s` besides its arithmetic."""
    rtt_s = (1 - weight) * link.rtt_s + weight * max(0.0, least_s - call_s)
    return LinkSpeed(rtt_s=rtt_s, bandwidth_bps=link.bandwidth_bps)
