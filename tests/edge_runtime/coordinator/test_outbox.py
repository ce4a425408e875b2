"""What waits for a full queue arrives once, in order; a client that is gone takes what waited with it."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.coordinator.outbox import Outbox
from edge_runtime.protocol import Credit, Message
from edge_runtime.transport.interface import Sent


class Queues:
    """A queue of limited length per client; a client may go away."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.waiting: dict[bytes, list] = defaultdict(list)
        self.read: dict[bytes, list] = defaultdict(list)
        self.gone: set[bytes] = set()

    def send(self, client: bytes, message: Message, call_id: int) -> Sent:
        if client in self.gone:
            return Sent.UNREACHABLE
        if len(self.waiting[client]) >= self.room:
            return Sent.FULL
        self.waiting[client].append((message, call_id))
        return Sent.OK

    def read_some(self, client: bytes, count: int) -> None:
        self.read[client] += self.waiting[client][:count]
        del self.waiting[client][:count]


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.sampled_from("sssrrf")), max_size=60))
def test_every_message_arrives_once_and_in_order(actions):
    queues = Queues(2)
    outbox = Outbox(queues.send)
    given_to: dict[bytes, list] = defaultdict(list)
    for number, (client, action) in enumerate(actions):
        if action == "s":
            assert outbox.send(client, Credit("r", number), number)
            given_to[client].append((Credit("r", number), number))
        elif action == "r":
            queues.read_some(client, 1)
        else:
            assert outbox.flush() == []
    while len(outbox):
        for client in (b"a", b"b"):
            queues.read_some(client, 2)
        assert outbox.flush() == []
    for client in (b"a", b"b"):
        queues.read_some(client, 2)
        assert queues.read[client] == given_to[client]


def test_a_client_that_is_gone_is_told_at_once_or_when_its_turn_comes():
    queues = Queues(1)
    outbox = Outbox(queues.send)
    assert outbox.send(b"a", Credit("r", 1)) and outbox.send(b"a", Credit("r", 2))
    queues.gone = {b"a", b"b"}
    assert not outbox.send(b"b", Credit("r", 1))
    assert outbox.flush() == [b"a"] and len(outbox) == 0
    assert not outbox.send(b"a", Credit("r", 3))


def test_what_waits_for_a_forgotten_client_is_dropped():
    queues = Queues(0)
    outbox = Outbox(queues.send)
    assert outbox.send(b"a", Credit("r", 1)) and len(outbox) == 1
    outbox.forget(b"a")
    outbox.forget(b"nobody")
    assert len(outbox) == 0 and outbox.flush() == []
