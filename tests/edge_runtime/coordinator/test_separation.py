"""A coordinator that has prompts computed by one node and answered by another; nodes and clients are driven by hand."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from edge_runtime.protocol import (
    Abort,
    Accepted,
    Failed,
    FetchAhead,
    Finished,
    Generate,
    HeartbeatReply,
    PeersChanged,
    Prefilled,
    Prefilling,
    Served,
    Stopping,
    Tokens,
)
from tests.support.coordinators import FakeClient, FakeNode, cluster, running
from topology.cluster import Cluster, Routing

MINE = (PeersChanged, HeartbeatReply)


class Scene(NamedTuple):
    """Two prefill workers, two homes, one client."""

    workers: list[FakeNode]
    homes: list[FakeNode]
    client: FakeClient

    def at_work(self, nodes: list[FakeNode]) -> tuple[FakeNode, Generate]:
        """The one of these nodes that has got a request, and the request."""
        for node in nodes:
            while (envelope := node.channel.receive(0.5)) is not None:
                if isinstance(envelope.message, Generate):
                    return node, envelope.message
        raise AssertionError("none of them has got a request")


def separated() -> Cluster:
    found = cluster("p", "q", "a", "b")
    roles = [frozenset({"prefill", "experts"})] * 2 + [frozenset({"decode", "experts"})] * 2
    nodes = tuple(replace(node, roles=role) for node, role in zip(found.nodes, roles, strict=True))
    return replace(found, nodes=nodes, routing=Routing(policy="round_robin"))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with running(separated()) as daemon, ExitStack() as stack:
        nodes = [stack.enter_context(FakeNode(daemon.address, name)).join() for name in ("p", "q", "a", "b")]
        yield Scene(nodes[:2], nodes[2:], stack.enter_context(FakeClient(daemon.address)))


def prefilled(worker: FakeNode, request_id: str) -> None:
    """The first token, and word that the prompt is computed."""
    worker.tell(request_id, 0)
    message = Prefilled(request_id, 40, cached_tokens=16, served=Served([worker.name], [[3.0], [12.0]]))
    hashes = np.arange(32, dtype=np.uint8).reshape(2, 16)
    assert worker.channel.send(message, tensors=(np.zeros((2, 4), np.int16), hashes))


def test_the_first_token_is_there_before_a_home_is_chosen_and_the_home_goes_on_after_it(scene):
    scene.client.submit("r1", sampling={"max_tokens": 3})
    worker, asked = scene.at_work(scene.workers)
    assert asked.prefill_only and asked.handoff is None and asked.output_ids == []
    assert scene.client.next(Accepted).node == worker.name
    worker.tell("r1", 0)
    assert scene.client.next(Tokens).token_ids == [0]
    worker.channel.send(
        Prefilled("r1", 40, cached_tokens=16, served=Served([worker.name], [[3.0], [12.0]])),
        tensors=(np.zeros((0, 0), np.int16), np.zeros((2, 16), np.uint8)),
    )
    home, going_on = scene.at_work(scene.homes)
    assert not going_on.prefill_only and going_on.output_ids == [0]
    assert going_on.sampling == asked.sampling, "the same seed, whoever drew it"
    assert going_on.handoff.source.name == worker.name and going_on.handoff.cached_tokens == 16
    assert going_on.handoff.served.served == [[3.0], [12.0]]
    assert scene.client.next(Accepted).node == home.name
    home.tell("r1", 1, 2)
    home.finish("r1", 3)
    assert [scene.client.next(Tokens).token_ids for _ in range(2)] == [[1], [2]]
    assert scene.client.next(Finished).completion_tokens == 3
    assert all(node["in_flight"] == 0 for node in scene.client.status()["nodes"])


def test_an_answer_that_ends_with_its_first_token_is_not_routed(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    worker.tell("r1", 0)
    worker.finish("r1", 1)
    assert scene.client.next(Finished, skip=(Accepted, Tokens)).completion_tokens == 1
    assert scene.client.status()["routing"]["homes"]["a"]["requests"] == 0


def test_a_worker_that_goes_before_its_first_token_is_replaced_by_another(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    worker.send(Stopping("on purpose"))
    [other] = [node for node in scene.workers if node is not worker]
    found, asked = scene.at_work([other])
    assert found is other and asked.prefill_only


def test_a_worker_that_goes_after_its_first_token_leaves_the_rest_to_a_home(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    worker.tell("r1", 0)
    assert scene.client.next(Tokens, skip=(Accepted,)).token_ids == [0]
    worker.send(Stopping("on purpose"))
    _, asked = scene.at_work(scene.homes)
    assert asked.output_ids == [0] and asked.handoff is None and not asked.prefill_only


def test_a_home_that_goes_leaves_the_request_to_another_which_may_fetch_the_prompt_too(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    prefilled(worker, "r1")
    home, _ = scene.at_work(scene.homes)
    home.tell("r1", 1)
    scene.client.next(Tokens, skip=(Accepted,))
    assert scene.client.next(Tokens, skip=(Accepted,)).token_ids == [1]
    home.send(Stopping("on purpose"))
    [other] = [node for node in scene.homes if node is not home]
    _, asked = scene.at_work([other])
    assert asked.output_ids == [0, 1] and asked.handoff.source.name == worker.name


def test_nobody_is_asked_for_blocks_who_is_gone(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    prefilled(worker, "r1")
    home, _ = scene.at_work(scene.homes)
    worker.send(Stopping("on purpose"))
    home.send(Stopping("on purpose"))
    _, asked = scene.at_work([node for node in scene.homes if node is not home])
    assert (
        asked.output_ids == [0] and asked.handoff.source.address == "" and asked.handoff.cached_tokens == 16
    )


@pytest.mark.parametrize("when", ["in prefill", "at home"])
def test_an_abort_reaches_whoever_has_the_request(scene, when):
    scene.client.submit("r1")
    node, _ = scene.at_work(scene.workers)
    if when == "at home":
        prefilled(node, "r1")
        node, _ = scene.at_work(scene.homes)
    scene.client.send(Abort("r1"))
    assert node.next(Abort, skip=MINE).request_id == "r1"
    node.send(Finished("r1", "abort"))
    assert scene.client.next(Finished, skip=(Accepted, Tokens)).finish_reason == "abort"
    assert all(entry["in_flight"] == 0 for entry in scene.client.status()["nodes"])


HASHES = np.arange(48, dtype=np.uint8).reshape(3, 16)


def computed(worker: FakeNode, request_id: str, num_blocks: int) -> None:
    """Word that a part of the prompt is computed."""
    counts = np.zeros((2, 4), np.int16)
    assert worker.channel.send(Prefilling(request_id), tensors=(counts, HASHES[:num_blocks]))


def told_ahead(homes: list[FakeNode]) -> tuple[FakeNode, FetchAhead, int]:
    """The home that is to fetch, what it was told, and how many blocks."""
    for node in homes:
        while (envelope := node.channel.receive(0.5)) is not None:
            if isinstance(envelope.message, FetchAhead):
                return node, envelope.message, len(envelope.tensors[0])
    raise AssertionError("none of them was told to fetch")


def test_a_home_fetches_while_the_prompt_is_computed_and_is_the_one_that_goes_on(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    computed(worker, "r1", 1)
    home, told, count = told_ahead(scene.homes)
    assert (told.request_id, told.source.name, count) == ("r1", worker.name, 1)
    computed(worker, "r1", 3)
    again, _, count = told_ahead([home])
    assert again is home and count == 3, "the same home, all blocks so far"
    prefilled(worker, "r1")
    found, asked = scene.at_work(scene.homes)
    assert found is home and asked.handoff.source.name == worker.name


@pytest.mark.parametrize("how", ["aborted", "over with one token", "given up by its worker"])
def test_nobody_goes_on_fetching_for_a_request_that_has_ended(scene, how):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    computed(worker, "r1", 1)
    home, *_ = told_ahead(scene.homes)
    if how == "aborted":
        scene.client.send(Abort("r1"))
    elif how == "over with one token":
        worker.tell("r1", 0)
        worker.finish("r1", 1)
    else:
        worker.send(Failed("r1", "user", "request", "it is too long"))
    assert home.next(Abort, skip=MINE).request_id == "r1"


def test_a_home_that_goes_while_it_fetches_is_replaced_when_more_is_computed(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    computed(worker, "r1", 1)
    home, *_ = told_ahead(scene.homes)
    home.send(Stopping("on purpose"))
    [other] = [node for node in scene.homes if node is not home]
    other.next(PeersChanged, skip=MINE[1:])
    computed(worker, "r1", 3)
    assert told_ahead([other])[2] == 3
    prefilled(worker, "r1")
    assert scene.at_work([other])[0] is other


def test_a_worker_that_goes_between_two_parts_is_replaced_and_nothing_is_fetched_of_it(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    computed(worker, "r1", 1)
    told_ahead(scene.homes)
    worker.send(Stopping("on purpose"))
    [other] = [node for node in scene.workers if node is not worker]
    assert scene.at_work([other])[1].prefill_only
    prefilled(other, "r1")
    _, asked = scene.at_work(scene.homes)
    assert asked.handoff.source.name == other.name


def test_parts_of_requests_that_run_elsewhere_or_nowhere_are_ignored(scene):
    scene.client.submit("r1")
    worker, _ = scene.at_work(scene.workers)
    computed(scene.homes[0], "r1", 1)
    computed(worker, "stranger", 1)
    prefilled(worker, "r1")
    computed(worker, "r1", 1)
    home, _ = scene.at_work(scene.homes)
    home.finish("r1", 2)
    assert scene.client.next(Finished, skip=(Accepted, Tokens)).completion_tokens == 2
    assert all(node["in_flight"] == 0 for node in scene.client.status()["nodes"])
