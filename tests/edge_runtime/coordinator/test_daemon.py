"""The coordinator over real sockets, with nodes and clients that are driven by hand."""

import json
import threading

import pytest

from edge_runtime.clock import ManualClock, SystemClock
from edge_runtime.coordinator.daemon import CoordinatorDaemon
from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.errors import Refusal
from edge_runtime.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Apply,
    Attach,
    Credit,
    Deploy,
    Deployed,
    DeployFailed,
    DeployProgress,
    Drain,
    Failed,
    Finished,
    Heartbeat,
    HeartbeatReply,
    Hello,
    PeersChanged,
    Refused,
    Stopping,
    Submit,
    Tokens,
    Welcome,
)
from edge_runtime.transport.endpoint import wait_any
from tests.support.coordinators import (
    MODEL_HASH,
    SOON_S,
    FakeClient,
    FakeNode,
    Talker,
    cluster,
    footprint,
    running,
)
from topology.errors import TopologyError
from topology.placement import plan_placement


@pytest.fixture
def address():
    """A coordinator of n1 and n2."""
    with running(cluster("n1", "n2"), homeless_s=0.3) as daemon:
        yield daemon.address


@pytest.fixture
def nodes(address):
    """Both nodes, ready."""
    n1 = FakeNode(address, "n1").join()
    n2 = FakeNode(address, "n2").join()
    with n1, n2:
        assert n1.next(PeersChanged).alive == ["n1", "n2"]
        yield n1, n2


@pytest.fixture
def client(address):
    with FakeClient(address) as client:
        yield client


def until(condition):
    """Ask until it is true; each question waits for its answer, so nothing spins."""
    clock = SystemClock()
    give_up = clock.now() + SOON_S
    while not condition():
        assert clock.now() < give_up, "it did not happen in time"


# Who may come in.


def test_while_an_expert_has_no_host_yet_a_prompt_is_refused_with_who_is_missing():
    with running(cluster("n1", "n2", memory_ratio=1.0)) as daemon, FakeClient(daemon.address) as client:
        client.submit("early")
        refused = client.next(Refused)
        assert (refused.reason, refused.request_id) == ("not_ready", "early") and refused.retry_after_s
        assert "8 experts have no host yet" in refused.detail and "n1 absent, n2 absent" in refused.detail
        with FakeNode(daemon.address, "n1").join(), FakeNode(daemon.address, "n2") as n2:
            n2.send(n2.hello)
            n2.next(Welcome)
            n2.next(Deploy)
            n2.send(DeployProgress(1, 3_100_000, 6_800_000, "layer 0"))
            n2.beat()
            client.submit("still early")
            assert "waiting for n2 loading 3.1 of 6.8 MB" in client.next(Refused).detail
            n2.send(DeployFailed(1, "shard 2 is truncated"))
            n2.beat()
            client.submit("too early")
            assert "n2 failed (shard 2 is truncated)" in client.next(Refused).detail


def test_a_node_that_never_comes_is_not_waited_for_where_every_expert_has_another_host(address, client):
    with FakeNode(address, "n1").join():
        client.submit("r")
        assert client.next(Accepted) == Accepted("r", "n1")


def test_once_the_cluster_was_whole_it_goes_on_with_what_is_left(address, client, nodes):
    n1, n2 = nodes
    n2.send(Stopping("was told to stop"))
    assert n1.next(PeersChanged).alive == ["n1"]
    client.submit("r")
    assert client.next(Accepted) == Accepted("r", "n1")
    n1.send(Stopping(""))
    assert client.next(Failed).node == "n1"
    client.submit("s")
    refused = client.next(Refused)
    assert refused.reason == "not_ready"
    assert "waiting for n1 left (stopped), n2 left (was told to stop)" in refused.detail


def test_a_stranger_that_does_not_greet_is_refused(address):
    with Talker(address) as stranger:
        stranger.send(Submit("r", prompt="x"), call_id=9)
        refused = stranger.next(Refused)
        assert (refused.reason, refused.request_id) == ("handshake", "r") and "Hello" in refused.detail


@pytest.mark.parametrize(
    ("identity", "reason", "said"),
    [
        ({"model_hash": "x" * 32}, "model", (MODEL_HASH, "x" * 32)),
        ({"protocol": PROTOCOL_VERSION + 1}, "version", (str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 1))),
        ({"node": "n7"}, "unknown_node", ("n7", "n1, n2")),
        ({"role": "coordinator"}, "role", ("second",)),
    ],
)
def test_whoever_does_not_fit_is_refused_with_both_values(address, identity, reason, said):
    fields = {"node": "n1", "role": "node", "model_hash": MODEL_HASH, "incarnation": "i"} | identity
    with Talker(address) as talker:
        talker.send(Hello(**fields))
        refused = talker.next(Refused)
        assert refused.reason == reason and refused.retry_after_s is None
        assert all(part in refused.detail for part in said)


def test_a_second_process_of_a_name_is_refused_and_the_first_goes_on(address, client, nodes):
    n1, _ = nodes
    with FakeNode(address, "n1", incarnation="two") as second:
        second.send(second.hello)
        refused = second.next(Refused)
        assert refused.reason == "name_in_use" and "pid 4711" in refused.detail and refused.retry_after_s
    client.submit("r")
    assert client.next(Accepted).node == "n1"
    assert n1.request().request_id == "r"


def test_a_node_that_comes_back_is_sent_its_share_and_its_old_requests_go_on_elsewhere(
    address, client, nodes
):
    n1, n2 = nodes
    client.submit("r")
    client.next(Accepted)
    n1.close()
    with FakeNode(address, "n1") as again:
        again.send(again.hello)
        assert client.next(Accepted) == Accepted("r", "n2")
        assert n2.request().request_id == "r"
        assert n2.next(PeersChanged).alive == ["n2"]
        again.next(Welcome, skip=(Abort,))  # it may be the same process, still at its request
        assert again.next(Deploy) == n1.deploy
        again.send(Deployed(1, 1000))
        assert again.next(PeersChanged).alive == ["n1", "n2"]
        assert n2.next(PeersChanged).alive == ["n1", "n2"]


def test_a_node_that_greets_twice_keeps_its_requests(address, client, nodes):
    n1, _ = nodes
    client.submit("r")
    client.next(Accepted)
    n1.request()
    n1.send(n1.hello)
    n1.next(Welcome)
    n1.next(Deploy)
    n1.send(Deployed(1, 1000))
    n1.tell("r", 0)
    n1.finish("r", 1)
    assert client.next(Tokens).token_ids == [0]
    assert client.next(Finished).completion_tokens == 1


# Requests.


def test_a_request_reaches_a_home_as_it_was_asked_and_its_answer_the_client(address, client, nodes):
    n1, _ = nodes
    client.submit("r", prompt="Hello", sampling={"max_tokens": 3, "stop": ["x"]}, trace=True)
    assert client.next(Accepted) == Accepted("r", "n1")
    asked = n1.request()
    seed = {
        "seed": asked.sampling["seed"]
    }  # drawn by the coordinator, so that every home draws the same tokens
    assert (asked.prompt, asked.sampling, asked.trace) == (
        "Hello",
        {"max_tokens": 3, "stop": ["x"]} | seed,
        True,
    )
    n1.tell("r", 0, 3)
    n1.finish("r", 3)
    assert [client.next(Tokens).text for _ in range(3)] == ["0 ", "1 ", "2 "]
    assert client.next(Finished).finish_reason == "length"
    status = client.status()
    assert status["requests"] == {"in_flight": 0, "finished": 1, "failed": 0, "refused": 0}
    json.dumps(status)


def test_requests_go_in_turn_to_the_home_with_the_least_pressure(address, client, nodes):
    for number in range(4):
        client.submit(f"r{number}")
    assert [client.next(Accepted).node for _ in range(4)] == ["n1", "n2", "n1", "n2"]
    assert [node["in_flight"] for node in client.status()["nodes"]] == [2, 2]


def test_an_id_that_is_in_use_is_refused_and_the_first_goes_on(address, client, nodes):
    n1, _ = nodes
    client.submit("r")
    client.next(Accepted)
    with FakeClient(address) as other:
        other.submit("r")
        refused = other.next(Refused)
        assert (
            refused.reason == "request" and refused.retry_after_s is None and "r is in use" in refused.detail
        )
    n1.request()
    n1.tell("r", 0)
    assert client.next(Tokens).token_ids == [0]
    client.submit("")
    assert "needs an id" in client.next(Refused).detail


def test_a_client_that_sends_what_a_coordinator_does_not_take_is_told(address, client):
    client.send(Finished("r", "stop"), call_id=5)
    refused = client.next(Refused)
    assert refused.reason == "unexpected" and "Finished" in refused.detail


def test_a_node_that_sends_what_a_coordinator_does_not_take_changes_nothing(address, client, nodes):
    n1, _ = nodes
    n1.send(Submit("r", prompt="x"))
    n1.send(Refused("busy", "no"))
    n1.beat()
    assert client.status()["ready"]


def test_a_client_ends_its_own_request_and_nobody_elses(address, client, nodes):
    n1, _ = nodes
    client.submit("r")
    client.next(Accepted)
    n1.request()
    with FakeClient(address) as other:
        other.send(Abort("r"))
        other.send(Credit("r", 10))
        other.status()  # both have been taken by now
    client.send(Abort("r"))
    assert n1.next(Abort, skip=(PeersChanged,)) == Abort("r")
    n1.send(Finished("r", "abort"))
    assert client.next(Finished).finish_reason == "abort"


def test_the_request_of_a_client_that_went_away_is_aborted_at_its_node(address, client, nodes):
    n1, _ = nodes
    with FakeClient(address) as leaving:
        leaving.submit("r")
        leaving.next(Accepted)
    n1.request()
    index = 0

    def aborted() -> bool:
        nonlocal index
        n1.tell("r", index)
        index += 1
        envelope = n1.channel.receive(0.05)
        return envelope is not None and envelope.message == Abort("r")

    until(aborted)
    assert client.status()["requests"]["in_flight"] == 0


def test_a_client_that_went_away_with_its_window_used_up_is_noticed_too(address, client, nodes):
    n1, _ = nodes
    leaving = FakeClient(address)
    leaving.submit("r", credit=1)
    leaving.next(Accepted)
    n1.request()
    n1.tell("r", 0, 5)
    leaving.next(Tokens)
    leaving.close()
    assert n1.next(Abort, skip=(HeartbeatReply, PeersChanged)) == Abort("r")
    assert client.status()["requests"]["in_flight"] == 0


def test_a_slow_client_gets_all_tokens_in_order_within_its_window(address, client, nodes):
    n1, _ = nodes
    client.submit("r", credit=2)
    client.next(Accepted)
    n1.request()
    n1.tell("r", 0, 100)
    n1.beat()  # all are taken
    ids, text = [], ""
    for _ in range(2):
        message = client.next(Tokens, skip=(HeartbeatReply,))
        ids, text = ids + message.token_ids, text + message.text
    assert ids == [0, 1]
    client.send(Credit("r", 1))
    message = client.next(Tokens, skip=(HeartbeatReply,))
    assert (message.index, message.token_ids) == (2, list(range(2, 100)))
    n1.tell("r", 100, 5)
    n1.finish("r", 105)
    message = client.next(
        Tokens, skip=(HeartbeatReply,)
    )  # what waits comes with the end, whatever the window says
    assert message.token_ids == list(range(100, 105))
    assert text + message.text == "0 1 " + "".join(f"{i} " for i in range(100, 105))
    client.next(Finished)


def test_a_client_whose_queue_is_full_loses_nothing_and_is_not_given_up():
    """More bytes than any queue holds, within a window that the client itself chose."""
    count, text = 3000, "x" * 8192

    def tell(node: FakeNode, message: Tokens | Finished) -> None:
        while not node.channel.send(message):  # its own queue is full for a moment: the coordinator reads on
            node.channel.receive(0.01)

    with (
        running(cluster("n1")) as daemon,
        FakeNode(daemon.address, "n1") as n1,
        FakeClient(daemon.address) as client,
    ):
        n1.join()
        client.submit("r", credit=count)
        client.next(Accepted)
        n1.request()
        for index in range(count):
            tell(n1, Tokens("r", index, [index], text))
        tell(n1, Finished("r", "length", completion_tokens=count))
        n1.beat()
        assert daemon._server.counters["send_full"] > 0, "the case did not come up"
        ids: list[int] = []
        while len(ids) < count:
            ids += client.next(Tokens, skip=(HeartbeatReply,)).token_ids
        assert ids == list(range(count))
        assert client.next(Finished, skip=(HeartbeatReply,)).completion_tokens == count


def test_when_a_home_goes_another_goes_on_after_the_tokens_that_came_and_the_client_sees_no_seam(
    address, client, nodes
):
    n1, n2 = nodes
    client.submit("r1", prompt="Hello", sampling={"max_tokens": 5, "seed": 7})
    client.submit("r2")
    assert [client.next(Accepted).node for _ in range(2)] == ["n1", "n2"]
    n1.request()
    n2.request()
    n1.tell("r1", 0, 2)
    assert [client.next(Tokens).index for _ in range(2)] == [0, 1]
    n1.send(Stopping("was told to stop"))
    assert client.next(Accepted) == Accepted("r1", "n2")
    resumed = n2.request()
    assert (resumed.request_id, resumed.prompt, resumed.sampling["seed"]) == ("r1", "Hello", 7)
    assert resumed.output_ids == [0, 1]
    n1.tell("r1", 2)  # too late: the request is another's by now
    n2.send(Tokens("r1", 2, [2], "2 "))
    n2.send(Tokens("r2", 0, [0], "0 "))
    assert [
        (message.request_id, message.index) for message in (client.next(Tokens), client.next(Tokens))
    ] == [
        ("r1", 2),
        ("r2", 0),
    ]
    n2.finish("r1", 5)
    assert client.next(Finished).request_id == "r1"


def test_a_home_that_says_it_stops_or_is_not_ready_hands_its_request_on(address, client, nodes):
    n1, n2 = nodes
    client.submit("r")
    assert client.next(Accepted).node == "n1"
    n1.request()
    n1.send(Failed("r", "cluster", "stopping", "node n1 was told to stop while it was answering", node="n1"))
    assert client.next(Accepted) == Accepted("r", "n2")
    n2.request()
    n2.send(Failed("r", "cluster", "not_ready", "node n2 has no engine", node="n2"))
    assert client.next(Accepted) == Accepted("r", "n1")
    assert n1.request().request_id == "r"


def test_a_request_that_lost_too_many_homes_fails_with_what_happened(address, client, nodes):
    n1, n2 = nodes
    client.submit("r")
    for node in (n1, n2, n1, n2):
        assert client.next(Accepted).request_id == "r"
        node.request()
        node.send(Failed("r", "cluster", "stopping", "no luck here", node="x"))
    failed = client.next(Failed)
    assert (failed.node, failed.reason) == ("n2", "node_lost") and failed.detail.startswith("no luck here")


def test_a_request_without_a_home_is_aborted_when_its_client_wants_that(client_of_quick):
    client, observer, n1, n2 = client_of_quick
    client.submit("r")
    assert client.next(Accepted).node == "n1"
    n2.send(Stopping(""))
    n1.send(Stopping(""))
    until(lambda: observer.status()["nodes"][0]["state"] == "left")
    client.send(Abort("r"))
    assert client.next(Finished).finish_reason == "abort"
    assert observer.status()["requests"]["in_flight"] == 0


def test_a_node_that_falls_silent_is_lost_and_named_and_taken_back_when_it_is_heard(client_of_quick):
    client, observer, n1, n2 = client_of_quick
    client.submit("r")
    assert client.next(Accepted).node == "n1"
    n1.request()

    def lost() -> bool:
        n2.beat()
        return observer.status()["nodes"][0]["state"] == "lost"

    until(lost)
    assert client.next(Accepted) == Accepted("r", "n2")
    n1.tell("r", 0)  # it was only frozen, and goes on: nobody wants that any more
    assert n1.next(Abort, skip=(PeersChanged, HeartbeatReply)) == Abort("r")
    n1.send(n1.hello)
    n1.next(Welcome, skip=(Abort, HeartbeatReply))

    def returned() -> bool:
        n1.beat()
        n2.beat()
        return observer.status()["nodes"][0]["state"] == "loading"

    until(returned)
    n1.next(Welcome, skip=(HeartbeatReply,))
    n1.next(Deploy)
    n1.send(Deployed(1, 1000))
    assert n1.next(PeersChanged).alive == ["n1", "n2"]


@pytest.fixture
def client_of_quick():
    """Two clients and two nodes of a coordinator that gives a node up after a second."""
    with running(cluster("n1", "n2", heartbeat_s=0.4, lost_after_s=1.0)) as daemon:
        n1, n2 = FakeNode(daemon.address, "n1"), FakeNode(daemon.address, "n2")
        with n1, n2, FakeClient(daemon.address) as client, FakeClient(daemon.address) as observer:
            n1.join()
            n2.join()
            yield client, observer, n1, n2


def test_what_a_node_says_of_a_request_that_is_anothers_by_now_does_not_mix_in(address, client, nodes):
    n1, n2 = nodes
    client.submit("r")
    assert client.next(Accepted).node == "n1"
    n2.tell("r", 0)
    assert n2.next(Abort, skip=(PeersChanged,)) == Abort("r")
    n2.send(Finished("r", "stop"))
    n2.send(Failed("r", "cluster", "x", "y"))
    n2.beat()
    n1.request()
    n1.tell("r", 0)
    n1.finish("r", 1)
    assert client.next(Tokens).text == "0 "
    assert client.next(Finished).completion_tokens == 1


def test_a_request_nested_too_deeply_to_pass_on_ends_in_one_sentence_or_arrives(address, client, nodes):
    inner: list = []
    for _ in range(900):
        inner = [inner]
    client.submit("deep", prompt=None, messages=[{"role": "user", "content": inner}])
    client.next(Accepted, Refused)
    client.submit("next")
    assert client.next(Accepted).request_id == "next"


def test_long_words_of_a_node_never_end_the_coordinator(address, client):
    with FakeNode(address, "n1") as n1, FakeNode(address, "n2") as n2:
        for node in (n1, n2):
            node.send(node.hello)
            node.next(Welcome)
            node.next(Deploy)
            node.send(DeployFailed(1, "x" * 65_000))
            node.beat()
        client.submit("r")
        assert len(client.next(Refused).detail) < 4000
        assert client.status()["nodes"][0]["state"] == "failed"


@pytest.mark.parametrize("is_cluster", [True, False])
def test_clients_are_told_when_the_cluster_ends_and_not_when_only_the_coordinator_does(is_cluster):
    with running(cluster("n1")) as daemon:
        n1, client = FakeNode(daemon.address, "n1").join(), FakeClient(daemon.address)
        client.submit("r")
        client.next(Accepted)
        n1.request()
        if is_cluster:
            daemon.end()
            failed = client.next(Failed)
            assert failed.reason == "stopping" and "cluster was stopped" in failed.detail
        else:
            daemon.stop()
            until(client.channel.is_lost)
            assert client.channel.receive(0) is None, "its answer goes on"
            assert n1.channel.receive(0) is None, "and nobody told its home to end it"
        n1.close()
        client.close()


def test_a_refused_greeting_leaves_the_channel_usable(address):
    with Talker(address) as talker, pytest.raises(Refusal, match="no node is called n7"):
        talker.channel.request(Hello(node="n7"), Welcome, SOON_S)


def test_a_coordinator_that_was_held_up_hears_what_waits_before_it_gives_anybody_up():
    """Its own long sleep is not the nodes' silence: their heartbeats lie in the queue."""
    found, clock = cluster("n1", heartbeat_s=1.0, lost_after_s=5.0), ManualClock(100.0)
    daemon = CoordinatorDaemon(
        found, footprint(), plan_placement(found, footprint()), model_hash=MODEL_HASH, keys=None, clock=clock
    )

    def take_one() -> None:
        assert wait_any([daemon._server], SOON_S), "nothing came"
        daemon._tick()

    with FakeNode(daemon.address, "n1") as n1:
        n1.send(n1.hello)
        take_one()
        n1.send(Deployed(1, 1000))
        take_one()
        assert daemon._state.alive == ["n1"]
        clock.advance(60.0)
        n1.send(Heartbeat(1))
        take_one()
        assert daemon._state.nodes["n1"].phase == "ready"
        clock.advance(60.0)
        daemon._tick()
        assert daemon._state.nodes["n1"].phase == "lost"
    daemon._shut_down()


def test_an_answer_that_no_node_knows_any_more_is_gone_on_with_after_what_its_client_has(
    address, client, nodes
):
    n1, _ = nodes
    client.send(Attach("r", 2, 4, 8))
    refused = client.next(Refused)
    assert (refused.reason, refused.retry_after_s) == ("unknown_request", None)
    client.submit("r", sampling={"seed": 7}, output_ids=[0, 1])
    assert client.next(Accepted) == Accepted("r", "n1")
    asked = n1.request()
    assert asked.output_ids == [0, 1] and asked.sampling == {"seed": 7}
    n1.tell("r", 0, 3)  # what it has already does not come again
    assert client.next(Tokens).index == 2
    n1.finish("r", 3)
    assert client.next(Finished).completion_tokens == 3


def test_a_client_whose_connection_broke_goes_on_over_another_one(address, client, nodes):
    n1, _ = nodes
    client.submit("r")
    client.next(Accepted)
    n1.request()
    with FakeClient(address) as again:
        again.send(Attach("r", 0, 0, 8))
        assert again.next(Refused).reason == "unknown_request"
        assert n1.next(Abort, skip=(PeersChanged,)) == Abort("r")
        again.submit("r")
        assert again.next(Accepted).request_id == "r"


@pytest.mark.parametrize(
    ("text", "source"), [("\0" * 1000, "\0"), ("[cluster]", "\0"), ("[cluster]", "x" * 5000), ("", "")]
)
def test_a_file_that_cannot_be_read_changes_nothing_and_ends_nobody(address, client, nodes, text, source):
    client.send(Apply(text, source))
    assert client.next(Refused).reason == "topology"
    client.submit("r")
    assert client.next(Accepted).request_id == "r"


def test_heartbeats_are_answered_while_a_plan_is_worked_out(address, client, nodes, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def slow(self, ask):
        begun.set()
        assert may_end.wait(SOON_S)
        raise TopologyError("no room in 1 byte")

    monkeypatch.setattr(Epochs, "work_out", slow)
    client.send(Drain("n2"), call_id=5)
    assert begun.wait(SOON_S)
    for node in nodes:
        node.beat()
    with FakeClient(address) as other:
        other.submit("r")
        assert other.next(Accepted).node == "n1"
        assert other.status()["change"] is None
    may_end.set()
    refused = client.next(Refused)
    assert refused.reason == "topology" and "n2 cannot be drained: without it no room" in refused.detail


def test_a_plan_from_before_a_node_went_is_made_again_before_it_is_told(address, client, nodes, monkeypatch):
    n1, n2 = nodes
    tried, may_end = [], threading.Event()

    def slow(self, ask):
        tried.append(ask.names)
        assert may_end.wait(SOON_S)
        raise TopologyError(f"no room on {ask.names}")

    monkeypatch.setattr(Epochs, "work_out", slow)
    client.send(Drain("n1"), call_id=5)
    until(lambda: tried)
    n2.send(Stopping("was told to stop"))
    until(lambda: n1.next(PeersChanged).alive == ["n1"])
    may_end.set()
    refused = client.next(Refused)
    assert tried[0] == ("n2",) and "nobody is there" in refused.detail


def test_a_full_disk_costs_no_answer(caplog):
    tried = []

    def full(found):
        tried.append(found.newest)
        raise OSError(28, "No space left on device")

    with (
        running(cluster("n1"), keep=full) as daemon,
        FakeClient(daemon.address) as client,
        FakeNode(daemon.address, "n1").join(),
    ):
        client.submit("r")
        assert client.next(Accepted).node == "n1"
        assert client.status()["ready"]
    assert len(tried) == 1, "tried again after a while, not at every event"
    assert "No space left on device" in caplog.text
