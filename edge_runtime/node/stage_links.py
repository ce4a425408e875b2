"""Ways from one stage of a decode group to another: a greeted link each, and what comes back on it.

Used by one thread. Knows nothing of what a step is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from edge_runtime.clock import Clock
from edge_runtime.errors import ProtocolError
from edge_runtime.node.peer_link import PeerLink
from edge_runtime.protocol import Refused, StageResult, StageStep

GREET_POLL_S = 0.005


class StageLink:
    """A link to another stage's node. It carries messages one way: what comes back is a refusal, or what greets."""

    def __init__(self, link: PeerLink, epoch: int, clock: Clock) -> None:
        self._link = link
        self._epoch = epoch
        self._clock = clock

    def look(self) -> str:
        """Move on without waiting: why nothing can be sent, empty if it can."""
        link = self._link
        if link.usable:
            self._take_refusals()
        link.look()
        return "" if link.usable else link.fault

    def await_greeting(self, patience_s: float) -> str:
        """`look`, again and again for so long if need be."""
        deadline = self._clock.now() + patience_s
        while (why := self.look()) and self._clock.now() < deadline:
            self._clock.sleep(GREET_POLL_S)
        return why

    def send(self, message: StageStep | StageResult, tensors: Sequence[Any]) -> str:
        """Send now: why that did not work, empty if it did. The arrays may change afterwards."""
        sent = self._link.channel.send(message, call_id=message.step, epoch=self._epoch, tensors=tensors)
        return "" if sent else f"{self._link.name} cannot be reached: {sent.value}"

    def close(self) -> None:
        self._link.close()

    def _take_refusals(self) -> None:
        while self._link.usable:
            try:
                envelope = self._link.channel.receive(0)
            except ProtocolError as error:
                self._link.lose(f"{self._link.name} sent what is not a message: {error}")
                return
            if envelope is None:
                return
            if isinstance(envelope.message, Refused):
                self._link.lose(f"{self._link.name} refused a step: {envelope.message.detail}")


class NextStages(StageLink):
    """LaterStages over a link to the second stage's node."""

    def __init__(self, nodes: Sequence[str], link: PeerLink, epoch: int, clock: Clock) -> None:
        super().__init__(link, epoch, clock)
        self.nodes: Sequence[str] = tuple(nodes)


def links_to(
    nodes: Sequence[str], node: str, connect: Callable[[str], StageLink]
) -> tuple[StageLink | None, StageLink]:
    """A later stage's ways to the next one, None after the last, and to the first."""
    index = nodes.index(node)
    following = connect(nodes[index + 1]) if index + 1 < len(nodes) else None
    return following, connect(nodes[0])
