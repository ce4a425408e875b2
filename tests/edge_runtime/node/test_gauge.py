"""What a node knows of itself: which links are due, what they are without the cost of a call, how calls refine them."""

import pytest

from edge_runtime.node.gauge import AGAIN_S, RETRY_S, Gauge, peers_to_probe
from edge_runtime.node.prober import LARGE_NUMBERS, SMALL_NUMBERS, Call, rate_bps
from edge_runtime.node.remote import PeerTraffic
from topology.speeds import LinkSpeed, NodeSpeed

CALL = Call(0.0002, 0.0003)


def probed(rtt_s: float = 0.0052) -> Gauge:
    gauge = Gauge()
    gauge.tried(NodeSpeed())
    gauge.probed({"b": rtt_s}, {"b": 2e8}, CALL, 0.0)
    return gauge


def test_a_link_is_what_is_left_without_the_call_itself() -> None:
    speed, links = probed().report()
    assert links["b"] == LinkSpeed(rtt_s=pytest.approx(0.005), bandwidth_bps=2e8)
    assert speed is not None and (speed.call_overhead_s, speed.call_work_s) == CALL
    assert probed(0.0001).report()[1]["b"].rtt_s == 0.0, "quicker than to oneself"


def test_links_are_probed_once_then_again_after_a_while_when_nothing_runs() -> None:
    gauge = Gauge()
    assert gauge.due(["b", "c"], 0.0, is_idle=False) == ["b", "c"]
    assert gauge.due(["b", "c"], 1.0, is_idle=True) == [], "it is being asked"
    gauge.probed({"b": 0.001}, {"b": 1e9}, CALL, 1.0)
    assert gauge.due(["b", "c"], RETRY_S, is_idle=False) == ["c"]
    assert gauge.due(["b"], 1.0 + AGAIN_S, is_idle=False) == [], "an answer is more urgent"
    assert gauge.due(["b"], 1.0 + AGAIN_S, is_idle=True) == ["b"]


def test_only_peers_that_are_called_and_serve_are_probed() -> None:
    assert peers_to_probe(["a", "b", "c"], {"a", "c", "d"}, own="a") == ["c"]


def test_the_quickest_calls_of_a_while_refine_a_link() -> None:
    gauge, traffic = probed(), {"b": PeerTraffic(calls=100, least_s=0.0102), "new": PeerTraffic(calls=50)}
    gauge.served(traffic)
    refined = gauge.report()[1]["b"].rtt_s
    assert 0.005 < refined < 0.01 and traffic["b"].least_s == float("inf")
    traffic["b"].calls, traffic["b"].least_s = 105, 9.0
    gauge.served(traffic)
    assert gauge.report()[1]["b"].rtt_s == refined, "five calls are too few"


def test_a_rate_comes_from_what_the_large_message_took_longer() -> None:
    bits = 2 * (LARGE_NUMBERS - SMALL_NUMBERS) * 32
    assert rate_bps(0.005, 0.005 + bits / 2e8) == pytest.approx(2e8)
    assert rate_bps(0.005, 0.004) > 1e9
