"""Measures the links to a node's peers, and what a call costs without any link: small messages there and back, then a larger one.

A thread of its own with connections of its own, so that no call waits for it. A few KB and one large message each way for a
peer; whoever does not answer is left out and may be tried again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
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
SMALL_PROBES, LARGE_PROBES = 12, 6
LONG_S = 0.01  # a large probe that takes so long is not disturbed by neighbours as much as it is by the link
OWN_ROUNDS = 3  # of the call to oneself, whose processor time counts as well
LARGE_BITS = 2 * (LARGE_NUMBERS - SMALL_NUMBERS) * 4 * BYTE_BITS  # there and back, beyond a small message
TOLD_APART = 0.5  # a link's share of what a large message takes without one, from which on it can be seen


class Took(NamedTuple):
    """Seconds of a small and of a large message there and back, each the quickest of several."""

    small_s: float
    large_s: float


class Call(NamedTuple):
    """A call to oneself: seconds, and processor seconds of all threads at both ends; seconds that a large message takes more."""

    seconds: float
    work_s: float
    large_s: float = 0.0


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
        self.links: dict[str, Took] = {}
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
            if peer is not self._own:
                self.links[peer.name] = self._took(channel)
                return
            rounds = [self._own_round(channel) for _ in range(OWN_ROUNDS)]
            small_s = min(took.small_s for took, _ in rounds)
            large_s = min(took.large_s for took, _ in rounds)
            self.call = Call(small_s, min(work_s for _, work_s in rounds), max(0.0, large_s - small_s))

    def _own_round(self, channel: Channel) -> tuple[Took, float]:
        """What messages took, and the processor seconds of a small one."""
        before = self._clock.processor_s()
        small_s = self._quickest(channel, SMALL_NUMBERS, SMALL_PROBES, ANSWER_S)
        work_s = (self._clock.processor_s() - before) / SMALL_PROBES
        return Took(small_s, self._quickest(channel, LARGE_NUMBERS, LARGE_PROBES, LARGE_ANSWER_S)), work_s

    def _took(self, channel: Channel) -> Took:
        small_s = self._quickest(channel, SMALL_NUMBERS, SMALL_PROBES, ANSWER_S)
        return Took(small_s, self._quickest(channel, LARGE_NUMBERS, LARGE_PROBES, LARGE_ANSWER_S))

    def _quickest(self, channel: Channel, count: int, times: int, timeout_s: float) -> float:
        """Whatever disturbs a message only makes it longer. A long one is sent twice and no more."""
        took_s = float("inf")
        for number in range(times):
            began = self._clock.now()
            channel.request(Probe(), Probed, timeout_s, tensors=(np.zeros(count, dtype=np.float32),))
            took_s = min(took_s, self._clock.now() - began)
            if number and took_s > LONG_S:
                break
        return took_s


def link_of(took: Took, call: Call) -> LinkSpeed:
    """A link's own part of what was measured: the rest is what a call takes without any link.

    Where messages take the link hardly longer than they take without one, its rate is a bound: it is at least that.
    """
    own_s = max(call.large_s, 1e-6)
    rest_s = took.large_s - took.small_s - call.large_s
    is_bound = rest_s < TOLD_APART * own_s
    return LinkSpeed(
        rtt_s=max(0.0, took.small_s - call.seconds),
        bandwidth_bps=LARGE_BITS / max(rest_s, TOLD_APART * own_s),
        rate_is_bound=is_bound,
    )


def refined(link: LinkSpeed, least_s: float, call_s: float, weight: float = 0.3) -> LinkSpeed:
    """A link after calls were served over it, the quickest of which took `least_s` besides its arithmetic."""
    return replace(link, rtt_s=(1 - weight) * link.rtt_s + weight * max(0.0, least_s - call_s))
