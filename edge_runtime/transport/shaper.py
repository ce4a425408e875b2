"""What a link does to messages: when each may be seen, and which never are. Pure: `now` and the seed are given.

The sender of a message computes the moment at which the link would have brought it, the receiver keeps it until then.
That is one moment of one clock, so both must be processes of one machine. Knows no socket and no byte.

What is modelled: delay, rate, jitter, the wait for a retransmission after a loss, and cuts. What is not: TCP's window
and its slow start (a long fat link is not filled at once by a real connection), headers below ours, and how long TCP
takes to try again after a cut.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, Literal, NamedTuple, TypeVar

BROKEN_AFTER_S = 6.0  # a cut of this length ends connections: ZeroMQ's pings find out by then
PACKET_BYTES = 1448  # of data in one TCP segment
TIMEOUT_S = 0.2  # TCP's shortest wait before it sends again what nothing has followed
MAX_WAITING = 256  # messages on one link that nobody may see yet; a sender finds its queue full then
MAX_HELD = 4096  # messages that a receiver keeps for one peer; only a peer that lies has more

T = TypeVar("T")
Connection = Literal["up", "down", "lost"]


@dataclass(frozen=True)
class Link:
    """How messages fare in one direction.

    delay_s   one way
    jitter_s  at most so much more, at random and evenly
    rate_bps  bits per second
    loss      probability that a packet (of a stream) or a message (of datagrams) is lost
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    rate_bps: float = math.inf
    loss: float = 0.0


class LinkState:
    """One direction of a link, and what is on it.

    is_stream  as TCP: order is kept and a lost packet costs a wait. Else jitter reorders, and what is lost vanishes.
    """

    def __init__(self, link: Link, seeded: random.Random, *, is_stream: bool = True) -> None:
        self.link = link
        self._random = seeded
        self._is_stream = is_stream
        self._busy_until_s = 0.0
        self._last_release_s = 0.0
        self._waiting: deque[float] = deque()
        self._cut_s = self._heal_s = -math.inf  # of the last cut
        self._broken_cut_s = -math.inf  # start of the last cut before it that ended connections

    def release_time(self, now: float, num_bytes: int) -> float | None:
        """When a message given to the link now may be seen; None if it never may."""
        link = self.link
        self._busy_until_s = max(now, self._busy_until_s) + num_bytes * 8 / link.rate_bps
        release_s = self._busy_until_s + link.delay_s
        if link.jitter_s:
            release_s += self._random.random() * link.jitter_s
        if not self._is_stream:
            return None if link.loss and self._random.random() < link.loss else release_s
        if link.loss:
            release_s += self._retransmission_s(math.ceil(num_bytes / PACKET_BYTES))
        release_s = self._last_release_s = max(release_s, self._last_release_s)
        self._waiting.append(release_s)
        return release_s

    def num_waiting(self, now: float) -> int:
        """Messages of a stream that were given to the link and may not be seen yet."""
        while self._waiting and self._waiting[0] <= now:
            self._waiting.popleft()
        return len(self._waiting)

    def _retransmission_s(self, num_packets: int) -> float:
        """How much later the last of these packets is complete because of losses.

        A hole is filled a round trip after three later packets have shown it, and after a timeout where fewer
        follow. Holes of one message are filled together; the same one may be lost again, after twice the time.
        """
        round_trip_s = 2 * self.link.delay_s
        timeout_s = max(TIMEOUT_S, 2 * round_trip_s)
        worst_s, packet = 0.0, self._packets_until_loss()
        while packet < num_packets:
            wait_s = total_s = round_trip_s if num_packets - 1 - packet >= 3 else timeout_s
            for _ in range(6):
                if self._random.random() >= self.link.loss:
                    break
                wait_s = max(2 * wait_s, timeout_s)
                total_s += wait_s
            worst_s = max(worst_s, total_s)
            packet += 1 + self._packets_until_loss()
        return worst_s

    def _packets_until_loss(self) -> int:
        """How many packets pass before the next one is lost, at random."""
        if self.link.loss >= 1:
            return 0
        return int(min(1e15, math.log(1 - self._random.random()) / math.log1p(-self.link.loss)))

    # Cuts.

    def cut(self, now: float, until_s: float = math.inf) -> None:
        """Let nothing pass from now on. A link that is cut already stays so, with a new end."""
        if not self.is_cut(now):
            self._broken_cut_s = self._last_broken_cut_s(now)
            self._cut_s = now
        self._heal_s = until_s

    def heal(self, now: float) -> None:
        """Let everything pass again; what waited comes now."""
        self._heal_s = min(self._heal_s, now)

    def is_cut(self, now: float) -> bool:
        return now < self._heal_s

    def opens_s(self, now: float) -> float:
        """When something passes again: `now` if it does, infinity if nobody knows."""
        return max(now, self._heal_s)

    def broken_s(self, now: float) -> float:
        """When a cut ended the connections over this link the last time, minus infinity if none did."""
        return self._last_broken_cut_s(now) + BROKEN_AFTER_S

    def connection(self, opened_s: float, now: float) -> Connection:
        """What has become of a connection that was opened at `opened_s`: one opened in a cut waits for its end."""
        if self.is_cut(now) and opened_s > self._cut_s:
            return "down"
        return "lost" if opened_s <= self._last_broken_cut_s(now) else "up"

    def _last_broken_cut_s(self, now: float) -> float:
        if min(now, self._heal_s) - self._cut_s >= BROKEN_AFTER_S:
            return self._cut_s
        return self._broken_cut_s


class LinkChange(NamedTuple):
    """What to change of a link; None leaves it. cut_s: 0 until it is healed. reset: first as it was at the start."""

    delay_s: float | None = None
    jitter_s: float | None = None
    rate_bps: float | None = None
    loss: float | None = None
    cut_s: float | None = None
    reset: bool = False


class Shaper:
    """All links of one process, by (source, target) names."""

    def __init__(self, own: str, link_of: Callable[[str, str], Link], seed: int = 0) -> None:
        """own: this process's name; link_of(source, target): the link at the start."""
        self.own = own
        self._link_of = link_of
        self._seed = seed
        self._states: dict[tuple[str, str], LinkState] = {}

    def state(self, source: str, target: str) -> LinkState:
        pair = (source, target)
        found = self._states.get(pair)
        if found is None:
            seeded = random.Random(f"{self._seed} {source} {target}")
            found = self._states.setdefault(pair, LinkState(self._link_of(source, target), seeded))
        return found

    def change(self, source: str, target: str, change: LinkChange, now: float) -> LinkState:
        """Change one direction; what is on the link already keeps its time."""
        state = self.state(source, target)
        if change.reset:
            state.link = self._link_of(source, target)
            state.heal(now)
        fields = change._asdict()
        given = {name: fields[name] for name in Link.__dataclass_fields__ if fields[name] is not None}
        state.link = replace(state.link, **given)
        if change.cut_s is not None:
            state.cut(now, now + change.cut_s if change.cut_s else math.inf)
        return state

    def connection(self, peer: str, opened_s: float, now: float) -> Connection:
        """What has become of a connection with `peer`; either direction may end it."""
        both = {self.state(*pair).connection(opened_s, now) for pair in ((self.own, peer), (peer, self.own))}
        return "lost" if "lost" in both else "down" if "down" in both else "up"


class _Waiting(NamedTuple, Generic[T]):
    release_s: float
    arrived_s: float
    item: T


class Held(Generic[T]):
    """What has arrived and may not be seen yet: one queue per connection, so that none waits for another's link.

    `link` below gives the state of the link from the peer of that name to here.
    """

    def __init__(self, link: Callable[[str], LinkState]) -> None:
        self._link = link
        self._queues: dict[Hashable, tuple[str, deque[_Waiting[T]]]] = {}

    def __len__(self) -> int:
        return sum(len(queue) for _, queue in self._queues.values())

    def put(self, key: Hashable, peer: str, release_s: float, now: float, item: T) -> bool:
        """Keep an item of connection `key` until `release_s`. False: that peer has far too many waiting."""
        _, queue = self._queues.setdefault(key, (peer, deque()))
        if len(queue) >= MAX_HELD:
            return False
        queue.append(_Waiting(release_s, now, item))
        return True

    def take(self, now: float) -> T | None:
        """The item that may be seen since longest, None if there is none."""
        first_s, first = math.inf, None
        for key, (peer, queue) in list(self._queues.items()):
            self._forget_broken(self._link(peer), queue, now)
            if not queue:
                del self._queues[key]
            elif queue[0].release_s < first_s and self._due_s(peer, queue, now) <= now:
                first_s, first = queue[0].release_s, queue
        return first.popleft().item if first else None

    def due_s(self, now: float) -> float:
        """When the next item may be seen, infinity if nothing waits or nobody knows."""
        return min(
            (self._due_s(peer, queue, now) for peer, queue in self._queues.values() if queue),
            default=math.inf,
        )

    def _due_s(self, peer: str, queue: deque[_Waiting[T]], now: float) -> float:
        link = self._link(peer)
        return max(queue[0].release_s, link.opens_s(now)) if link.is_cut(now) else queue[0].release_s

    def _forget_broken(self, link: LinkState, queue: deque[_Waiting[T]], now: float) -> None:
        """What waited on a connection that a cut has ended never comes."""
        broken_s = link.broken_s(now)
        while queue and queue[0].arrived_s <= broken_s:
            queue.popleft()
