"""What `status` shows is what the state says, in values that JSON knows."""

import json

import pytest

from edge_runtime.coordinator import state as states
from edge_runtime.coordinator.speed_book import measured_of
from edge_runtime.coordinator.status import status_body
from edge_runtime.coordinator.streams import Streams
from edge_runtime.protocol import Failed, Finished, NodeReport, Submit
from edge_runtime.tables import status_table
from tests.support.coordinators import cluster, footprint
from topology.placement import plan_placement
from topology.speeds import NOTHING_MEASURED, LinkSpeed, NodeSpeed


class Watched:
    """A state of two nodes and some requests, and its status."""

    def __init__(self) -> None:
        self.cluster = cluster("n1", "n2")
        self.placement = plan_placement(self.cluster, footprint())
        self.state = states.initial_state(["n1", "n2"], 1, 1.0, 5.0)
        self.streams = Streams()
        self.measured = NOTHING_MEASURED

    def give(self, *events: states.Event, now: float = 10.0) -> None:
        for event in events:
            self.state, _ = states.apply(self.state, event, now)

    def body(self, now: float = 12.5) -> dict:
        coordinator = {"address": "127.0.0.1:1", "pid": 1}
        found = status_body(
            self.cluster,
            self.placement,
            self.state,
            self.streams,
            coordinator=coordinator,
            measured=self.measured,
            now=now,
        )
        assert json.loads(json.dumps(found)) == found
        assert status_table(found)
        return found


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_cluster_of_which_nobody_has_come_shows_every_node_as_absent(watched):
    body = watched.body()
    assert not body["ready"] and body["waiting_for"] == "n1 absent, n2 absent"
    assert body["experts_without_host"] == 8
    for node in body["nodes"]:
        assert (node["state"], node["pid"], node["last_heard_s"], node["report"]) == (
            "absent",
            None,
            None,
            {},
        )
        assert node["roles"] == ["decode", "experts", "prefill"]
        plan = watched.placement.plan_of(node["name"])
        assert (node["memory_planned_bytes"], node["memory_limit_bytes"]) == (
            plan.planned_bytes,
            plan.memory_bytes,
        )
        assert node["experts"] == len(plan.experts)


def test_a_node_that_serves_shows_what_it_reported(watched):
    report = NodeReport(state="ready", rss_bytes=5, kv_blocks_free=3, kv_blocks_total=4, numbers={"x": 1.5})
    watched.give(
        states.Joined("n1", b"c", "i", 77),
        states.Progressed("n1", 50, 100),
        states.ShareLoaded("n1", 1, 1234),
        states.Beat("n1", report),
    )
    node = watched.body()["nodes"][0]
    assert (node["state"], node["pid"], node["weight_bytes"], node["loaded_bytes"]) == ("ready", 77, 1234, 50)
    assert (node["last_heard_s"], node["memory_used_bytes"]) == (2.5, 5)
    assert node["report"]["numbers"] == {"x": 1.5} and node["report"]["kv_blocks_total"] == 4


def test_a_node_that_failed_shows_why(watched):
    watched.give(states.Joined("n2", b"c", "i", 77), states.LoadFailed("n2", 1, "no memory"))
    body = watched.body()
    assert body["nodes"][1]["fault"] == "no memory"
    assert body["nodes"][1]["whose_fault"] == "cluster" and body["nodes"][0]["whose_fault"] is None
    assert "n2: no memory" in status_table(body)
    watched.give(states.LoadFailed("n2", 1, "no number", "user"))
    assert watched.body()["nodes"][1]["whose_fault"] == "user"


def test_requests_are_counted_by_node_and_by_how_they_ended(watched):
    for index in range(4):
        watched.streams.open(Submit(f"r{index}", prompt="p", credit=1), b"c", f"n{index % 2 + 1}")
    watched.streams.end(Finished("r0", "stop"))
    watched.streams.end(Failed("r1", "cluster", "x", "y"))
    body = watched.body()
    assert body["requests"] == {"in_flight": 2, "finished": 1, "failed": 1, "refused": 0}
    assert [node["in_flight"] for node in body["nodes"]] == [1, 1]


def test_what_nodes_measured_is_shown_beside_what_the_file_says(watched):
    report = NodeReport(
        state="ready",
        speed=NodeSpeed(flops=5e9),
        links={"n2": LinkSpeed(rtt_s=0.004, bandwidth_bps=3e8)},
        cores=2.0,
    )
    watched.give(states.Joined("n1", b"c", "i", 77), states.Beat("n1", report))
    watched.measured = measured_of({"n1": report}, {}, ("n1",))
    body = watched.body()
    speed = body["nodes"][0]["speed"]
    assert speed["measured"]["flops"] == 5e9 and speed["cores"] == 2.0
    assert speed["declared"] == {"memory_bytes_per_s": None, "flops": None}
    assert body["nodes"][1]["speed"]["measured"] is None
    [link] = body["links"]
    assert link["between"] == ["n1", "n2"] and link["measured"]["rtt_s"] == 0.004
    assert link["measured"]["bandwidth_bps"] == 3e8
    assert link["declared"] == {"rtt_s": 0.001, "bandwidth_bps": 1e9}


def test_a_cluster_answers_as_long_as_some_group_has_all_that_it_needs(watched):
    assert watched.body()["state"] == "waiting"
    for name in ("n1", "n2"):
        watched.give(states.Joined(name, name.encode(), "one", 1), states.ShareLoaded(name, 1, 5))
    assert watched.body()["state"] == "ready" and not watched.body()["to_start"]
    watched.give(states.Left("n2", "stopped"))
    body = watched.body()
    assert body["state"] == "degraded", "n1 holds everything"
    assert "run `edge-runtime node n2`" in body["to_start"]
    assert "answers, but waits for n2 left (stopped)" in status_table(body)
    watched.give(states.Left("n1", "stopped"))
    body = watched.body()
    assert body["state"] == "waiting" and "n1, n2 do not come back" in body["to_start"]


def test_a_group_that_lacks_experts_does_not_count_as_answering(watched):
    watched.cluster = cluster("n1", "n2", memory_ratio=1.0)
    watched.placement = plan_placement(watched.cluster, footprint())
    for name in ("n1", "n2"):
        watched.give(states.Joined(name, name.encode(), "one", 1), states.ShareLoaded(name, 1, 5))
    watched.give(states.Unreachable("n2"))
    assert watched.body()["state"] == "waiting" and watched.body()["experts_without_host"]
