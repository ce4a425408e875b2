"""Running requests as the coordinator sees them: which client waits, which node answers, what may be sent now.

Pure. A slow client never fills a queue: it has a window of messages, and what comes while the window is used up is
merged into one message that waits.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from edge_runtime.protocol import Failed, Finished, Tokens


class Delivery(NamedTuple):
    """A message for a client."""

    client: bytes
    message: Tokens | Finished | Failed


@dataclass
class Stream:
    """One request on its way. `credit` is how many Tokens messages may still be sent before the client grants more."""

    request_id: str
    client: bytes
    node: str
    credit: int
    waiting: list[Tokens] = field(default_factory=list)

    def merged(self) -> Tokens:
        """All that waits, as one message."""
        parts = self.waiting
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
        return Tokens(
            request_id=self.request_id,
            index=parts[0].index,
            token_ids=[token_id for part in parts for token_id in part.token_ids],
            text="".join(part.text for part in parts),
            logprobs=logprobs or None,
        )


class Streams:
    """All running requests."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._in_flight: dict[str, int] = {}
        self.num_finished = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def open(self, request_id: str, client: bytes, node: str, credit: int) -> None:
        """A request was routed to `node`. The id must be new."""
        assert request_id not in self._streams, f"request {request_id} is already running"
        self._streams[request_id] = Stream(request_id, client, node, max(1, credit))
        self._in_flight[node] = self._in_flight.get(node, 0) + 1

    def in_flight(self, node: str) -> int:
        """Requests routed to that node that have not ended."""
        return self._in_flight.get(node, 0)

    def node_of(self, request_id: str) -> str | None:
        stream = self._streams.get(request_id)
        return stream.node if stream else None

    def tokens(self, message: Tokens) -> Delivery | None:
        """Tokens came from the node: what goes to the client now. None if nothing, or if the request is unknown."""
        stream = self._streams.get(message.request_id)
        if stream is None:
            return None
        stream.waiting.append(message)
        return self._release(stream)

    def grant(self, request_id: str, count: int) -> Delivery | None:
        """The client takes `count` more messages."""
        stream = self._streams.get(request_id)
        if stream is None:
            return None
        stream.credit += count
        return self._release(stream)

    def end(self, message: Finished | Failed) -> list[Delivery]:
        """The request ended: what waits goes first, then the end, whatever the window says (two messages at most)."""
        stream = self._streams.pop(message.request_id, None)
        if stream is None:
            return []
        self._in_flight[stream.node] -= 1
        if isinstance(message, Failed):
            self.num_failed += 1
        else:
            self.num_finished += 1
        deliveries = [Delivery(stream.client, stream.merged())] if stream.waiting else []
        return [*deliveries, Delivery(stream.client, message)]

    def of_node(self, node: str) -> list[str]:
        """Requests that run at that node."""
        return [stream.request_id for stream in self._streams.values() if stream.node == node]

    def of_client(self, client: bytes) -> list[str]:
        """Requests that client waits for."""
        return [stream.request_id for stream in self._streams.values() if stream.client == client]

    def _release(self, stream: Stream) -> Delivery | None:
        if not stream.waiting or stream.credit < 1:
            return None
        stream.credit -= 1
        message = stream.merged() if len(stream.waiting) > 1 else stream.waiting[0]
        stream.waiting.clear()
        return Delivery(stream.client, message)
