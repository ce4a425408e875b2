"""Processes that give weights away, as threads over real sockets: honest, lying, silent, or gone half-way.

A giver answers Hello and questions for weights, and changes what it answers as the test says.
"""

import collections
import threading
from collections.abc import Callable
from typing import Self

import numpy

from edge_runtime.clock import SystemClock
from edge_runtime.protocol import ChunkData, Hello, Message, Welcome
from edge_runtime.transport.endpoint import Server
from edge_runtime.weights.fetch import Address
from edge_runtime.weights.service import Reply, WeightsService
from edge_runtime.weights.stores import Store

CLOCK = SystemClock()
Change = Callable[[Reply, int], Reply | None]


def honest(reply: Reply, index: int) -> Reply | None:
    return reply


def garbage(reply: Reply, index: int) -> Reply | None:
    """Bytes of the right length and nothing else right about them."""
    if not isinstance(reply.message, ChunkData):
        return reply
    return reply._replace(tensors=(numpy.zeros_like(reply.tensors[0]) + 7,))


def short(reply: Reply, index: int) -> Reply | None:
    return reply._replace(tensors=(reply.tensors[0][:-1],)) if reply.tensors else reply


def silent_after(count: int) -> Change:
    """Answers all questions but those for chunks after the first `count`."""
    return lambda reply, index: reply if index <= count else None


class Giver:
    """One source. `chunks_sent` counts chunks; a giver that is `gone_after` so many closes its socket without a word.

    heard  what nodes said that are not questions: to play a coordinator, which tells them things with `tell`
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        change: Change = honest,
        gone_after: int | None = None,
        gives_digests: bool = False,
        rate_bps: float | None = None,
    ) -> None:
        self.chunks_sent = 0
        self.hello: Hello | None = None
        self.heard: list[Message] = []
        self._node: bytes | None = None
        self._to_tell: collections.deque[Message] = collections.deque()
        self._name = name
        self._model_hash = store.manifest.model_hash
        self._change = change
        self._gone_after = gone_after
        self._service = WeightsService(store, CLOCK, rate_bps, gives_digests=gives_digests)
        self._server = Server("127.0.0.1:0")
        self.address = Address(name, self._server.address)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"giver-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            received = self._server.receive(0.002 if self._service.is_busy else 0.05)
            if received is not None:
                peer, envelope = received
                if isinstance(envelope.message, Hello):
                    self.hello = envelope.message
                    if self.hello.role != "loader":
                        self._node = peer
                    welcome = Welcome(node=self._name, model_hash=self._model_hash)
                    self._server.send(peer, welcome, call_id=envelope.call_id)
                elif peer == self._node:
                    self.heard.append(envelope.message)
                else:
                    refused = self._service.offer(peer, envelope.call_id, envelope.message)
                    if refused is not None:
                        self._server.send(peer, refused, call_id=envelope.call_id)
            while self._to_tell and self._node is not None:
                assert self._server.send(self._node, self._to_tell.popleft())
            for reply in self._service.replies():
                if isinstance(reply.message, ChunkData):
                    if self.chunks_sent == self._gone_after:
                        self._stopping = True
                        break
                    self.chunks_sent += 1
                changed = self._change(reply, self.chunks_sent)
                if changed is not None:
                    self._server.send(
                        changed.peer, changed.message, call_id=changed.call_id, tensors=changed.tensors
                    )
        self._server.close()

    def tell(self, *messages: Message) -> None:
        """Send these to the node that greeted, as soon as it has."""
        self._to_tell.extend(messages)

    def close(self) -> None:
        self._stopping = True
        self._thread.join(10.0)
        self._service.stop()
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
