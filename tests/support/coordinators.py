"""A coordinator in a thread, and nodes and clients that a test drives by hand over real sockets.

Every wait has one deadline. A node here says true things: it greets, takes its share, and sends what it is told to.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from edge_runtime.clock import SystemClock
from edge_runtime.coordinator.daemon import CoordinatorDaemon
from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.protocol import (
    Deploy,
    Deployed,
    Envelope,
    Finished,
    Generate,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Message,
    PeersChanged,
    StatusQuery,
    StatusReply,
    Submit,
    Tokens,
    Welcome,
)
from edge_runtime.transport.endpoint import Channel
from topology.cluster import MIB, Cluster, Node
from topology.costs import ModelFootprint
from topology.placement import plan_placement

SOON_S = 10.0
MODEL_HASH = "m" * 32
CLOCK = SystemClock()


def footprint(**changes: object) -> ModelFootprint:
    """Two layers of four experts of a MiB."""
    options = {
        "num_layers": 2,
        "moe_layers": (0, 1),
        "experts_per_layer": 4,
        "expert_bytes": {"as_stored": (MIB, MIB)},
        "embed_bytes": MIB,
        "head_bytes": 100,
        "layer_bytes": (MIB, MIB),
        "kv_bytes_per_token": (256, 256),
        "context_tokens": 512,
    }
    return ModelFootprint(**(options | changes))  # type: ignore[arg-type]


def cluster(*names: str, **changes: object) -> Cluster:
    """Nodes that all answer and hold experts, at addresses nobody listens on; the coordinator takes a free port."""
    nodes = tuple(
        Node(name=name, address=f"127.0.0.1:{5600 + i}", memory_bytes=400 * MIB)
        for i, name in enumerate(names)
    )
    options = {
        "name": "test",
        "model": "model",
        "nodes": nodes,
        "coordinator": "127.0.0.1:0",
        "lost_after_s": 60.0,
        "heartbeat_s": 20.0,
    }
    return Cluster(**(options | changes))  # type: ignore[arg-type]


@contextmanager
def running(
    cluster: Cluster,
    parts: ModelFootprint | None = None,
    *,
    homeless_s: float = SOON_S,
    keep: Callable[[Epochs], None] = lambda found: None,
) -> Iterator[CoordinatorDaemon]:
    """The coordinator of a cluster, until the block is left. A fault of its own fails the test."""
    parts = parts or footprint()
    faults: list[BaseException] = []
    daemon = CoordinatorDaemon(
        cluster,
        parts,
        plan_placement(cluster, parts),
        model_hash=MODEL_HASH,
        keys=None,
        clock=CLOCK,
        homeless_s=homeless_s,
        keep=keep,
    )

    def run() -> None:
        try:
            daemon.run()
        except BaseException as fault:
            faults.append(fault)
            raise

    thread = threading.Thread(target=run, name="coordinator")
    thread.start()
    try:
        yield daemon
    finally:
        daemon.stop()
        thread.join(SOON_S)
    assert not thread.is_alive() and not faults, f"the coordinator ended on {faults}"


class Talker:
    """A connection to the coordinator, driven by hand."""

    def __init__(self, address: str) -> None:
        self.channel = Channel(address, name="coordinator")
        assert self.channel.wait_until_up(SOON_S)

    def send(self, message: Message, call_id: int = 0) -> None:
        assert self.channel.send(message, call_id=call_id)

    def next(self, *expected: type[Message], skip: tuple[type[Message], ...] = ()) -> Message:
        """The next message, which must be of one of these types; those in `skip` are passed over."""
        until = CLOCK.now() + SOON_S
        while (left := until - CLOCK.now()) > 0:
            envelope: Envelope | None = self.channel.receive(left)
            if envelope is None or isinstance(envelope.message, skip):
                continue
            assert isinstance(envelope.message, expected), f"{envelope.message}, expected {expected}"
            return envelope.message
        raise AssertionError(f"none of {expected} came")

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeNode(Talker):
    """A node of a cluster."""

    def __init__(self, address: str, name: str, incarnation: str = "one", **identity: object) -> None:
        super().__init__(address)
        self.name = name
        self.hello = Hello(
            node=name,
            role="home",
            incarnation=incarnation,
            pid=4711,
            **({"model_hash": MODEL_HASH} | identity),
        )
        self.deploy: Deploy | None = None
        self.beats = 0

    def join(self) -> "FakeNode":
        """Greet, take the share, say that it is loaded, and hear that it serves."""
        self.send(self.hello)
        self.next(Welcome, skip=(PeersChanged,))
        deploy = self.next(Deploy)
        assert isinstance(deploy, Deploy)
        self.deploy = deploy
        self.send(Deployed(deploy.epoch, 1000))
        changed = self.next(PeersChanged)
        assert self.name in changed.alive
        return self

    def beat(self) -> None:
        """One heartbeat and its answer; what else is said meanwhile is passed over."""
        self.beats += 1
        self.send(Heartbeat(self.beats))
        assert self.next(HeartbeatReply, skip=(PeersChanged, Generate)).sequence == self.beats

    def request(self) -> Generate:
        """The next request that is routed here."""
        found = self.next(Generate, skip=(PeersChanged, HeartbeatReply))
        assert isinstance(found, Generate)
        return found

    def tell(self, request_id: str, first: int, count: int = 1) -> None:
        """`count` messages of one token each, whose texts are their numbers."""
        for index in range(first, first + count):
            self.send(Tokens(request_id, index, [index], f"{index} "))

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.send(Finished(request_id, "length", completion_tokens=num_tokens))


class FakeClient(Talker):
    """A client that reads only when the test says so."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.channel.request(Hello(node="client", role="client"), Welcome, SOON_S)

    def submit(self, request_id: str, **fields: object) -> None:
        self.send(Submit(request_id, **({"prompt": "Once"} | fields)))  # type: ignore[arg-type]

    def status(self) -> dict:
        """What `status` shows; whatever else comes meanwhile is dropped, so a client that awaits answers asks not."""
        reply = self.channel.request(StatusQuery(), StatusReply, SOON_S).message
        assert isinstance(reply, StatusReply)
        return reply.body
