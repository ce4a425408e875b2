"""What a node knows of its own speed and of its links: tried when its share was loaded, probed, refined by calls it makes.

Decides when what is probed and keeps what came of it. Knows no thread and no socket; `now` is given.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from edge_runtime.node.prober import Call, Took, link_of, refined
from edge_runtime.node.remote import PeerTraffic
from topology.speeds import LinkSpeed, NodeSpeed

AGAIN_S = 300.0  # after which an idle node probes a link anew
RETRY_S = 10.0  # after a peer that did not answer
ENOUGH_CALLS = 20  # between two looks, to refine a link by


class Gauge:
    """One node's measurements."""

    def __init__(self) -> None:
        self.speed: NodeSpeed | None = None
        self._call: Call | None = None
        self._links: dict[str, LinkSpeed] = {}
        self._try_at_s: dict[str, float] = {}
        self._least_s: dict[str, float] = {}
        self._calls: dict[str, int] = {}

    @property
    def knows_call(self) -> bool:
        """Whether a call without a link was measured."""
        return self._call is not None

    def tried(self, speed: NodeSpeed | None) -> None:
        """A share was loaded, and tried."""
        self.speed = speed or self.speed

    def due(self, peers: Iterable[str], now: float, *, is_idle: bool) -> list[str]:
        """Peers whose links are to be probed now: those that never were, and old ones while nothing runs."""
        found = [
            peer
            for peer in peers
            if now >= self._try_at_s.get(peer, now) and (is_idle or peer not in self._links)
        ]
        self._try_at_s |= dict.fromkeys(found, now + RETRY_S)
        return found

    def probed(self, took: Mapping[str, Took], call: Call | None, now: float) -> None:
        """What a probe found."""
        self._call = call or self._call
        own = self._call or Call(0.0, 0.0)
        for peer, found in took.items():
            self._links[peer] = link_of(found, own)
            self._try_at_s[peer] = now + AGAIN_S

    def served(self, traffic: dict[str, PeerTraffic]) -> None:
        """Look at what calls took since the last look."""
        for peer, counts in traffic.items():
            is_enough = counts.calls - self._calls.get(peer, 0) >= ENOUGH_CALLS
            least_s, counts.least_s = counts.least_s, float("inf")
            link = self._links.get(peer)
            if is_enough and link is not None and self._call is not None and least_s < float("inf"):
                self._links[peer] = refined(link, least_s, self._call.seconds)
            if is_enough:
                self._calls[peer] = counts.calls

    def report(self) -> tuple[NodeSpeed | None, dict[str, LinkSpeed]]:
        """What the coordinator is told."""
        if self.speed is None or self._call is None:
            return self.speed, dict(self._links)
        end_s = self._call.work_s / 2
        own = replace(self.speed, call_overhead_s=self._call.seconds, call_work_s=end_s, serve_work_s=end_s)
        return own, dict(self._links)


def peers_to_probe(hosts: Sequence[str], alive: Iterable[str], own: str) -> list[str]:
    """Whom a home calls, as far as they serve."""
    living = set(alive)
    return [name for name in dict.fromkeys(hosts) if name in living and name != own]
