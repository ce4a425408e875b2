"""Weights over real sockets: from peers before the coordinator, resumed after a loss, and never believed unseen."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from edge_runtime.errors import Refusal
from edge_runtime.protocol import (
    ChunkData,
    ChunkQuery,
    Hello,
    Manifest,
    ManifestQuery,
    RangesHeld,
    RangesQuery,
    Refused,
)
from edge_runtime.transport.endpoint import Channel
from edge_runtime.weights.fetch import Address, Fetcher, Link, ask_manifest
from edge_runtime.weights.manifest import CHUNK_BYTES, Chunk, chunks_of, digest_of, head_chunks
from edge_runtime.weights.service import MAX_WAITING, WeightsService
from edge_runtime.weights.stores import CacheFolder, FullFolder
from tests.support.clusters import free_ports_to_listen, wait_for
from tests.support.givers import CLOCK, Giver, garbage, short, silent_after
from tests.support.messages import expert_call

ME = Hello(node="me", role="loader")


@pytest.fixture
def givers(full: FullFolder) -> Iterator[Callable[..., Giver]]:
    """Starts givers of the whole folder, and stops them."""
    with contextlib.ExitStack() as stack:

        def start(name: str, store: object = full, **options: object) -> Giver:
            return stack.enter_context(Giver(name, store, **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture
def all_chunks(full: FullFolder) -> list[Chunk]:
    """Small chunks, so that there are many of them."""
    return [
        Chunk(index, at, min(at + 4096, entry.num_bytes))
        for index, entry in enumerate(full.manifest.files)
        for at in range(0, entry.num_bytes, 4096)
    ]


def fetch(
    cache: CacheFolder, chunks: list[Chunk], coordinator: Giver, *peers: Giver, **options: object
) -> Fetcher:
    addresses = [peer.address._replace(bandwidth_bps=1e9) for peer in peers]
    options = {"keys": None, "clock": CLOCK, "give_up_s": 0.5, "stall_s": 0.3} | options
    fetcher = Fetcher(cache, ME, coordinator.address, addresses, **options)  # type: ignore[arg-type]
    try:
        fetcher.fetch(chunks, lambda done, total, what: None)
    finally:
        fetcher.close()
    return fetcher


def coordinator(givers: Callable[..., Giver], **options: object) -> Giver:
    return givers("coordinator", gives_digests=True, **options)


def is_whole(cache: CacheFolder, full: FullFolder, chunks: list[Chunk]) -> bool:
    return all(cache.read(chunk) == full.read(chunk) for chunk in chunks)


def test_a_peer_gives_what_it_has_and_a_second_time_nothing_moves(givers, full, new_cache, all_chunks):
    first, peer = coordinator(givers), givers("peer")
    fetcher = fetch(new_cache(), all_chunks, first, peer)
    assert is_whole(new_cache(), full, all_chunks)
    assert fetcher.bytes_fetched == sum(entry.num_bytes for entry in full.manifest.files)
    assert (first.chunks_sent, peer.chunks_sent) == (0, len(all_chunks))
    assert peer.hello is not None and (peer.hello.role, peer.hello.node) == ("loader", "me")
    assert fetch(new_cache(), all_chunks, first, peer).bytes_fetched == 0
    assert peer.chunks_sent == len(all_chunks)


def test_without_peers_the_coordinator_gives_all(givers, full, new_cache, all_chunks):
    first = coordinator(givers)
    fetch(new_cache(), all_chunks, first)
    assert is_whole(new_cache(), full, all_chunks) and first.chunks_sent == len(all_chunks)


def test_a_peer_that_has_part_of_it_gives_that_part(givers, full, new_cache, all_chunks, tmp_path):
    part, held = CacheFolder(tmp_path / "other", full.manifest), all_chunks[::3]
    for chunk in held:
        part.write(chunk, full.read(chunk), digest_of(full.read(chunk)))
    first, peer = coordinator(givers), givers("peer", part)
    fetch(new_cache(), all_chunks, first, peer)
    assert is_whole(new_cache(), full, all_chunks)
    assert peer.chunks_sent == len(held) and first.chunks_sent == len(all_chunks) - len(held)


def test_a_source_lost_half_way_costs_only_what_was_on_its_way(givers, full, new_cache, all_chunks):
    first, peer = coordinator(givers), givers("peer", gone_after=10)
    fetcher = fetch(new_cache(), all_chunks, first, peer)
    assert is_whole(new_cache(), full, all_chunks)
    assert fetcher.bytes_fetched == sum(entry.num_bytes for entry in full.manifest.files)  # none of it twice
    assert 0 < peer.chunks_sent <= 10 and first.chunks_sent >= len(all_chunks) - 10


@pytest.mark.parametrize("change", [garbage, short, silent_after(3)], ids=["garbage", "short", "silent"])
def test_a_source_that_lies_or_falls_silent_is_left_for_another(givers, full, new_cache, all_chunks, change):
    first, peer = coordinator(givers), givers("peer", change=change)
    cache = new_cache()
    fetch(cache, all_chunks, first, peer)
    assert is_whole(cache, full, all_chunks) and new_cache().missing(all_chunks) == []
    assert peer.chunks_sent > 0 and first.chunks_sent > 0


def test_garbage_from_everybody_is_kept_by_nobody(givers, full, new_cache, all_chunks):
    first = coordinator(givers, change=garbage)
    cache = new_cache()
    with pytest.raises(
        Refusal,
        match=r"^me has nobody to fetch its weights from: nothing came for 0\.5 s \(.*not the model's\)",
    ):
        fetch(cache, all_chunks, first)
    assert cache.missing(all_chunks) == all_chunks


def test_what_came_before_everybody_was_gone_is_not_fetched_again(givers, full, new_cache, all_chunks):
    gone = coordinator(givers, gone_after=12)
    with pytest.raises(Refusal):
        fetch(new_cache(), all_chunks, gone)
    missing = new_cache().missing(all_chunks)
    assert 0 < len(missing) < len(all_chunks)
    back = coordinator(givers)
    fetch(new_cache(), all_chunks, back)
    assert back.chunks_sent == len(missing) and is_whole(new_cache(), full, all_chunks)


def test_peers_that_are_not_there_or_are_another_models_are_passed_over(givers, new_cache, all_chunks):
    first = coordinator(givers)
    stranger = givers("stranger")
    stranger._model_hash = "c" * 32
    nobody = Address("nobody", f"127.0.0.1:{free_ports_to_listen(1)[0]}")
    fetcher = Fetcher(new_cache(), ME, first.address, [nobody, stranger.address], keys=None, clock=CLOCK)
    fetcher.fetch(all_chunks, lambda done, total, what: None)
    fetcher.close()
    assert stranger.chunks_sent == 0 and first.chunks_sent == len(all_chunks)


def test_a_share_that_nobody_wants_any_more_is_left_at_once(givers, new_cache, all_chunks):
    slow = coordinator(givers, rate_bps=1e5)
    with pytest.raises(Refusal, match="not wanted any more"):
        fetch(new_cache(), all_chunks, slow, is_wanted=lambda: slow.chunks_sent < 2)


def test_progress_counts_what_moves_and_names_the_source(givers, new_cache, all_chunks):
    first, told = coordinator(givers), []
    fetcher = Fetcher(new_cache(), ME, first.address, [], keys=None, clock=CLOCK)
    fetcher.fetch(all_chunks, lambda *what: told.append(what))
    fetcher.close()
    total = sum(chunk.num_bytes for chunk in all_chunks)
    assert told[-1][:2] == (total, total) and "fetching weights from coordinator at" in told[-1][2]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


def test_a_manifest_is_asked_for_and_is_the_models(givers, full):
    first = coordinator(givers)
    with Channel(first.address.address, name="coordinator") as channel:
        link = Link(channel, ME)
        assert link.greet().model_hash == full.manifest.model_hash
        assert ask_manifest(link) == full.manifest
        assert {entry.name for entry in full.manifest.files} >= {"config.json", "tokenizer.json"}


# The service.


def answers(service: WeightsService, *questions: object) -> list[object]:
    for call_id, question in enumerate(questions):
        assert service.offer(b"peer", call_id, question) is None  # type: ignore[arg-type]
    replies: list = []
    wait_for(lambda: replies.extend(service.replies()) or len(replies) == len(questions), "all are answered")
    assert not service.is_busy
    service.stop()
    return [reply.message for reply in sorted(replies, key=lambda reply: reply.call_id)]


def test_questions_for_what_is_not_there_are_answered_with_no(full):
    model = full.manifest.model_hash
    chunk = head_chunks(full.manifest)[0]
    service = WeightsService(full, CLOCK)
    said = answers(
        service,
        ChunkQuery("f" * 32, *chunk),
        ChunkQuery(model, 99, 0, 10),
        ChunkQuery(model, 0, 5, 5),
        ChunkQuery(model, 0, 0, CHUNK_BYTES + 1),
        RangesQuery(model, [(0, 0, 2**50)]),
        RangesQuery(model, [tuple(chunk)], wants_digests=True),
        RangesQuery(model, [tuple(chunk)]),
        ManifestQuery(),
        ChunkQuery(model, *chunk),
    )
    assert all(isinstance(message, Refused) for message in said[:6])
    assert said[6] == RangesHeld([True]) and isinstance(said[7], Manifest) and isinstance(said[8], ChunkData)
    assert service.bytes_served == chunk.num_bytes


def test_files_that_cannot_be_read_any_more_cost_the_question_and_not_the_process(whole, tmp_path):
    import shutil

    from edge_runtime.model.checkpoint import Checkpoint

    copy = FullFolder(Checkpoint.open(shutil.copytree(whole.folder, tmp_path / "copy")))
    shutil.rmtree(tmp_path / "copy")
    chunk = head_chunks(copy.manifest)[0]
    [refused] = answers(WeightsService(copy, CLOCK), ChunkQuery(copy.manifest.model_hash, *chunk))
    assert isinstance(refused, Refused) and "No such file" in refused.detail


def test_too_many_questions_are_told_to_come_again_and_others_are_not_for_it(full):
    service = WeightsService(full, CLOCK, rate_bps=1e3)
    question = ChunkQuery(full.manifest.model_hash, *chunks_of([(0, 0, 100)])[0])
    said = [service.offer(b"peer", 0, question) for _ in range(MAX_WAITING + 1)]
    assert said[:-1] == [None] * MAX_WAITING
    assert said[-1] is not None and said[-1].reason == "busy" and said[-1].retry_after_s
    service.stop()
    call, _ = expert_call()
    assert WeightsService(full, CLOCK).offer(b"peer", 0, call) is not None
    nothing = WeightsService(None, CLOCK).offer(b"peer", 0, question)
    assert nothing is not None and nothing.reason == "weights"
