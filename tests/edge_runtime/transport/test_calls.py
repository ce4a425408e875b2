import os
import signal
from contextlib import ExitStack

import numpy
import pytest

from edge_runtime.clock import ManualClock, SystemClock
from edge_runtime.errors import DeadlinePassed, PeerLost, ProtocolError, Refusal
from edge_runtime.protocol import Envelope, ExpertReply, Hello, Refused, Welcome
from edge_runtime.transport.calls import PeerCalls
from edge_runtime.transport.endpoint import Channel
from edge_runtime.transport.memory import MemoryNetwork
from tests.support.expert_echo import answer, echo_process
from tests.support.messages import expert_call

CALL, TENSORS = expert_call()


class Peers:
    """Echo servers and channels to them on a memory network under a clock that moves only when waited on."""

    def __init__(self, num_peers=3, **link):
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock, seed=1)
        self.calls = PeerCalls(self.clock)
        self.names = [f"n{index}" for index in range(num_peers)]
        self.servers, self.channels = [], []
        for name in self.names:
            self.network.shape(name, **link)
            server = self.network.server(name)
            self.reply_with(server, answer)
            self.servers.append(server)
            self.channels.append(self.network.channel(name, name=name))

    def reply_with(self, server, make):
        def reply(peer, envelope):
            message, tensors = make(envelope)
            server.send(peer, message, call_id=envelope.call_id, tensors=tensors)

        server.answer = reply

    def send(self, ttl_s=1.0):
        count = len(self.channels)
        return self.calls.send(self.channels, [CALL] * count, [TENSORS] * count, epoch=1, ttl_s=ttl_s)

    def call(self, ttl_s=1.0):
        return self.calls.receive(self.send(ttl_s))


def test_all_peers_answer_in_order_after_one_round_trip():
    peers = Peers(delay_s=0.01)
    outcomes = peers.call()
    assert all((each.tensors[0] == TENSORS[0][TENSORS[1]] * 2).all() for each in outcomes)
    assert peers.clock.now() == pytest.approx(0.02)


def test_a_slow_peer_costs_the_deadline_once_and_the_others_nothing():
    peers = Peers()
    peers.network.shape("n0", delay_s=9.0)
    peers.network.shape("n1", delay_s=9.0)
    first, second, third = peers.call(ttl_s=0.3)
    assert isinstance(first, DeadlinePassed)
    assert isinstance(second, DeadlinePassed)
    assert isinstance(third, Envelope)
    assert peers.clock.now() == pytest.approx(0.3)
    assert peers.calls.counters["late"] == 2


def test_a_late_reply_is_not_taken_for_that_of_the_next_call():
    peers = Peers(num_peers=1, delay_s=0.4)
    assert isinstance(peers.call(ttl_s=0.5)[0], DeadlinePassed)
    peers.network.shape("n0", delay_s=0.45)
    (outcome,) = peers.call(ttl_s=2.0)
    assert isinstance(outcome, Envelope)
    assert peers.calls.counters["stale"] == 1


def test_late_replies_that_overtake_newer_ones_are_dropped():
    peers = Peers(delay_s=0.01, jitter_s=0.05)
    came = 0
    for _ in range(60):
        pending = peers.send(ttl_s=0.07)
        for outcome in peers.calls.receive(pending):
            if isinstance(outcome, Envelope):
                came += 1
                assert outcome.call_id == pending.call_id
    assert came + peers.calls.counters["late"] == 180
    assert came > 50
    assert peers.calls.counters["stale"] > 20


def test_a_cut_link_is_noticed_at_once_not_at_the_deadline():
    peers = Peers(delay_s=0.1)
    pending = peers.send(ttl_s=60.0)
    peers.network.shape("n1", is_cut=True)
    first, second, third = peers.calls.receive(pending)
    assert isinstance(second, PeerLost)
    assert isinstance(first, Envelope)
    assert isinstance(third, Envelope)
    assert peers.clock.now() < 0.5


def test_a_peer_that_is_lost_already_costs_no_wait():
    peers = Peers(num_peers=1)
    peers.network.shape("n0", is_cut=True)
    assert isinstance(peers.call(ttl_s=60.0)[0], PeerLost)
    assert peers.clock.now() == 0


def test_a_refusal_is_that_peers_outcome():
    peers = Peers(num_peers=2)
    peers.reply_with(
        peers.servers[0], lambda _: (Refused("not_resident", "n0 does not hold expert 5", 0.5), ())
    )
    refusal, reply = peers.call()
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_s) == ("not_resident", 0.5)
    assert isinstance(reply, Envelope)


def test_a_peer_that_sends_garbage_is_named():
    peers = Peers(num_peers=2)
    peers.servers[0].answer = lambda peer, _: peers.servers[0]._give(peer, [b"garbage"], False)
    bad, good = peers.call()
    assert isinstance(bad, ProtocolError)
    assert "n0" in str(bad)
    assert isinstance(good, Envelope)


def test_a_peer_that_does_not_keep_up_is_busy_not_silent():
    peers = Peers(num_peers=1)
    peers.servers[0].answer = None
    outcomes = [peers.send() for _ in range(300)]
    refusal = peers.calls.receive(outcomes[-1])[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "busy"


def test_lossy_links_lose_calls_and_mix_up_none():
    peers = Peers(delay_s=0.001, jitter_s=0.002, loss=0.2)
    came = 0
    for turn in range(200):
        call, tensors = expert_call(num_pairs=1 + turn % 5)
        pending = peers.calls.send(peers.channels, [call] * 3, [tensors] * 3, epoch=1, ttl_s=0.01)
        for outcome in peers.calls.receive(pending):
            if isinstance(outcome, Envelope):
                came += 1
                assert isinstance(outcome.message, ExpertReply)
                assert len(outcome.tensors[0]) == 1 + turn % 5
    assert 0.5 < came / 600 < 0.8


@pytest.fixture(scope="module")
def three_processes():
    with ExitStack() as stack:
        started = [stack.enter_context(echo_process()) for _ in range(3)]
        channels = [
            stack.enter_context(Channel(address, name=f"n{index}"))
            for index, (_, address) in enumerate(started)
        ]
        for channel in channels:
            channel.request(Hello("me"), Welcome, 20.0)
        yield [process for process, _ in started], channels


def test_over_sockets_all_answer_then_a_frozen_one_is_late_and_a_killed_one_is_lost_at_once(three_processes):
    processes, channels = three_processes
    calls, clock = PeerCalls(), SystemClock()

    def call(ttl_s):
        pending = calls.send(channels, [CALL] * 3, [TENSORS] * 3, epoch=1, ttl_s=ttl_s)
        return calls.receive(pending)

    expected = TENSORS[0][TENSORS[1]] * 2
    for _ in range(20):
        assert all(numpy.array_equal(each.tensors[0], expected) for each in call(5.0))

    os.kill(processes[1].pid, signal.SIGSTOP)
    started = clock.now()
    outcomes = call(0.1)
    assert [type(each) for each in outcomes] == [Envelope, DeadlinePassed, Envelope]
    assert 0.1 <= clock.now() - started < 2.0
    os.kill(processes[1].pid, signal.SIGCONT)
    assert all(isinstance(each, Envelope) for each in call(5.0))
    assert calls.counters["stale"] == 1

    os.kill(processes[1].pid, signal.SIGSTOP)
    pending = calls.send(channels, [CALL] * 3, [TENSORS] * 3, epoch=1, ttl_s=60.0)
    processes[1].kill()
    started = clock.now()
    outcomes = calls.receive(pending)
    assert [type(each) for each in outcomes] == [Envelope, PeerLost, Envelope]
    assert clock.now() - started < 5.0
    assert [type(each) for each in call(60.0)] == [Envelope, PeerLost, Envelope]
