"""Call several peers at once: send to all, then receive in order under one deadline. The token path's transport.

A reply is matched by its call id; one that comes too late for its call is dropped and counted. What went wrong with a
peer is that peer's outcome, a value. Works with any channel; knows nothing of experts.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import DeadlinePassed, PeerError, ProtocolError, Refusal
from edge_runtime.protocol import BadMessage, Envelope, Message, Refused
from edge_runtime.transport.interface import SLICE_S, AnyChannel, Sent, next_call_id

Outcome = Envelope | PeerError | Refusal
AT_ONCE_S = 50e-6  # a reply that takes no longer to be taken in was there before


class Pending(NamedTuple):
    """A call on its way: to whom, under which id, until when. sent: what became of it at each channel."""

    call_id: int
    sent_s: float
    deadline_s: float
    channels: Sequence[AnyChannel]
    sent: list[Sent]


class PeerCalls:
    """Fan-out calls of one thread, one at a time: a reply to any other call is stale, but for those that `keep` names.

    counters  "calls", "stale", "lost", "late", "bad", "refused", "full"
    waits     of the last `receive`: seconds until each outcome was there, and whether it was there before it was asked for
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.counters: Counter[str] = Counter()
        self.waits: list[tuple[float, bool]] = []
        self._clock = clock or SystemClock()
        self._kept: dict[tuple[int, str], Envelope | None] = {}

    def keep(self, pending: Pending) -> None:
        """Another call is received before this one: set aside what comes of this one meanwhile."""
        self._kept |= {(pending.call_id, channel.who): None for channel in pending.channels}

    def forget(self, pending: Pending) -> None:
        """Nobody waits for this call any more."""
        for channel in pending.channels:
            self._kept.pop((pending.call_id, channel.who), None)

    def send(
        self,
        channels: Sequence[AnyChannel],
        messages: Sequence[Message],
        tensors: Sequence[Sequence[Any]],
        *,
        epoch: int,
        ttl_s: float,
        zero_copy: bool = False,
    ) -> Pending:
        """Send `messages[i]` with `tensors[i]` to `channels[i]`. ttl_s: the deadline of the whole call."""
        call_id = next_call_id()
        sent_s = self._clock.now()
        sent = [
            channel.send(
                message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=arrays, zero_copy=zero_copy
            )
            for channel, message, arrays in zip(channels, messages, tensors, strict=True)
        ]
        self.counters["calls"] += len(sent)
        return Pending(call_id, sent_s, sent_s + ttl_s, channels, sent)

    def receive(self, pending: Pending) -> list[Outcome]:
        """One outcome per channel: the reply, or why there is none."""
        outcomes = self.receive_until(pending, pending.deadline_s)
        return [outcome for outcome in outcomes if outcome is not None]

    def receive_until(self, pending: Pending, until_s: float) -> list[Outcome | None]:
        """The same, but None for each channel that has said nothing by `until_s`, before the deadline: ask again for those."""
        outcomes: list[Outcome | None] = []
        now, self.waits = self._clock.now, []
        asked_s = now()
        for channel, sent in zip(pending.channels, pending.sent, strict=True):
            outcomes.append(self._await(pending, channel, sent, min(until_s, pending.deadline_s)))
            came_s = now()
            self.waits.append((came_s - pending.sent_s, came_s - asked_s < AT_ONCE_S))
            asked_s = came_s
        return outcomes

    def _await(self, pending: Pending, channel: AnyChannel, sent: Sent, until_s: float) -> Outcome | None:
        if not sent:
            return self._not_sent(channel, sent)
        envelope = self._kept.pop((pending.call_id, channel.who), None)
        if envelope is not None:
            return self._outcome(envelope)
        left = until_s - self._clock.now()
        while True:
            was_lost = False
            try:
                envelope = channel.receive(max(0.0, min(left, SLICE_S)))
                if envelope is None and (was_lost := channel.is_lost()):
                    envelope = channel.receive(0)  # what came before the end counts
            except BadMessage as error:
                self.counters["bad"] += 1
                return ProtocolError(f"{channel.who} sent what is not a message: {error}")
            if envelope is not None:
                if envelope.call_id == pending.call_id:
                    return self._outcome(envelope)
                place = (envelope.call_id, channel.who)
                if place in self._kept:
                    self._kept[place] = envelope
                else:
                    self.counters["stale"] += 1
            elif was_lost:
                self.counters["lost"] += 1
                return channel.lost_error()
            left = until_s - self._clock.now()
            if envelope is None and left <= 0 and until_s < pending.deadline_s:
                return None
            if envelope is None and left <= 0:
                self.counters["late"] += 1
                waited = self._clock.now() - pending.sent_s
                return DeadlinePassed(
                    f"{channel.who} did not answer call {pending.call_id} within {waited:.3f} s"
                )

    def _outcome(self, envelope: Envelope) -> Outcome:
        if type(envelope.message) is Refused:
            self.counters["refused"] += 1
            return envelope.message.as_error()
        return envelope

    def _not_sent(self, channel: AnyChannel, sent: Sent) -> Outcome:
        if sent is Sent.FULL:
            self.counters["full"] += 1
            return Refusal("busy", f"the queue to {channel.name} is full: {channel.name} does not keep up")
        self.counters["lost"] += 1
        return channel.lost_error()
