"""A cache of part of a model: reads as the whole folder does, trusts nothing that has changed, and is shared safely."""

import os
import subprocess
import sys

import pytest
import torch

from edge_runtime.errors import CheckpointError, ConfigError
from edge_runtime.model.build import load_experts, load_trunk, trunk_names
from edge_runtime.model.checkpoint import Checkpoint, Known
from edge_runtime.weights.manifest import chunks_of, digest_of, head_chunks
from edge_runtime.weights.stores import CacheFolder, FullFolder, chunk_ranges
from kernels import ops
from tests.support.families import write_variant
from topology.ids import ExpertId

EXPERTS = [ExpertId(1, 3), ExpertId(2, 0)]


def fill(cache: CacheFolder, full, chunks) -> None:
    for chunk in chunks:
        data = full.read(chunk)
        cache.write(chunk, data, digest_of(data))


def opened(cache: CacheFolder, full) -> Checkpoint:
    fill(cache, full, head_chunks(full.manifest))
    known = Known(full.manifest.model_hash, full.manifest.tied_head, cache.is_here)
    return Checkpoint.open(cache.folder, known)


def test_a_share_reads_from_its_chunks_alone_as_from_the_whole_folder(whole, full, new_cache):
    cache = new_cache()
    part = opened(cache, full)
    assert part.model_hash == whole.model_hash and part.spec == whole.spec
    wanted = chunks_of(chunk_ranges(part, cache, part.expert_names(EXPERTS)))
    assert sum(chunk.num_bytes for chunk in wanted) == sum(map(part.stored_bytes, part.expert_names(EXPERTS)))
    fill(cache, full, wanted)
    store, expected = (load_experts(found, whole.spec, EXPERTS) for found in (part, whole))
    x = torch.randn(4, whole.spec.width, generator=torch.Generator().manual_seed(1))
    for expert in EXPERTS:
        pairs = torch.arange(4, dtype=torch.int32), torch.full((4,), expert.index, dtype=torch.int32)
        outputs = [ops.grouped_ffn(x, *pairs, found.bank(expert.layer)) for found in (store, expected)]
        assert torch.equal(*outputs)


def test_what_was_not_fetched_is_an_error_and_no_zeros(whole, full, new_cache):
    part = opened(new_cache(), full)
    with pytest.raises(CheckpointError, match="were not fetched"):
        load_experts(part, part.spec, EXPERTS)
    with pytest.raises(CheckpointError, match="were not fetched"):
        load_trunk(part, part.spec, 0, part.spec.num_layers, context_tokens=64)


def test_the_cache_takes_the_room_of_what_was_fetched(full, new_cache):
    cache = new_cache()
    entry = next(entry for entry in full.manifest.files if entry.name.endswith(".safetensors"))
    found = os.stat(cache.folder / entry.name)
    assert found.st_size == entry.num_bytes and found.st_blocks == 0


def test_a_second_process_finds_what_the_first_one_fetched(full, new_cache):
    first, second = new_cache(), new_cache()
    chunks = head_chunks(full.manifest)
    assert second.missing(chunks) == chunks
    fill(first, full, chunks)
    assert second.missing(chunks) == [] and new_cache().missing(chunks) == []
    assert second.holds(chunks[0]) and second.read(chunks[0]) == full.read(chunks[0])


@pytest.mark.parametrize("how", ["one byte", "cut short", "emptied", "gone"])
def test_damage_is_seen_by_the_next_process_and_only_that_is_missing(full, new_cache, how):
    chunks = head_chunks(full.manifest)
    cache = new_cache()
    fill(cache, full, chunks)
    index = next(i for i, entry in enumerate(full.manifest.files) if entry.name == "config.json")
    path = cache.folder / "config.json"
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"one byte": b"?" + content[1:], "cut short": content[:-3], "emptied": b""}[how])
    later = new_cache()
    assert later.missing(chunks) == [chunk for chunk in chunks if chunk.file == index]
    fill(later, full, later.missing(chunks))
    assert path.read_bytes() == content and new_cache().missing(chunks) == []


@pytest.mark.parametrize(
    "line", [b"0 0 10", b"x y z " + b"a" * 32 + b"\n", b"9999 0 10 " + b"a" * 32 + b"\n"]
)
def test_a_journal_with_nonsense_in_it_costs_nothing_but_its_line(full, new_cache, line):
    cache, chunks = new_cache(), head_chunks(full.manifest)
    with (cache.folder / ".journal").open("ab") as journal:
        journal.write(line)
        if not line.endswith(b"\n"):  # what a crash cuts short runs into the next entry
            journal.write(b"\n")
    fill(cache, full, chunks)
    assert new_cache().missing(chunks) == []


def test_another_cut_of_the_same_model_starts_over(full, new_cache, tmp_path):
    cache, chunks = new_cache(), head_chunks(full.manifest)
    fill(cache, full, chunks)
    (cache.folder / ".manifest.json").write_bytes(b"{}")
    assert new_cache().missing(chunks) == chunks


def test_no_room_says_how_much_is_needed_and_there(new_cache):
    message = r"1048576\.0 TiB of weights are needed and [0-9.]+ TiB are available in .*EDGE_RUNTIME_CACHE"
    with pytest.raises(ConfigError, match=message):
        new_cache().refuse_if_full(2**60)
    new_cache().refuse_if_full(1)


def test_a_disk_that_is_full_meanwhile_is_one_sentence(full, new_cache):
    """/dev/full refuses every write as a full disk does."""
    cache, chunk = new_cache(), head_chunks(full.manifest)[0]
    path = cache.folder / full.manifest.files[chunk.file].name
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(
        ConfigError, match=r"^[\d.]+ (\w+) of weights are needed and [\d.]+ \1 are available in [^\n]*$"
    ):
        cache.write(chunk, full.read(chunk), "a" * 32)


def test_a_cache_that_cannot_be_written_is_one_sentence(full, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"^the cache folder .* cannot be written \(Not a directory\); [^\n]*$"
    ):
        CacheFolder(tmp_path / "file" / "cache", full.manifest)


LOCK_AND_TELL = """
import sys
from pathlib import Path
from edge_runtime.protocol import FileEntry, Manifest
from edge_runtime.weights.manifest import Chunk
from edge_runtime.weights.stores import CacheFolder

cache = CacheFolder(Path(sys.argv[1]), Manifest("ab" * 16, [FileEntry("a.safetensors", 1000, 10)]))
with cache.locked([Chunk(0, 100, 200), Chunk(0, 200, 300)]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_chunk_is_fetched_by_one_process_at_a_time_and_freed_when_that_ends(tmp_path):
    """The other process holds bytes 100 to 300 until it is killed."""
    import fcntl

    arguments = [sys.executable, "-c", LOCK_AND_TELL, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with (tmp_path / ("ab" * 16) / ".locks").open("r+b") as locks:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 100, 300)  # its neighbours are free
            with pytest.raises(BlockingIOError):
                fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 299)
            other.kill()
            other.wait()
            fcntl.lockf(locks, fcntl.LOCK_EX, 200, 100)


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("deepseek_v2", "fused experts"),
        ("gemma4", "whole model with other towers"),
        ("gpt_oss", "mxfp4"),
        ("qwen3_moe", "untied head"),
    ],
)
def test_a_share_of_any_family_is_whole_once_its_chunks_are_here(family, variant, tmp_path):
    """Fused experts, halves and scales included."""
    whole = Checkpoint.open(write_variant(family, variant, tmp_path / "model"))
    full = FullFolder(whole)
    cache = CacheFolder(tmp_path / "cache", full.manifest)
    part, spec = opened(cache, full), whole.spec
    experts = [ExpertId(layer, 1) for layer, found in enumerate(spec.layers) if found.gate is not None]
    parts = [*trunk_names(part, spec, 0, spec.num_layers), *part.expert_names(experts)]
    chunks = chunks_of(chunk_ranges(part, cache, parts))
    fill(cache, full, chunks)
    assert sum(chunk.num_bytes for chunk in chunks) < 0.8 * whole.num_bytes
    trunk = load_trunk(part, spec, 0, spec.num_layers, context_tokens=64)
    store = load_experts(part, spec, experts)
    assert trunk.nbytes == load_trunk(whole, spec, 0, spec.num_layers, context_tokens=64).nbytes
    assert len(store) == len(experts) and not cache.missing(chunks)
    for name, start, end in part.ranges(parts):
        found = [(folder / name).read_bytes()[start:end] for folder in (cache.folder, whole.folder)]
        assert found[0] == found[1] and any(found[0])
