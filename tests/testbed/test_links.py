"""`edge-runtime testbed link` against servers that shape, and one that does not."""

import json
import math
import threading
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from edge_runtime.clock import SystemClock
from edge_runtime.errors import ClusterError, ConfigError
from edge_runtime.protocol import LinkShaped, Refused, ShapeLink
from edge_runtime.transport.endpoint import Server
from edge_runtime.transport.shaper import Link
from edge_runtime.transport.shaping import Shaping, cluster_shaper
from testbed.cli import testbed as commands
from testbed.links import change_links, describe, pairs_of, parse_share
from topology.cluster import MIB, Cluster, Node

CLOCK = SystemClock()
NAMES = ("coordinator", "n1", "n2", "n5")
PLANS = Cluster(
    name="c",
    model="m",
    coordinator="127.0.0.1:5550",
    nodes=tuple(Node(name=name, address="127.0.0.1:5551", memory_bytes=400 * MIB) for name in NAMES[1:]),
)


class Servers:
    """A cluster whose daemons do nothing but shape; those in `plain` refuse to."""

    def __init__(self, *plain):
        self.stop = threading.Event()
        self.shapings = {}
        addresses = {}
        self.threads = []
        for name in NAMES:
            if name not in plain:
                self.shapings[name] = Shaping(cluster_shaper(PLANS, name), CLOCK)
            server = Server("127.0.0.1:0", shaping=self.shapings.get(name))
            addresses[name] = server.address
            self.threads.append(threading.Thread(target=self.serve, args=(name, server)))
        for thread in self.threads:
            thread.start()
        nodes = tuple(Node(name=name, address=addresses[name], memory_bytes=400 * MIB) for name in NAMES[1:])
        self.cluster = Cluster(name="c", model="m", coordinator=addresses["coordinator"], nodes=nodes)

    def serve(self, name, server):
        with server:
            while not self.stop.is_set():
                if received := server.receive(0.02):
                    peer, envelope = received
                    refused = Refused("unexpected", f"{name} takes no {type(envelope.message).__name__}")
                    server.send(peer, refused, call_id=envelope.call_id)

    def change(self, a, b, *, one_way=False, **change):
        pairs = pairs_of(self.cluster, a, b, one_way=one_way)
        return list(change_links(self.cluster, None, pairs, ShapeLink(a, b, **change)))

    def link(self, own, source, target):
        state = self.shapings[own]._shaper.state(source, target)
        return state.link, state.is_cut(CLOCK.now())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def test_both_ends_hear_of_both_directions_and_nobody_else_does():
    with Servers() as servers:
        told = servers.change("n1", "n5", delay_s=0.01, rate_bps=1e7)
        assert [(each.source, each.target, each.delay_s) for each in told] == [
            ("n1", "n5", 0.01),
            ("n5", "n1", 0.01),
        ]
        for own in ("n1", "n5"):
            for pair in (("n1", "n5"), ("n5", "n1")):
                assert servers.link(own, *pair) == (Link(delay_s=0.01, rate_bps=1e7), False)
        assert servers.link("n2", "n1", "n5")[0].delay_s == 0.0005


def test_one_way_is_one_way_and_a_cut_can_be_healed():
    with Servers() as servers:
        servers.change("n1", "n5", one_way=True, cut_s=0.0)
        assert servers.link("n5", "n1", "n5")[1] and servers.link("n1", "n1", "n5")[1]
        assert not servers.link("n1", "n5", "n1")[1]
        servers.change("n1", "n5", reset=True)
        assert not servers.link("n5", "n1", "n5")[1]


def test_a_node_can_be_cut_off_from_all_the_coordinator_included():
    with Servers() as servers:
        told = servers.change("n1", "all", cut_s=60.0)
        assert [(each.source, each.target) for each in told[:2]] == [
            ("n1", "coordinator"),
            ("coordinator", "n1"),
        ]
        assert len(told) == 6 and all(each.is_cut for each in told)
        assert servers.link("coordinator", "n1", "coordinator")[1]
        assert not servers.link("n2", "n2", "n5")[1]


def test_a_process_that_does_not_shape_is_named_with_what_to_do():
    with (
        Servers("n5") as servers,
        pytest.raises(ClusterError, match="n5 does not shape its links; start .*up --shape"),
    ):
        servers.change("n1", "n5", delay_s=0.01)


@pytest.mark.parametrize(("a", "b"), [("n1", "n9"), ("n9", "n1"), ("all", "n1"), ("n1", "n1")])
def test_ends_that_are_none_are_told(a, b):
    with pytest.raises(ConfigError, match="no end of a link is called|two ends"):
        pairs_of(PLANS, a, b, one_way=False)


@pytest.mark.parametrize(("text", "expected"), [("1%", 0.01), ("0 %", 0.0), ("12.5%", 0.125)])
def test_shares_are_percentages(text, expected):
    assert parse_share(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["1", "100%", "-1%", "%", "0.01"])
def test_what_is_no_share_is_told(text):
    with pytest.raises(ValueError, match="as in"):
        parse_share(text)


def test_a_link_is_described_with_all_that_is_not_ordinary():
    assert describe(LinkShaped("coordinator", "n5")) == "coordinator -> n5: no delay, any rate"
    plain = LinkShaped("n1", "n5", delay_s=0.01)
    assert describe(plain) == "n1 -> n5: 10 ms one way, any rate"
    shaped = LinkShaped("n1", "n5", 0.01, 0.002, 1e7, 0.01, True, 9.81)
    assert describe(shaped) == (
        "n1 -> n5: 10 ms one way, 10 Mbit/s, up to 2 ms of jitter, 1 % lost, cut for 9.9 s"
    )
    assert describe(LinkShaped("n1", "n5", is_cut=True)).endswith("cut until healed")


@pytest.fixture
def run(tmp_path, demo_model):
    """The command on running servers; the result has `exit_code` and `output`."""
    with ExitStack() as stack:
        servers = stack.enter_context(Servers())
        lines = [
            f'[cluster]\nname = "c"\nmodel = "{demo_model}"\ncoordinator = "{servers.cluster.coordinator}"\n'
        ]
        lines += [
            f'[[node]]\nname = "{node.name}"\naddress = "{node.address}"\nmemory = "400 MiB"\n'
            for node in servers.cluster.nodes
        ]
        path = tmp_path / "topology.toml"
        path.write_text("\n".join(lines))
        yield lambda *words: CliRunner().invoke(commands, ["link", *words, "--topology", str(path)])


def test_the_command_changes_shows_and_heals(run):
    words = ("--rtt", "20ms", "--rate", "10Mbit/s", "--loss", "1%", "--jitter", "2ms")
    assert run("n1", "n5", *words).output == (
        "n1 -> n5: 10 ms one way, 10 Mbit/s, up to 2 ms of jitter, 1 % lost\n"
        "n5 -> n1: 10 ms one way, 10 Mbit/s, up to 2 ms of jitter, 1 % lost\n"
    )
    shown = json.loads(run("n1", "n5", "--json").output)
    assert [(each["source"], each["rate_bps"]) for each in shown] == [("n1", 1e7), ("n5", 1e7)]
    assert run("n1", "n5", "--heal", "--one-way").output == "n1 -> n5: 500 us one way, 1 Gbit/s\n"
    assert "cut for" in run("n1", "n5", "--cut", "10s").output


@pytest.mark.parametrize(
    "words",
    [("--rtt", "20"), ("--rate", "0 Mbit/s"), ("--loss", "100%"), ("--cut", "soon"), ("--rate", "fast")],
)
def test_a_value_that_is_none_is_told_before_anything_changes(run, words):
    assert run("n1", "n5", *words).exit_code == 2
    assert math.isclose(json.loads(run("n1", "n5", "--json").output)[0]["delay_s"], 0.0005)
