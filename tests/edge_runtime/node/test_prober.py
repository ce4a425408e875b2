"""Probing over real sockets: an expert service answers, whoever does not is left out, and nobody is kept waiting."""

import queue
from collections.abc import Iterator

import numpy as np
import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.errors import Refusal
from edge_runtime.node.expert_service import ExpertService
from edge_runtime.node.prober import LinkProber
from edge_runtime.protocol import Hello, PeerAddress, Probe, Probed, Welcome
from edge_runtime.transport.endpoint import Channel, Server

CLOCK = SystemClock()
SOON_S = 20.0


@pytest.fixture
def service() -> Iterator[Server]:
    server = Server("127.0.0.1:0")
    thread = ExpertService(server, Hello(node="b", model_hash="m"), CLOCK, lambda: None)
    thread.start()
    yield server
    thread.stop()
    thread.join(SOON_S)
    assert thread.fault is None
    server.close()


def test_peers_that_answer_are_measured_and_the_others_left_out(service: Server) -> None:
    done: queue.SimpleQueue[LinkProber] = queue.SimpleQueue()
    own = PeerAddress("a", service.address)
    gone = PeerAddress("gone", "127.0.0.1:9")
    prober = LinkProber(
        own, [PeerAddress("b", service.address), gone], Hello(node="a", model_hash="m"), None, CLOCK, done.put
    )
    prober.start()
    assert done.get(timeout=SOON_S) is prober
    prober.join(SOON_S)
    assert prober.links.keys() == {"b"}
    assert 0 < prober.links["b"].small_s < SOON_S and 0 < prober.links["b"].large_s < SOON_S
    assert prober.call is not None and min(prober.call[:2]) > 0 and prober.call.large_s >= 0


def test_a_probe_comes_back_as_it_was_and_only_to_those_who_greeted(service: Server) -> None:
    numbers = np.arange(5, dtype=np.float32)
    with Channel(service.address) as channel:
        with pytest.raises(Refusal, match="takes no Probe"):
            channel.request(Probe(), Probed, SOON_S, tensors=(numbers,))
        channel.request(Hello(node="a", model_hash="m"), Welcome, SOON_S)
        answer = channel.request(Probe(), Probed, SOON_S, tensors=(numbers,))
        assert np.array_equal(answer.tensors[0], numbers)
