import random
import socket as tcp
import struct
import threading
import zlib

import numpy
import pytest
import zmq

from edge_runtime.clock import SystemClock
from edge_runtime.errors import ConfigError, DeadlinePassed, PeerLost, ProtocolError, Refusal
from edge_runtime.protocol import (
    PROTOCOL_VERSION,
    Abort,
    ExpertReply,
    Hello,
    Refused,
    StatusQuery,
    Stop,
    Welcome,
    encode,
)
from edge_runtime.transport.endpoint import Channel, Sent, Server, Waker, wait_any
from tests.support.expert_echo import echo_process
from tests.support.messages import expert_call

SOON_S = 5.0  # one deadline for whatever must happen


@pytest.fixture
def server():
    with Server("127.0.0.1:0") as server:
        yield server


@pytest.fixture
def channel(server):
    with Channel(server.address, name="n1") as channel:
        assert channel.wait_until_up(SOON_S)
        yield channel


@pytest.fixture
def raw(server):
    """A stranger's socket to the server."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(f"tcp://{server.address}")
        yield socket


def until(condition):
    """Look until it is true; how often does not matter, since the deadline is far."""
    clock, deadline = SystemClock(), SystemClock().now() + SOON_S
    while not condition():
        assert clock.now() < deadline, "it did not happen in time"


def test_a_message_and_its_tensors_arrive_and_so_does_the_reply(server, channel):
    message, tensors = expert_call()
    assert channel.send(message, call_id=7, epoch=3, ttl_s=0.5, tensors=tensors)
    peer, envelope = server.receive(SOON_S)
    assert (envelope.message, envelope.call_id, envelope.epoch, envelope.ttl_s) == (message, 7, 3, 0.5)
    assert all((a == b).all() for a, b in zip(envelope.tensors, tensors, strict=True))
    assert server.send(peer, ExpertReply(3), call_id=7, tensors=(envelope.tensors[0],))
    assert (channel.receive(SOON_S).tensors[0] == tensors[0]).all()


def test_large_tensors_may_go_without_a_copy(server, channel):
    rows = numpy.arange(300_000, dtype=numpy.float32).reshape(-1, 100)
    pairs = numpy.zeros(1, numpy.int32)
    message, _ = expert_call()
    assert channel.send(message, ttl_s=1.0, tensors=(rows, pairs, pairs), zero_copy=True)
    received = server.receive(SOON_S)[1].tensors[0]
    assert (received == rows).all()
    assert received.flags.aligned


def test_receiving_nothing_ends_at_the_deadline(server, channel):
    assert server.receive(0) is None
    assert server.receive(0.01) is None
    assert channel.receive(0.01) is None


def test_a_send_to_an_unknown_peer_is_reported_and_counted(server):
    sent = server.send(b"nobody", Stop())
    assert not sent
    assert sent is Sent.UNREACHABLE
    assert server.counters["send_unreachable"] == 1


def test_a_send_to_a_peer_that_left_is_reported(server, channel):
    channel.send(StatusQuery())
    peer, _ = server.receive(SOON_S)
    channel.close()
    until(lambda: server.receive(0.01) or not server.send(peer, Stop()))


def test_a_full_queue_is_reported_and_loses_nothing_that_was_taken():
    with Server("127.0.0.1:0", high_water=4) as server, Channel(server.address, high_water=4) as channel:
        assert channel.wait_until_up(SOON_S)
        channel.send(StatusQuery())
        peer, _ = server.receive(SOON_S)
        taken = 0
        while server.send(peer, Stop("x" * 60_000), call_id=taken):
            taken += 1
        assert server.send(peer, Stop()) is Sent.FULL
        assert server.counters["send_full"] == 2
        for call_id in range(taken):
            assert channel.receive(SOON_S).call_id == call_id
        assert channel.receive(0.05) is None


def test_a_channel_whose_peer_does_not_read_says_that_it_is_full():
    with Server("127.0.0.1:0", high_water=4) as server, Channel(server.address, high_water=4) as channel:
        assert channel.wait_until_up(SOON_S)
        taken = 0
        while sent := channel.send(Stop("x" * 60_000)):
            taken += 1
        assert sent is Sent.FULL
        assert all(server.receive(SOON_S) for _ in range(taken))


def test_nothing_is_queued_for_a_peer_that_is_not_there():
    with Channel("127.0.0.1:1", name="n9") as channel:
        assert channel.send(Stop()) is Sent.UNREACHABLE


@pytest.mark.parametrize(
    ("frames", "counter"),
    [
        ([b""], "bad_size"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "bad_magic"),
        ([b"", b"REQ socket"], "bad_size"),
        ([b"\x80\x04\x95."], "bad_size"),
        ([b"x"] * 500, "bad_frames"),
        ([b"EDGE" + struct.pack("<HI", PROTOCOL_VERSION, 0) + b"\x90"], "bad_crc"),
        ([b"EDGE" + struct.pack("<HI", PROTOCOL_VERSION, zlib.crc32(b"\x90")) + b"\x90"], "bad_header"),
        ([*encode(Stop()), b"tensor"], "bad_tensor"),
    ],
)
def test_garbage_is_dropped_and_counted_and_nobody_else_notices(server, channel, raw, frames, counter):
    raw.send_multipart(frames)
    until(lambda: server.receive(0.01) is None and server.counters[counter] == 1)
    assert server.bad_messages == 1
    channel.send(Abort("r"))
    assert server.receive(SOON_S)[1].message == Abort("r")


def test_a_flood_of_damaged_messages_changes_nothing_but_counters(server, channel, raw):
    seeded = random.Random(11)
    message, tensors = expert_call()
    whole = [bytes(frame) for frame in encode(message, ttl_s=1.0, tensors=tensors)]
    for _ in range(2000):
        frames = [bytearray(frame) for frame in whole]
        broken = seeded.choice(frames)
        if seeded.random() < 0.5:
            del broken[seeded.randrange(len(broken)) :]
        else:
            frames[0][seeded.randrange(len(frames[0]))] ^= seeded.randint(1, 255)
        raw.send_multipart(frames)
        assert server.receive(0) is None
    until(lambda: server.receive(0.01) is None and server.bad_messages == 2000)
    channel.send(Abort("r"))
    assert server.receive(SOON_S)[1].message == Abort("r")


def test_bytes_that_are_not_even_zeromq_do_not_disturb(server, channel):
    host, port = server.address.split(":")
    with tcp.create_connection((host, int(port)), timeout=SOON_S) as stranger:
        stranger.sendall(b"\xff" * 5000)
        channel.send(Abort("r"))
        assert server.receive(SOON_S)[1].message == Abort("r")


def test_a_frame_longer_than_allowed_costs_its_sender_the_connection_only():
    with Server("127.0.0.1:0", max_frame_bytes=10_000) as server, Channel(server.address) as other:
        with Channel(server.address, name="big") as big:
            assert big.wait_until_up(SOON_S)
            assert big.send(Stop("x" * 20_000))
            until(big.is_lost)
        assert other.wait_until_up(SOON_S)
        other.send(Stop("small"))
        assert server.receive(SOON_S)[1].message == Stop("small")


def test_a_peer_of_another_version_is_refused_with_both_versions(server, raw):
    frame = bytearray(encode(Stop())[0])
    frame[4:6] = struct.pack("<H", 9)
    raw.send(bytes(frame))
    until(lambda: server.receive(0.01) is None and server.counters["bad_version"] == 1)
    assert raw.poll(SOON_S * 1000)
    answer = raw.recv()
    assert f"speaks protocol {PROTOCOL_VERSION}, you 9".encode() in answer


def answer_once(server, make_answer):
    """A thread that answers one message."""

    def run():
        received = server.receive(SOON_S)
        assert received, "nothing came"
        make_answer(*received)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("call_id_kept", [True, False])
def test_a_refused_handshake_raises_the_refusal(server, channel, call_id_kept):
    refused = Refused("version", "n1 speaks protocol 1, you 2")
    thread = answer_once(
        server, lambda peer, envelope: server.send(peer, refused, call_id=envelope.call_id * call_id_kept)
    )
    with pytest.raises(Refusal, match="protocol 1, you 2"):
        channel.request(Hello("me"), Welcome, SOON_S)
    thread.join()


def test_a_request_gets_its_own_answer_and_not_an_older_one(server, channel):
    def reply(peer, envelope):
        server.send(peer, Welcome("old"), call_id=envelope.call_id - 1)
        server.send(peer, Welcome("new"), call_id=envelope.call_id)

    thread = answer_once(server, reply)
    assert channel.request(Hello("me"), Welcome, SOON_S).message.node == "new"
    thread.join()


def test_an_answer_of_another_kind_is_a_protocol_error(server, channel):
    thread = answer_once(server, lambda peer, envelope: server.send(peer, Stop(), call_id=envelope.call_id))
    with pytest.raises(ProtocolError, match="n1 at .* answered Hello with Stop"):
        channel.request(Hello("me"), Welcome, SOON_S)
    thread.join()


def test_a_request_nobody_answers_ends_at_its_deadline(channel):
    with pytest.raises(DeadlinePassed, match=r"n1 at .* did not answer Hello within 0\.05 s"):
        channel.request(Hello("me"), Welcome, 0.05)


def test_an_unreachable_peer_is_named_with_address_and_cause():
    with tcp.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with (
            Channel(f"127.0.0.1:{port}", name="n4") as channel,
            pytest.raises(DeadlinePassed, match=f"n4 at 127.0.0.1:{port} could not be reached .*refused"),
        ):
            channel.request(Hello("me"), Welcome, 0.1)


def test_a_channel_may_be_opened_before_its_server():
    with tcp.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Channel(address) as channel, Server(address) as server:
        assert channel.wait_until_up(SOON_S)
        assert channel.is_up()
        assert not channel.is_lost()
        channel.send(Stop("hello"))
        assert server.receive(SOON_S)[1].message == Stop("hello")


def test_a_lost_channel_stays_lost_until_it_reconnects_and_forgets_old_replies(server, channel):
    channel.send(StatusQuery())
    peer, _ = server.receive(SOON_S)
    assert server.send(peer, Stop("too late"))
    channel.reconnect()
    assert channel.wait_until_up(SOON_S)
    assert channel.receive(0.05) is None
    address = server.address
    server.close()
    until(channel.is_lost)
    assert not channel.send(Stop())
    with Server(address) as again:
        until(lambda: channel.is_up())
        assert channel.is_lost()
        channel.reconnect()
        assert channel.wait_until_up(SOON_S)
        assert not channel.is_lost()
        channel.send(Stop("back"))
        assert again.receive(SOON_S)[1].message == Stop("back")


def test_a_killed_process_is_noticed_while_a_request_waits():
    with echo_process() as (process, address), Channel(address, name="n2") as channel:
        channel.request(Hello("me"), Welcome, SOON_S)
        process.kill()
        with pytest.raises(PeerLost, match="n2 at .* is gone"):
            channel.request(Hello("me"), Welcome, SOON_S)


def test_a_port_in_use_is_told_with_port_and_host(server):
    host, port = server.address.split(":")
    with pytest.raises(ConfigError, match=f"port {port} of {host} is in use"):
        Server(server.address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999", "localhost:"])
def test_an_address_that_is_none_is_told(address):
    with pytest.raises(ConfigError, match="host:port"):
        Server(address)
    with pytest.raises(ConfigError, match="host:port"):
        Channel(address)


def test_an_address_of_another_machine_is_told():
    with pytest.raises(ConfigError, match="no keys"):
        Server("192.0.2.7:5551")


def test_waiting_ends_when_any_source_has_something(server, channel):
    waker = Waker()
    try:
        wait_any([server, channel, waker], 0)  # the channel tells that it came up
        assert wait_any([server, channel, waker], 0) == []
        channel.send(StatusQuery())
        assert wait_any([server, channel, waker], SOON_S) == [server]
        peer, _ = server.receive(0)
        threading.Thread(target=waker.wake).start()
        assert wait_any([server, channel, waker], SOON_S) == [waker]
        waker.clear()
        assert wait_any([server, channel, waker], 0) == []
        server.send(peer, Stop())
        assert wait_any([channel, waker], SOON_S) == [channel]
    finally:
        waker.close()


def test_waiting_ends_when_a_connection_goes_down(server, channel):
    wait_any([channel], 0)
    server.close()
    assert wait_any([channel], SOON_S) == [channel]
    assert channel.is_lost()
    wait_any([channel], 0.05)  # the next wait is not ended by old news for ever
    assert wait_any([channel], 0) == []


def test_waking_many_times_never_blocks():
    waker = Waker()
    try:
        for _ in range(100_000):
            waker.wake()
        assert wait_any([waker], 0) == [waker]
        until(lambda: waker.clear() or not wait_any([waker], 0))
    finally:
        waker.close()
