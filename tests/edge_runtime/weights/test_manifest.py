"""How a model's bytes are cut: every byte once, the same cut for the same share, and nothing outside the model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import FileEntry, Manifest
from edge_runtime.weights.manifest import (
    CHUNK_BYTES,
    Chunk,
    check_manifest,
    chunks_of,
    digest_of,
    head_chunks,
    why_not_served,
)

MODEL = Manifest("ab" * 16, [FileEntry("config.json", 100, 100), FileEntry("model.safetensors", 10**6, 500)])
ranges = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.integers(1, 3 * CHUNK_BYTES)).map(
        lambda found: (found[0], found[1], found[1] + found[2])
    ),
    max_size=6,
)


@given(ranges)
def test_chunks_cover_each_range_exactly_and_are_never_too_long(wanted):
    chunks = chunks_of(wanted)
    assert all(0 < chunk.num_bytes <= CHUNK_BYTES for chunk in chunks)
    for file, start, end in wanted:
        assert sum(chunk.num_bytes for chunk in chunks_of([(file, start, end)])) == end - start
        assert set(chunks_of([(file, start, end)])) <= set(chunks)
    assert sum(chunk.num_bytes for chunk in chunks) == sum(end - start for _, start, end in set(wanted))


def test_heads_are_what_lies_before_the_tensors_and_small_files_whole():
    assert head_chunks(MODEL) == [Chunk(0, 0, 100), Chunk(1, 0, 500)]


@pytest.mark.parametrize(
    "chunk",
    [(2, 0, 1), (0, 0, 101), (0, 50, 50), (0, 60, 50), (1, 0, CHUNK_BYTES + 1), (1, 10**6 - 1, 10**6 + 1)],
)
def test_bytes_that_are_no_chunk_of_the_model_are_given_to_nobody(chunk):
    assert why_not_served(MODEL, Chunk(*chunk))
    assert not why_not_served(MODEL, Chunk(1, 10**6 - 1, 10**6))


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/passwd",
        "a/b/c",
        "",
        ".journal",
        "a/.hidden",
        "x\\y",
        "a\nb",
        "a/",
        "..",
        "a/..",
    ],
)
def test_a_manifest_that_names_files_outside_its_folder_is_refused(name):
    with pytest.raises(ProtocolError):
        check_manifest(Manifest("ab" * 16, [FileEntry(name, 1, 1)]))


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest("", []),
        Manifest("../" + "a" * 29, []),
        Manifest("AB" * 16, []),
        Manifest("ab" * 16, [FileEntry("a", 1, 1), FileEntry("a", 1, 1)]),
        Manifest("ab" * 16, [FileEntry("a", 1, 2)]),
        Manifest("ab" * 16, [FileEntry("a", 2**60, 2)]),
    ],
)
def test_a_manifest_that_no_model_has_is_refused(manifest):
    with pytest.raises(ProtocolError):
        check_manifest(manifest)


def test_a_digest_tells_bytes_apart():
    assert digest_of(b"a") == digest_of(memoryview(b"a")) != digest_of(b"b")
    check_manifest(MODEL)
