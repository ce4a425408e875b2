"""What a model's files are and how their bytes are cut for the way: chunks, each with a digest. Pure.

A chunk is part of one stored tensor (or of one expert's rows of it), of a header, or of a small file, so that the same
share always gives the same chunks, whoever asks. Knows no disk and no socket.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import FileEntry, Manifest

CHUNK_BYTES = 256 << 10  # at 100 Mbit/s this holds a link for 21 ms
MAX_CHUNKS = 2048  # that one message may name
MAX_FILE_BYTES = 1 << 42
HEX_DIGITS = frozenset("0123456789abcdef")


class Chunk(NamedTuple):
    """Bytes [start, end) of one file, by its position in the manifest."""

    file: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def digest_of(data: bytes | memoryview) -> str:
    """32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def chunks_of(ranges: Iterable[tuple[int, int, int]]) -> list[Chunk]:
    """Ranges (file, start, end) cut into chunks, each once, in the order in which they lie in the files."""
    return [
        Chunk(file, at, min(at + CHUNK_BYTES, end))
        for file, start, end in sorted(set(ranges))
        for at in range(start, end, CHUNK_BYTES)
    ]


def head_chunks(manifest: Manifest) -> list[Chunk]:
    """What every node needs: config, tokenizer, and what lies before the tensors of each weight file."""
    return chunks_of((index, 0, entry.head_bytes) for index, entry in enumerate(manifest.files))


def batches(chunks: Sequence[Chunk], size: int) -> list[Sequence[Chunk]]:
    return [chunks[first : first + size] for first in range(0, len(chunks), size)]


def why_not_served(manifest: Manifest, chunk: Chunk) -> str:
    """Why nobody gives away these bytes; empty if they are a chunk of the model."""
    if chunk.file >= len(manifest.files):
        return f"the model has {len(manifest.files)} files, found number {chunk.file}"
    entry = manifest.files[chunk.file]
    if not 0 <= chunk.start < chunk.end <= entry.num_bytes or chunk.num_bytes > CHUNK_BYTES:
        return (
            f"bytes {chunk.start} to {chunk.end} of {entry.name} are no chunk: it has {entry.num_bytes} bytes, "
            f"and a chunk at most {CHUNK_BYTES}"
        )
    return ""


def check_manifest(manifest: Manifest) -> None:
    """Raise ProtocolError for one that would make us write outside a folder of our own, or what no disk has."""
    names = [entry.name for entry in manifest.files]
    if not is_digest(manifest.model_hash):
        raise ProtocolError(f"a model is called by 32 hex digits, found {manifest.model_hash!r:.80}")
    if len(set(names)) != len(names):
        raise ProtocolError("the model's files do not have different names")
    for entry in manifest.files:
        if not _is_plain_path(entry.name):
            raise ProtocolError(f"{entry.name!r:.80} is no name of a model's file")
        if not 0 <= entry.head_bytes <= entry.num_bytes <= MAX_FILE_BYTES:
            raise ProtocolError(f"{entry.name} has {entry.num_bytes} bytes, {entry.head_bytes} of them first")


def is_digest(text: str) -> bool:
    return len(text) == 32 and set(text) <= HEX_DIGITS


def _is_plain_path(name: str) -> bool:
    """Plain file names, at most one folder deep; none hidden, which our own files are."""
    parts = name.split("/")
    return len(parts) <= 2 and all(
        part and not part.startswith(".") and "\\" not in part and part.isprintable() for part in parts
    )


def file_entry(name: str, num_bytes: int, head_bytes: int | None = None) -> FileEntry:
    """An entry; a file without tensors is needed whole."""
    return FileEntry(name, num_bytes, num_bytes if head_bytes is None else head_bytes)
