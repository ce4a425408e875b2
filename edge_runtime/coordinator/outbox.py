"""Messages for clients whose queue is full at the moment: kept in order, sent when there is room again.

A client's window bounds how many there can be. Knows no socket: whoever sends is passed in.
"""

from collections import deque
from collections.abc import Callable

from edge_runtime.protocol import Message
from edge_runtime.transport.interface import Sent

Send = Callable[[bytes, Message, int], Sent]
"""(client, message, call id) -> what became of it; never waits."""


class Outbox:
    """One queue per client, made when it is needed."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: dict[bytes, deque[tuple[Message, int]]] = {}

    def __len__(self) -> int:
        """Messages that wait."""
        return sum(map(len, self._waiting.values()))

    def send(self, client: bytes, message: Message, call_id: int = 0) -> bool:
        """Send, or keep behind what waits already. False: the client is gone, and what waited with it."""
        queue = self._waiting.get(client)
        if queue is not None:
            queue.append((message, call_id))
            return True
        sent = self._send(client, message, call_id)
        if sent is Sent.FULL:
            self._waiting[client] = deque([(message, call_id)])
        return sent is not Sent.UNREACHABLE

    def flush(self) -> list[bytes]:
        """Send what has room now. Returns the clients that turned out to be gone."""
        gone = []
        for client, queue in list(self._waiting.items()):
            sent = Sent.OK
            while queue and sent is Sent.OK:
                sent = self._send(client, *queue[0])
                if sent is Sent.OK:
                    queue.popleft()
            if sent is Sent.UNREACHABLE:
                gone.append(client)
            if not queue or sent is Sent.UNREACHABLE:
                del self._waiting[client]
        return gone

    def forget(self, client: bytes) -> None:
        """The client is gone."""
        self._waiting.pop(client, None)
