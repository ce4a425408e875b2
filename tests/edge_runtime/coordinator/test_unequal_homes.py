"""A coordinator whose homes turn out to be of unequal speed; nodes and clients are driven by hand."""

from contextlib import ExitStack

from edge_runtime.protocol import Accepted, Heartbeat, HeartbeatReply, NodeReport, PeersChanged
from tests.support.coordinators import CLOCK, SOON_S, FakeClient, FakeNode, cluster, footprint, running
from topology.speeds import LinkSpeed, NodeSpeed

FAST = NodeSpeed(memory_bytes_per_s=8e9, flops=2e10)
SLOW = NodeSpeed(memory_bytes_per_s=2e9, flops=5e9)


def test_a_home_that_measured_itself_fast_gets_more_requests():
    homes = cluster("a", "b", memory_ratio=2.0)
    with running(homes, footprint(width=64, top_k=2)) as daemon, ExitStack() as stack:
        nodes = [stack.enter_context(FakeNode(daemon.address, name)).join() for name in ("a", "b")]
        client = stack.enter_context(FakeClient(daemon.address))
        link = {"b": LinkSpeed(rtt_s=0.002, bandwidth_bps=1e8)}
        for node, speed in zip(nodes, (FAST, SLOW), strict=True):
            node.send(Heartbeat(1, NodeReport(state="ready", speed=speed, links=link)))
            node.next(HeartbeatReply, skip=(PeersChanged,))
        until = CLOCK.now() + SOON_S
        while not (speeds := client.status()["routing"]["speeds"]) or speeds["a"] == speeds["b"]:
            assert CLOCK.now() < until, f"the speeds are {speeds}"
            CLOCK.sleep(0.05)
        assert speeds["a"] > 1 > speeds["b"]
        chosen = []
        for number in range(5):
            client.submit(f"r{number}")
            chosen.append(client.next(Accepted).node)
        assert chosen.count("a") == 4, "four times as fast"
