"""The coordinator of decode groups of several stages: who gets requests, and what happens when any of a group's nodes goes."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from edge_runtime.coordinator.epochs import Epochs, WorkOut
from edge_runtime.coordinator.state import Joined, Left, ShareLoaded
from edge_runtime.protocol import (
    Abort,
    Accepted,
    Deploy,
    Failed,
    Finished,
    Generate,
    PeersChanged,
    Stopping,
    Tokens,
)
from tests.support.coordinators import FakeClient, FakeNode, cluster, footprint, running
from topology.placement import plan_placement

PARTS = replace(footprint(), width=64, top_k=2)
PAIRS = cluster("n1", "n2", "n3", "n4", plan="stages", stages=2)
QUIET = (PeersChanged, Deploy)


@pytest.fixture
def nodes() -> Iterator[tuple[list[FakeNode], str]]:
    """n1 with n2 and n3 with n4, each pair a group of two stages, all ready."""
    with running(PAIRS, PARTS, homeless_s=0.3) as daemon:
        joined = [FakeNode(daemon.address, name).join() for name in PAIRS.node_names]
        try:
            yield joined, daemon.address
        finally:
            for node in joined:
                node.close()


def test_requests_go_to_the_first_stages_and_each_node_knows_its_group(
    nodes: tuple[list[FakeNode], str],
) -> None:
    (n1, n2, n3, n4), address = nodes
    with FakeClient(address) as client:
        for name in ("r1", "r2"):
            client.submit(name)
        assert [client.next(Accepted).node for _ in range(2)] == ["n1", "n3"]
        assert (n1.request().request_id, n3.request().request_id) == ("r1", "r2")
        groups = client.status()["groups"]
    assert [[stage["node"] for stage in group["stages"]] for group in groups] == [["n1", "n2"], ["n3", "n4"]]
    assert [group["in_flight"] for group in groups] == [1, 1] and all(group["serves"] for group in groups)
    for node, stages, layers in ((n1, [0, 1], (0, 1)), (n2, [0, 1], (1, 2)), (n4, [2, 3], (1, 2))):
        assert node.deploy.stages == stages
        assert (node.deploy.share.first_layer, node.deploy.share.last_layer) == layers


def test_a_request_goes_on_elsewhere_when_any_stage_of_its_group_goes(
    nodes: tuple[list[FakeNode], str],
) -> None:
    (n1, n2, n3, _), address = nodes
    with FakeClient(address) as client:
        client.submit("r")
        assert client.next(Accepted).node == "n1"
        n1.request()
        n1.tell("r", 0)
        n2.send(Stopping("was told to stop"))
        assert client.next(Accepted, skip=(Tokens,)) == Accepted("r", "n3")
        assert n1.next(Abort, skip=QUIET).request_id == "r"
        resumed = n3.next(Generate, skip=QUIET)
        assert resumed.output_ids == [0]
        n1.send(Finished("r", "abort"))  # of what it had begun: nothing to the client
        n3.tell("r", 1)
        n3.finish("r", 2)
        assert client.next(Finished, skip=(Tokens,)).finish_reason == "length"


def test_a_first_stage_that_cannot_reach_the_next_gives_its_requests_to_another_group(
    nodes: tuple[list[FakeNode], str],
) -> None:
    (n1, _, n3, _), address = nodes
    with FakeClient(address) as client:
        client.submit("r")
        client.next(Accepted)
        n1.request()
        n1.send(Failed("r", "cluster", "stage_lost", "n2 is gone: its connection ended", node="n1"))
        assert client.next(Accepted) == Accepted("r", "n3")
        n3.request()
        n3.send(Failed("r", "cluster", "stage_lost", "n4 is gone: its connection ended", node="n3"))
        assert client.next(Accepted) == Accepted("r", "n1")
        assert n1.request().request_id == "r"
        n1.send(Finished("r", "abort"))  # of the time before: the request is here anew
        n1.tell("r", 0)
        n1.finish("r", 1)
        assert client.next(Finished, skip=(Tokens,)).finish_reason == "length"


def test_moves_that_another_placement_wants_are_not_counted_as_losses(
    nodes: tuple[list[FakeNode], str],
) -> None:
    (n1, _, n3, _), address = nodes
    with FakeClient(address) as client:
        client.submit("r")
        for node in (n1, n3) * 4:
            assert client.next(Accepted).node == node.name
            node.request()
            node.send(Failed("r", "cluster", "moving", "answers no more requests", node=node.name))
        assert client.next(Accepted).node == "n1"


def test_layers_that_lost_their_node_are_given_to_others(now: float = 0.0) -> None:
    placement = plan_placement(PAIRS, PARTS)
    epochs = Epochs(PAIRS, PARTS, placement, now)
    for name in PAIRS.node_names:
        epochs.apply(Joined(name, name.encode(), "one", 1), now)
        epochs.apply(ShareLoaded(name, 1, 1000), now)
    assert epochs.change is None and len(epochs.serving_groups()) == 2
    said = epochs.apply(Left("n4", "stopped"), now + 1)
    [ask] = [command.ask for command in said if isinstance(command, WorkOut)]
    epochs.worked_out(ask, epochs.work_out(ask), now + 2)
    assert epochs.change is not None and "layers lost their node with n4" in epochs.change.why
    coming = epochs.plans[epochs.change.epoch].placement
    assert [group.nodes for group in coming.groups] == [("n1", "n2")]
    for name in sorted(epochs.change.members):
        epochs.loaded(name, coming.epoch, 1000, now + 9)
    assert epochs.serving_groups()[0].nodes == ("n1", "n2")
