"""What a node knows of itself: which links are due, what they are without the cost of a call, how calls refine them."""

import pytest

from edge_runtime.node.gauge import AGAIN_S, RETRY_S, Gauge, peers_to_probe
from edge_runtime.node.prober import LARGE_BITS, Call, Took, link_of
from edge_runtime.node.remote import PeerTraffic
from topology.speeds import LinkSpeed, NodeSpeed

CALL = Call(0.0002, 0.0003, 0.0001)
LARGE_S = LARGE_BITS / 2e8  # of 200 Mbit/s


def probed(rtt_s: float = 0.0052) -> Gauge:
    gauge = Gauge()
    gauge.tried(NodeSpeed())
    gauge.probed({"b": Took(rtt_s, rtt_s + CALL.large_s + LARGE_S)}, CALL, 0.0)
    return gauge


def test_a_link_is_what_is_left_without_the_call_itself() -> None:
    speed, links = probed().report()
    assert links["b"] == LinkSpeed(rtt_s=pytest.approx(0.005), bandwidth_bps=pytest.approx(2e8))
    assert speed is not None and speed.call_overhead_s == CALL.seconds
    assert speed.call_work_s == speed.serve_work_s == CALL.work_s / 2
    assert probed(0.0001).report()[1]["b"].rtt_s == 0.0, "quicker than to oneself"


def test_links_are_probed_once_then_again_after_a_while_when_nothing_runs() -> None:
    gauge = Gauge()
    assert gauge.due(["b", "c"], 0.0, is_idle=False) == ["b", "c"]
    assert gauge.due(["b", "c"], 1.0, is_idle=True) == [], "it is being asked"
    gauge.probed({"b": Took(0.001, 0.01)}, CALL, 1.0)
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


@pytest.mark.parametrize("extra_s", [-0.002, 0.0, 0.00004])
def test_a_rate_that_a_large_message_does_not_show_is_a_bound(extra_s) -> None:
    """64 KB cost 100 us without a link: one that adds less than half of that cannot be seen for noise."""
    link = link_of(Took(0.005, 0.005 + CALL.large_s + extra_s), CALL)
    assert link.rate_is_bound and link.bandwidth_bps == pytest.approx(LARGE_BITS / 50e-6)


def test_a_rate_that_shows_is_told_without_what_a_message_costs_anyway() -> None:
    link = link_of(Took(0.005, 0.005 + CALL.large_s + LARGE_BITS / 1e10), CALL)
    assert not link.rate_is_bound and link.bandwidth_bps == pytest.approx(1e10)
