"""Blocks fetched over loopback: from a node that has them, one that is not there, and one that damages what it sends."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from edge_runtime.cache.block_store import Blocks, BlockStore
from edge_runtime.clock import SystemClock
from edge_runtime.errors import Refusal
from edge_runtime.node.expert_service import ExpertService
from edge_runtime.node.handoff import BlockReceivers, FetchJob, Jobs, answer_fetch
from edge_runtime.protocol import Hello, KvBlocks, KvFetch, PeerAddress, Welcome
from edge_runtime.transport.endpoint import Server
from tests.support.block_stores import NAMES, filled, store
from tests.support.processes import free_port

CLOCK = SystemClock()
SOON_S = 10.0
HOME = Hello(node="home", role="home", model_hash="m")
SOURCE = Hello(node="source", role="home", model_hash="m")


def ignore() -> None:
    """A thread died; its fault is looked at."""


@contextmanager
def source_of(blocks: BlockStore | None) -> Iterator[PeerAddress]:
    """A node that hands these on."""
    with Server("127.0.0.1:0") as server:
        service = ExpertService(server, SOURCE, CLOCK, ignore)
        service.blocks = blocks
        service.start()
        yield PeerAddress("source", server.address)
        service.stop()
        service.join(SOON_S)
        assert service.fault is None


@contextmanager
def false_source(answer: Callable[[np.ndarray], Blocks]) -> Iterator[PeerAddress]:
    """A node that greets well and answers KvFetch as it likes."""
    done = threading.Event()
    with Server("127.0.0.1:0") as server:

        def serve() -> None:
            while not done.is_set():
                received = server.receive(0.05)
                if received is None:
                    continue
                peer, envelope = received
                if isinstance(envelope.message, Hello):
                    welcome = Welcome(node="source", role="home", model_hash="m")
                    server.send(peer, welcome, call_id=envelope.call_id)
                elif isinstance(envelope.message, KvFetch):
                    blocks = answer(envelope.tensors[0])
                    server.send(peer, KvBlocks(), call_id=envelope.call_id, tensors=blocks)

        thread = threading.Thread(target=serve)
        thread.start()
        yield PeerAddress("source", server.address)
        done.set()
        thread.join(SOON_S)


def fetch(source: PeerAddress, target: BlockStore, hashes: Sequence[bytes]) -> tuple[int, str]:
    """Fetch into `target`: how many blocks came, and why not all."""
    ended: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    receivers = BlockReceivers(HOME, None, CLOCK, deadline_s=SOON_S, died=ignore)
    job = FetchJob("r", hashes, target, lambda *taken: target.take(*taken), lambda *end: ended.put(end))
    receivers.fetch(source, job)
    try:
        return ended.get(timeout=SOON_S)
    finally:
        receivers.stop(SOON_S)
        assert receivers.fault is None


def test_blocks_come_as_they_are_and_only_those_that_are_missing():
    blocks = filled(NAMES[:5])
    target = store()
    target.take(NAMES[:2], blocks.read(NAMES[:2]))
    with source_of(blocks) as source:
        assert fetch(source, target, NAMES[:5]) == (3, "")
        assert fetch(source, target, NAMES[:5]) == (0, "")
    found, expected = target.read(NAMES[:5]), blocks.read(NAMES[:5])
    assert (found.rows == expected.rows).all() and (found.counts == expected.counts).all()


def test_a_source_that_has_given_some_away_hands_on_the_others():
    target = store()
    with source_of(filled(NAMES[:3])) as source:
        num_blocks, why = fetch(source, target, NAMES[:5])
    assert num_blocks == 3 == target.missing(NAMES[:5]) and "any more" in why


@pytest.mark.parametrize("what", ["nobody", "no KV"])
def test_a_source_without_blocks_costs_a_moment_and_an_explanation(what):
    if what == "nobody":
        num_blocks, why = fetch(PeerAddress("source", f"127.0.0.1:{free_port()}"), store(), NAMES[:2])
        assert "source" in why
    else:
        with source_of(None) as source:
            num_blocks, why = fetch(source, store(), NAMES[:2])
        assert why == "source holds no KV"
    assert num_blocks == 0


def test_damaged_blocks_are_never_kept():
    honest = filled(NAMES[:2])

    def damage(hashes: np.ndarray) -> Blocks:
        blocks = honest.read([row.tobytes() for row in hashes])
        rows = blocks.rows.copy()
        rows[0, 0] += 1
        return blocks._replace(rows=rows)

    target = store()
    with false_source(damage) as source:
        assert fetch(source, target, NAMES[:2]) == (0, "a chunk came damaged")
    assert target.pool.num_cached == 0


def test_another_node_than_was_named_is_not_believed():
    with source_of(filled(NAMES[:2])) as source:
        num_blocks, why = fetch(PeerAddress("attic", source.address), store(), NAMES[:2])
    assert num_blocks == 0 and "is source, expected attic" in why


@pytest.mark.parametrize(
    "hashes", [np.zeros((0, 16), np.uint8), np.zeros((2, 15), np.uint8), np.zeros((2000, 16), np.uint8)]
)
def test_questions_out_of_range_are_refused(hashes):
    with pytest.raises(Refusal, match="hands on 1 to 1024 blocks at a time, named by 16 bytes each"):
        answer_fetch(store(), hashes, "source")


def job(request_id: str, *, is_ahead: bool = False) -> FetchJob:
    return FetchJob(request_id, [], store(), ignore, ignore, is_ahead=is_ahead)


def test_requests_that_wait_go_before_those_that_are_still_computed():
    jobs = Jobs()
    ahead, same, other = job("a", is_ahead=True), job("a"), job("b")
    jobs.put(ahead)
    assert jobs.take() is ahead and not jobs.holds_up(ahead)
    jobs.put(same)
    assert not jobs.holds_up(ahead), "its own request gains by it"
    jobs.put(other)
    assert jobs.holds_up(ahead) and not jobs.holds_up(same)
    jobs.put(later := job("c", is_ahead=True))
    assert [jobs.take() for _ in range(3)] == [same, other, later]
    jobs.put(job("d"))
    jobs.close()
    assert jobs.take() is None, "nobody waits for what is left when all ends"


def test_a_fetch_for_nobody_yet_gives_way_and_what_came_is_not_fetched_again():
    """The source answers slowly; while one fetches ahead, another request comes that needs other blocks of it."""
    blocks = filled(NAMES[:6])
    target = store(12)
    came = threading.Event()
    asked_for: list[int] = []

    def answer(hashes: np.ndarray) -> Blocks:
        asked_for.append(len(hashes))
        came.wait(SOON_S)
        return blocks.read([row.tobytes() for row in hashes])

    ended: queue.SimpleQueue[tuple[str, int, str]] = queue.SimpleQueue()

    def fetch_job(name: str, hashes: Sequence[bytes], *, is_ahead: bool) -> FetchJob:
        return FetchJob(
            name,
            hashes,
            target,
            lambda *taken: target.take(*taken),
            lambda count, why: ended.put((name, count, why)),
            is_ahead=is_ahead,
        )

    receivers = BlockReceivers(HOME, None, CLOCK, deadline_s=SOON_S, died=ignore)
    with false_source(answer) as source:
        receivers.fetch(source, fetch_job("a", NAMES[:4], is_ahead=True))
        receivers.fetch(source, fetch_job("b", NAMES[4:6], is_ahead=False))
        came.set()
        found = {name: (count, why) for name, count, why in (ended.get(timeout=SOON_S) for _ in range(2))}
        assert found["b"] == (2, "")
        assert found["a"][1] in ("", "requests wait for others")
        receivers.fetch(source, fetch_job("a", NAMES[:4], is_ahead=False))
        assert ended.get(timeout=SOON_S)[2] == ""
    receivers.stop(SOON_S)
    assert target.missing(NAMES[:4]) == 4 and receivers.fault is None
    assert receivers.num_ahead <= receivers.num_blocks == 6
