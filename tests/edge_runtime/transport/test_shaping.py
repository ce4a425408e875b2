"""Shaped links over real sockets.

Never early is exact and asked of every attempt; how late is allowed is said where it is asked, of the best attempt, since
the machine may be busy with others.
"""

import threading

import numpy
import pytest

from edge_runtime.clock import ManualClock, SystemClock
from edge_runtime.errors import ConfigError, DeadlinePassed, PeerLost, Refusal
from edge_runtime.protocol import (
    ExpertReply,
    Heartbeat,
    Hello,
    LinkShaped,
    Refused,
    ShapeLink,
    StatusQuery,
    Stop,
    Welcome,
    encode,
)
from edge_runtime.transport import shaping as shapings
from edge_runtime.transport.endpoint import Channel, Sent, Server, wait_any
from edge_runtime.transport.shaper import MAX_WAITING, Link, Shaper
from edge_runtime.transport.shaping import Shaping, cluster_shaper
from tests.support.messages import expert_call
from topology.cluster import MIB, Cluster, Node
from topology.cluster import Link as FileLink

SOON_S = 5.0
CLOCK = SystemClock()


class Ends:
    """A server called n5 and channels to it from nodes of other names, each with its own idea of the links."""

    def __init__(self, clock=CLOCK, **links):
        """links: by source, of both directions; the others are perfect."""
        self.clock = clock
        self.links = links
        self.shapings = {}
        self.server = Server("127.0.0.1:0", shaping=self.shaping("n5"), clock=clock)
        self.open = [self.server]

    def shaping(self, own):
        if own not in self.shapings:
            link_of = lambda a, b: self.links.get(a) or self.links.get(b) or Link()  # noqa: E731
            self.shapings[own] = Shaping(Shaper(own, link_of), self.clock)
        return self.shapings[own]

    def channel(self, own="n1"):
        channel = Channel(self.server.address, name="n5", shaping=self.shaping(own), clock=self.clock)
        self.open.append(channel)
        assert channel.wait_until_up(SOON_S)
        return channel

    def change(self, source, target, **change):
        """What `testbed link` tells both ends."""
        for shaping in self.shapings.values():
            shaping.change(ShapeLink(source, target, **change))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in reversed(self.open):
            each.close()


ATTEMPTS = 100


def best(attempt, good):
    """The lowest of what up to 100 attempts give; ends at the first that is at most `good`."""
    lowest = float("inf")
    for _ in range(ATTEMPTS):
        lowest = min(lowest, attempt())
        if lowest <= good:
            break
    return lowest


def megabyte():
    rows, pairs = numpy.zeros((1000, 250), numpy.float32), numpy.zeros(1, numpy.int32)
    return expert_call()[0], (rows, pairs, pairs)


def test_a_megabyte_at_100_mbit_takes_as_long_as_on_the_wire():
    """Ideal: 80 ms on the wire and 5 ms of delay. At best 1 ms more."""
    message, tensors = megabyte()
    num_bytes = sum(memoryview(frame).nbytes for frame in encode(message, tensors=tensors))
    ideal_s = num_bytes * 8 / 100e6 + 0.005
    with Ends(n1=Link(delay_s=0.005, rate_bps=100e6)) as ends:
        channel = ends.channel()

        def late_s():
            began = CLOCK.now()
            assert channel.send(message, tensors=tensors, ttl_s=1.0)
            assert ends.server.receive(SOON_S)
            late_s = CLOCK.now() - began - ideal_s
            assert late_s >= 0
            return late_s

        assert best(late_s, 0.001) <= 0.001


def test_a_small_round_trip_takes_two_delays():
    """Ideal: 4 ms. At best 1 ms more: two threads share one interpreter here."""
    with Ends(n1=Link(delay_s=0.002)) as ends:
        channel = ends.channel()
        stop = threading.Event()

        def answer():
            while not stop.is_set():
                if received := ends.server.receive(0.02):
                    ends.server.send(received[0], Welcome("n5"), call_id=received[1].call_id)

        def late_s():
            began = CLOCK.now()
            channel.request(Hello("n1"), Welcome, SOON_S)
            late_s = CLOCK.now() - began - 0.004
            assert late_s >= 0
            return late_s

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            assert best(late_s, 0.001) <= 0.001
        finally:
            stop.set()
            thread.join()


def test_many_messages_come_at_the_rate_of_the_link():
    """10 MB at 200 Mbit/s: within 3 percent of the rate, and never above it."""
    rows = numpy.zeros((100, 250), numpy.float32)
    with Ends(n1=Link(delay_s=0.001, rate_bps=200e6)) as ends:
        channel = ends.channel()

        def missing_share():
            num_bytes, began = 0, CLOCK.now()
            for _ in range(100):
                frames = encode(ExpertReply(0), tensors=(rows,))
                num_bytes += sum(memoryview(frame).nbytes for frame in frames)
                assert channel.send_frames(frames)
            for _ in range(100):
                assert ends.server.receive(SOON_S)
            missing_share = 1 - num_bytes * 8 / (CLOCK.now() - began - 0.001) / 200e6
            assert missing_share >= 0
            return missing_share

        assert best(missing_share, 0.03) <= 0.03


def test_jitter_and_losses_keep_the_order():
    with Ends(n1=Link(delay_s=0.001, jitter_s=0.005, loss=0.05)) as ends:
        channel = ends.channel()
        for call_id in range(100):
            assert channel.send(StatusQuery(), call_id=call_id)
        assert [ends.server.receive(SOON_S)[1].call_id for _ in range(100)] == list(range(100))


def test_a_message_that_waits_holds_up_no_other_peer():
    with Ends(n1=Link(delay_s=3600.0)) as ends:
        slow, quick = ends.channel("n1"), ends.channel("n2")
        assert slow.send(Stop("later"))
        assert ends.server.receive(0.02) is None
        for call_id in range(50):
            assert quick.send(StatusQuery(), call_id=call_id)
            assert ends.server.receive(SOON_S)[1].call_id == call_id


def test_a_cut_delivers_nothing_and_heals():
    with Ends() as ends:
        channel = ends.channel()
        channel.send(Stop("before"))
        assert ends.server.receive(SOON_S)[1].message == Stop("before")
        ends.change("n1", "n5", cut_s=0.0)
        assert channel.send(Stop("in the cut"))
        assert ends.server.receive(0.03) is None
        assert ends.channel("n2").send(Stop("of another"))
        assert ends.server.receive(SOON_S)[1].message == Stop("of another")
        ends.change("n1", "n5", reset=True)
        assert ends.server.receive(SOON_S)[1].message == Stop("in the cut")


def test_a_timed_cut_heals_by_itself():
    """Never before its time; at best 1 ms after it."""
    with Ends() as ends:
        channel = ends.channel()

        def late_s():
            began = CLOCK.now()
            ends.change("n1", "n5", cut_s=0.03)
            assert channel.send(Stop())
            assert ends.server.receive(SOON_S)
            late_s = CLOCK.now() - began - 0.03
            assert late_s >= 0
            return late_s

        assert best(late_s, 0.001) <= 0.001


def test_a_cut_of_one_direction_lets_the_other_pass():
    with Ends() as ends:
        channel = ends.channel()
        channel.send(Stop())
        peer, _ = ends.server.receive(SOON_S)
        ends.change("n1", "n5", cut_s=0.0)
        assert ends.server.send(peer, Stop("back"))
        assert channel.receive(SOON_S).message == Stop("back")
        ends.change("n5", "n1", cut_s=0.0)
        assert ends.server.send(peer, Stop("never"))
        assert channel.receive(0.02) is None


def test_a_long_cut_ends_the_connection_and_a_new_one_comes_up_when_it_is_over():
    clock = ManualClock(100.0)
    with Ends(clock) as ends:
        channel = ends.channel()
        channel.send(Stop("before"))
        peer = until(lambda: ends.server.receive(0))[0]
        clock.advance(1.0)
        ends.change("n1", "n5", cut_s=30.0)
        assert channel.send(Stop("lost"))
        until(lambda: ends.server.receive(0) or ends.server._shaped.held)
        assert not channel.is_lost()
        clock.advance(7.0)
        assert channel.is_lost()
        assert channel.send(Stop()) is Sent.UNREACHABLE
        assert ends.server.send(peer, Stop()) is Sent.UNREACHABLE
        with pytest.raises(PeerLost):
            channel.request(Hello("n1"), Welcome, 1.0)
        channel.reconnect()
        assert not channel.is_lost()
        assert not channel.is_up()
        with pytest.raises(DeadlinePassed, match="emulated link is cut"):
            channel.request(Hello("n1"), Welcome, 1.0)
        clock.advance(30.0)
        until(channel.is_up)
        assert ends.server.receive(0) is None
        assert channel.send(Stop("after"))
        assert until(lambda: ends.server.receive(0))[1].message == Stop("after")


def until(found):
    """The first true answer; how often is asked does not matter, since the deadline is far."""
    deadline = CLOCK.now() + SOON_S
    while not (answer := found()):
        assert CLOCK.now() < deadline, "it did not happen in time"
    return answer


def test_a_link_on_which_much_waits_is_full():
    with Ends(n1=Link(delay_s=3600.0)) as ends:
        channel = ends.channel()
        taken = 0
        while sent := channel.send(StatusQuery()):
            taken += 1
            ends.server.receive(0)
        assert (sent, taken) == (Sent.FULL, MAX_WAITING)


def test_waiting_for_any_source_ends_when_what_is_held_may_be_seen():
    with Ends(n1=Link(delay_s=0.02)) as ends:
        channel = ends.channel()
        channel.send(Stop())
        until(lambda: ends.server.receive(0) or ends.server._shaped.held)
        began = CLOCK.now()
        assert wait_any([ends.server], SOON_S) == [ends.server]
        assert CLOCK.now() - began < 1.0
        assert ends.server.receive(0)[1].message == Stop()


def test_links_change_on_a_message_that_nobody_above_sees():
    with Ends() as ends, Channel(ends.server.address, name="n5") as person:
        stop = threading.Event()
        seen = []

        def serve():
            while not stop.is_set():
                if received := ends.server.receive(0.02):
                    seen.append(received)

        thread = threading.Thread(target=serve)
        thread.start()
        change = ShapeLink("n1", "n5", delay_s=0.01, rate_bps=1e7, loss=0.01, cut_s=60.0)
        answer = person.request(change, LinkShaped, SOON_S).message
        now_it_is = person.request(ShapeLink("n1", "n5", reset=True), LinkShaped, SOON_S).message
        stop.set()
        thread.join()
    assert (answer.delay_s, answer.rate_bps, answer.loss, answer.is_cut) == (0.01, 1e7, 0.01, True)
    assert answer.cut_s == pytest.approx(60.0, abs=SOON_S)
    assert now_it_is == LinkShaped("n1", "n5")
    assert seen == []


def test_a_process_that_does_not_shape_passes_the_message_on_and_it_is_refused():
    with Server("127.0.0.1:0") as server, Channel(server.address, name="n5") as person:

        def serve():
            peer, envelope = server.receive(SOON_S)
            assert isinstance(envelope.message, ShapeLink)
            server.send(peer, Refused("unexpected", "n5 takes no ShapeLink"), call_id=envelope.call_id)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Refusal, match="takes no ShapeLink"):
            person.request(ShapeLink("n1", "n5"), LinkShaped, SOON_S)
        thread.join()


def test_one_side_alone_that_shapes_disturbs_nobody():
    with Ends(n1=Link(delay_s=3600.0)) as ends:
        with (
            Server("127.0.0.1:0") as plain,
            Channel(plain.address, name="n5", shaping=ends.shaping("n1")) as channel,
        ):
            assert channel.wait_until_up(SOON_S)
            assert channel.send(Stop("at once"))
            peer, envelope = plain.receive(SOON_S)
            assert envelope.message == Stop("at once")
            assert plain.send(peer, Stop("back"))
            assert channel.receive(SOON_S).message == Stop("back")
        with Channel(ends.server.address, name="n5") as channel:
            channel.wait_until_up(SOON_S)
            channel.send(Stop("plain"))
            peer, envelope = ends.server.receive(SOON_S)
            assert envelope.message == Stop("plain")
            assert ends.server.send(peer, Stop("back"))
            assert channel.receive(SOON_S).message == Stop("back")


def file_of(*links, **changes):
    nodes = tuple(
        Node(name=name, address=f"127.0.0.1:{5601 + index}", memory_bytes=400 * MIB)
        for index, name in enumerate(("n1", "n2", "n5"))
    )
    return Cluster(**({"name": "c", "model": "m", "nodes": nodes, "links": links} | changes))


def test_the_links_of_a_topology_file_are_those_of_both_directions():
    shaper = cluster_shaper(file_of(FileLink("n5", "n1", 0.02, 1e7)), "n1")
    for pair in (("n1", "n5"), ("n5", "n1")):
        assert shaper.state(*pair).link == Link(delay_s=0.01, rate_bps=1e7)
    assert shaper.state("n1", "n2").link == Link(delay_s=0.0005, rate_bps=1e9)
    assert shaper.state("n1", "coordinator").link == Link()


def test_links_between_machines_are_not_shaped():
    with pytest.raises(ConfigError, match="one machine only, and coordinator is at 10"):
        cluster_shaper(file_of(coordinator="10.0.0.1:5550"), "n1")


def test_sockets_take_the_links_of_their_process(monkeypatch):
    monkeypatch.setattr(shapings, "_of_process", None)
    shapings.shape_this_process(file_of(FileLink("n1", "n5", 7200.0)), "n5", CLOCK)
    shaping = Shaping(cluster_shaper(file_of(FileLink("n1", "n5", 7200.0)), "n1"), CLOCK)
    with Server("127.0.0.1:0") as server, Channel(server.address, name="n5", shaping=shaping) as channel:
        assert channel.wait_until_up(SOON_S)
        assert channel.send(Heartbeat(1))
        until(lambda: server.receive(0) or server._shaped.held)
