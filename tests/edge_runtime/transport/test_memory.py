import pytest

from edge_runtime.clock import ManualClock
from edge_runtime.errors import ConfigError, DeadlinePassed, PeerLost
from edge_runtime.protocol import Hello, StatusQuery, Stop, Welcome, encode
from edge_runtime.transport.interface import Sent
from edge_runtime.transport.memory import MemoryNetwork
from edge_runtime.transport.shaper import Link


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def network(clock):
    return MemoryNetwork(clock, seed=3)


def welcome(server):
    server.answer = lambda peer, envelope: server.send(peer, Welcome("n1"), call_id=envelope.call_id)
    return server


def test_a_message_arrives_after_the_delay_and_not_before(network, clock):
    network.shape("n1", delay_s=0.25)
    server, channel = network.server("n1"), network.channel("n1")
    assert channel.send(Stop("x"))
    assert server.receive(0.2) is None
    assert clock.now() == pytest.approx(0.2)
    assert server.receive(9.0)[1].message == Stop("x")
    assert clock.now() == pytest.approx(0.25)


def test_a_request_takes_one_round_trip(network, clock):
    network.shape("n1", delay_s=0.1)
    welcome(network.server("n1"))
    assert network.channel("n1").request(Hello("me"), Welcome, 1.0).message.node == "n1"
    assert clock.now() == pytest.approx(0.2)


def test_a_request_over_a_dead_link_ends_at_its_deadline(network, clock):
    network.shape("n1", loss=1.0)
    welcome(network.server("n1"))
    with pytest.raises(DeadlinePassed):
        network.channel("n1", name="n1").request(Hello("me"), Welcome, 0.5)
    assert clock.now() == pytest.approx(0.5)


def test_a_peer_that_is_not_there_or_cut_off_is_told_apart(network):
    with pytest.raises(DeadlinePassed, match="nobody listens"):
        network.channel("n1").request(Hello("me"), Welcome, 0.5)
    network.server("n1")
    network.shape("n1", is_cut=True)
    with pytest.raises(DeadlinePassed, match="link is cut"):
        network.channel("n1").request(Hello("me"), Welcome, 0.5)


def test_a_cut_ends_connections_and_healing_needs_a_reconnect(network):
    server, channel = welcome(network.server("n1")), network.channel("n1", name="n1")
    channel.request(Hello("me"), Welcome, 1.0)
    network.shape("n1", is_cut=True)
    assert channel.is_lost()
    assert channel.send(Stop()) is Sent.UNREACHABLE
    network.shape("n1", is_cut=False)
    with pytest.raises(PeerLost, match="n1 is gone"):
        channel.request(Hello("me"), Welcome, 0.1)
    channel.reconnect()
    assert channel.request(Hello("me"), Welcome, 1.0)
    assert server.counters["received"] == 2


def test_a_cut_in_the_middle_of_a_request_is_peer_lost(network):
    server, channel = network.server("n1"), network.channel("n1")
    server.answer = lambda *_: network.shape("n1", is_cut=True)
    with pytest.raises(PeerLost):
        channel.request(Hello("me"), Welcome, 60.0)


def test_old_replies_do_not_reach_a_new_connection(network):
    network.shape("n1", delay_s=0.1)
    welcome(network.server("n1"))
    channel = network.channel("n1")
    channel.send(Hello("me"))
    channel.reconnect()
    assert channel.receive(1.0) is None


def test_jitter_reorders_and_the_same_seed_reorders_alike():
    def orders(seed):
        network = MemoryNetwork(ManualClock(), seed=seed, link=Link(delay_s=0.1, jitter_s=0.1))
        server, channel = network.server("n1"), network.channel("n1")
        for call_id in range(20):
            channel.send(StatusQuery(), call_id=call_id)
        return [server.receive(1.0)[1].call_id for _ in range(20)]

    assert orders(1) == orders(1) != orders(2)
    assert sorted(orders(1)) == list(range(20)) != orders(1)


def test_loss_is_as_frequent_as_asked_and_counted(network):
    network.shape("n1", loss=0.25)
    server, channel = network.server("n1"), network.channel("n1")
    came = 0
    for _ in range(1000):
        channel.send(StatusQuery())
        came += server.receive(0) is not None
    assert came == 1000 - network.num_lost
    assert 200 < network.num_lost < 300


def test_a_full_queue_is_reported_in_both_directions(network):
    server, channel = network.server("n1", high_water=3), network.channel("n1", high_water=3)
    assert [bool(channel.send(StatusQuery())) for _ in range(4)] == [True, True, True, False]
    peer, _ = server.receive(0)
    assert channel.send(StatusQuery())
    assert [bool(server.send(peer, Stop())) for _ in range(4)] == [True, True, True, False]
    assert server.counters["send_full"] == 1
    assert channel.receive(0)
    assert server.send(peer, Stop())


def test_an_unknown_peer_is_reported(network):
    assert network.server("n1").send(b"nobody", Stop()) is Sent.UNREACHABLE


def test_an_address_can_be_had_once_and_again_after_closing(network):
    with network.server("n1"), pytest.raises(ConfigError, match="in use"):
        network.server("n1")
    network.server("n1")


def test_a_server_that_closes_loses_its_peers(network):
    server, channel = network.server("n1"), network.channel("n1")
    server.close()
    assert channel.is_lost()


def test_messages_wait_for_one_another_where_the_link_is_slow(network, clock):
    network.shape("n1", delay_s=0.5, rate_bps=8000.0)
    server, channel = network.server("n1"), network.channel("n1")
    num_bytes = sum(len(frame) for frame in encode(Stop("x" * 900)))
    for _ in range(3):
        channel.send(Stop("x" * 900))
    for turn in range(3):
        assert server.receive(10.0)
        assert clock.now() == pytest.approx(0.5 + (turn + 1) * num_bytes / 1000)
