"""Strangers on every port of a running cluster: nothing but counters changes."""

import json
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy
import psutil
import pytest
import zmq

from edge_runtime.protocol import PROTOCOL_VERSION, Deploy, ExpertCall, Hello, Message, Share, decode, encode
from tests.support.clusters import LocalCluster, wait_for

PROMPT = "The harbour master wrote in his book"
MAX_GROWTH_BYTES = 8 << 20
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)

Harm = Callable[[int], None]


def raw(*parts: bytes) -> Harm:
    """Bytes on a plain socket, which then closes."""

    def harm(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as peer:
            for part in parts:
                try:
                    peer.sendall(part)
                except ConnectionError:
                    return  # it has hung up already, as it should

    return harm


def messages(*all_frames: list[Any]) -> Harm:
    """Frames of somebody who speaks ZeroMQ properly."""

    def harm(port: int) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 2000)
            peer.connect(f"tcp://127.0.0.1:{port}")
            for frames in all_frames:
                peer.send_multipart(frames)

    return harm


def header(tag: str, body: bytes = b"\x80", described: Any = (), version: int = PROTOCOL_VERSION) -> bytes:
    packed = msgpack.packb((tag, 1, 1, None, described, body))
    return struct.pack("<4sHI", b"EDGE", version, zlib.crc32(packed)) + packed


def call(num_rows: int, width: int, rows: list[int], experts: list[int], layer: int = 0) -> list[Any]:
    tensors = (
        numpy.ones((num_rows, width), numpy.float32),
        numpy.array(rows, numpy.int32),
        numpy.array(experts, numpy.int32),
    )
    return [
        bytes(frame) for frame in encode(ExpertCall(layer), call_id=7, epoch=1, ttl_s=1.0, tensors=tensors)
    ]


def whole(message: Message) -> list[Any]:
    return [bytes(frame) for frame in encode(message, call_id=3)]


HELLO = whole(Hello(node="stranger", role="node"))
GOOD_CALL = call(1, 256, [0], [0])

HARMS: dict[str, Harm] = {
    "random bytes": raw(os.urandom(4096)),
    "half a greeting": raw(ZMTP_GREETING[:20]),
    "a greeting and random bytes": raw(ZMTP_GREETING, os.urandom(4096)),
    "a frame that claims 2^62 bytes": raw(
        ZMTP_GREETING, b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER", b"\x02" + b"\x40" + bytes(7)
    ),
    "an HTTP request": raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "random frames": messages(
        *[[os.urandom(size)] * count for size in (0, 1, 10, 3000) for count in (1, 2, 9)]
    ),
    "a hundred frames in one message": messages([b"x"] * 100),
    "every cut of a good message": messages(*[[HELLO[0][:size]] for size in range(0, len(HELLO[0]), 7)]),
    "another protocol version": messages([header("hello", version=PROTOCOL_VERSION + 1)]),
    "an unknown message": messages([header("pang")]),
    "a body that is no map": messages([header("hello", body=b"\xc1")]),
    "false lengths": messages(
        [header("hello", body=b"\xdf\xff\xff\xff\xff")], [header("submit", b"\xdd\x7f\xff\xff\xff")]
    ),
    "a call before a greeting": messages(GOOD_CALL),
    "absurd shapes": messages(
        HELLO,
        [
            header("expert_call", described=[["float32", [2**31, 2**31]], ["int32", [1]], ["int32", [1]]]),
            b"",
            b"",
            b"",
        ],
        [
            header("expert_call", described=[["float32", [-1, 4]], ["int32", [1]], ["int32", [1]]]),
            b"",
            b"",
            b"",
        ],
        [header("expert_call", described=[["object", [1]], None, 3]), b"", b"", b""],
        call(1, 255, [0], [0]),
        call(1, 256, [1], [0]),
        call(1, 256, [-1], [0]),
        call(1, 256, [0], [10**9]),
        call(1, 256, [0], [-5]),
        call(1, 256, [0], [0], layer=2**31 - 1),
        call(0, 256, [], []),
    ),
    "a message that only a coordinator may send": messages(HELLO, whole(Deploy(epoch=9, share=Share()))),
    "a greeting of another model": messages(whole(Hello(node="attic", role="node", model_hash="0" * 32))),
}


@pytest.fixture(scope="module")
def disturbed(eight_nodes: LocalCluster) -> Iterator[dict[str, Any]]:
    """All harms on all ports while an answer streams: before and after, and the answer with its undisturbed twin."""
    flags = ("--max-tokens", "200", "--ignore-eos")
    undisturbed = eight_nodes.answer(PROMPT, *flags)
    before = eight_nodes.status()
    stream = eight_nodes.start_command("submit", "--json", PROMPT, *flags)
    wait_for(lambda: eight_nodes.status()["requests"]["in_flight"], "the stream runs")
    harm_all_ports(eight_nodes)
    finished = stream.finish(deadline_s=60.0)
    wait_for(lambda: min(bad_frames(eight_nodes.status()).values()) > 10, "every counter rises")
    eight_nodes.wait_until_idle()
    after = eight_nodes.status()
    once = heap_bytes(after)
    harm_all_ports(eight_nodes)
    wait_for(
        lambda: all(
            count >= 2 * bad_frames(after)[name] - bad_frames(before)[name]
            for name, count in bad_frames(eight_nodes.status()).items()
        ),
        "every counter rises as far again",
    )
    yield {
        "undisturbed": undisturbed,
        "finished": finished,
        "before": before,
        "after": after,
        "heap_once": once,
        "heap_twice": heap_bytes(after),
    }


def harm_all_ports(cluster: LocalCluster) -> None:
    for port in cluster.ports().values():
        for harm in HARMS.values():
            harm(port)


def bad_frames(status: dict[str, Any]) -> dict[str, int]:
    return {"coordinator": status["coordinator"]["bad_frames"]} | {
        node["name"]: node["report"]["bad_frames"] for node in status["nodes"]
    }


def heap_bytes(status: dict[str, Any]) -> dict[str, int]:
    """Resident memory that is no file: which library pages a first call touches depends on the machine."""
    pids = {"coordinator": status["coordinator"]["pid"]} | {
        node["name"]: node["pid"] for node in status["nodes"]
    }
    used = {name: psutil.Process(pid).memory_info() for name, pid in pids.items()}
    return {name: memory.rss - memory.shared for name, memory in used.items()}


@pytest.mark.timeout(120)
def test_a_stream_does_not_notice_strangers(disturbed: dict[str, Any]) -> None:
    assert disturbed["finished"].exit_code == 0, disturbed["finished"]
    answer = json.loads(disturbed["finished"].stdout)
    assert answer["token_ids"] == disturbed["undisturbed"]["token_ids"]
    assert answer["text"] == disturbed["undisturbed"]["text"]


def test_what_is_no_message_is_counted_where_it_came(disturbed: dict[str, Any]) -> None:
    before, after = (bad_frames(disturbed[when]) for when in ("before", "after"))
    assert all(after[name] - before[name] > 10 for name in after)
    refused = [node["report"]["numbers"]["calls_refused"] for node in disturbed["after"]["nodes"]]
    assert min(refused) >= 6


def test_strangers_cost_no_memory(disturbed: dict[str, Any]) -> None:
    once, twice = disturbed["heap_once"], disturbed["heap_twice"]
    grown = {name: twice[name] - once[name] for name in twice}
    assert max(grown.values()) < MAX_GROWTH_BYTES, grown


def test_every_node_is_the_process_it_was_and_serves(
    disturbed: dict[str, Any], eight_nodes: LocalCluster
) -> None:
    assert disturbed["after"]["ready"]
    before, after = (
        [(node["name"], node["pid"], node["state"], node["experts"]) for node in disturbed[when]["nodes"]]
        for when in ("before", "after")
    )
    assert after == before
    again = eight_nodes.answer(PROMPT, "--max-tokens", "16")
    assert disturbed["undisturbed"]["text"].startswith(again["text"])


def test_a_peer_of_another_version_is_told_both_versions(eight_nodes: LocalCluster) -> None:
    for port in eight_nodes.ports().values():
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 0)
            peer.set(zmq.RCVTIMEO, 5000)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send_multipart([header("hello", version=77)])
            refused = decode(peer.recv_multipart()).message
        assert refused.reason == "version"
        assert "77" in refused.detail and str(PROTOCOL_VERSION) in refused.detail
