"""Where this machine has a model's bytes: in a whole folder, or in a cache that holds what was fetched so far.

The cache is a folder called by the model's hash, with the model's files under their own names. Weight files have their
full size from the start and are holes where nothing was fetched; a journal says what was, with the digest of each chunk,
and no chunk is used before its bytes agree with that. Several processes may share it: a chunk is written by whoever holds
the lock on its range, and by nobody twice.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from edge_runtime.config import write_whole
from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures.table import Part
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.protocol import FileEntry, Manifest
from edge_runtime.weights.manifest import Chunk, chunks_of, digest_of, file_entry, is_digest
from topology.units import in_one_unit

log = logging.getLogger(__name__)

CACHE_VARIABLE = "EDGE_RUNTIME_CACHE"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "calibration/*.json", "calibration/*.safetensors")
MAX_SMALL_BYTES = 64 << 20
MANIFEST, JOURNAL, LOCKS = ".manifest.json", ".journal", ".locks"
MAX_DIGESTS = 1 << 16  # remembered of a whole folder: of 16 GB
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store(Protocol):
    """Has chunks of one model. Each method may be called by any one thread at a time."""

    manifest: Manifest

    def holds(self, chunk: Chunk) -> bool:
        """Whether `read` will give it."""

    def read(self, chunk: Chunk) -> bytes:
        """Its bytes; OSError if they cannot be read any more."""

    def digest(self, chunk: Chunk) -> str:
        """Of a chunk that is held."""


class FullFolder:
    """A model folder that is whole; all of it may be given away."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._digests: dict[Chunk, str] = {}
        self.manifest = Manifest(
            checkpoint.model_hash, _entries(checkpoint), tied_head=checkpoint.spec.tied_head
        )

    def holds(self, chunk: Chunk) -> bool:
        return True

    def read(self, chunk: Chunk) -> bytes:
        return _read(self._folder / self.manifest.files[chunk.file].name, chunk)

    def digest(self, chunk: Chunk) -> str:
        found = self._digests.get(chunk)
        if found is None:
            if len(self._digests) >= MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]
            found = self._digests[chunk] = digest_of(self.read(chunk))
        return found


class CacheFolder:
    """What was fetched of one model.

    folder  a model folder that `Checkpoint` opens once the heads of its files are here
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        """root: of all models' caches. ConfigError if it cannot be written."""
        self.manifest = manifest
        self.folder = root / manifest.model_hash
        self._known: dict[Chunk, str] = {}  # digests of what was fetched at any time, by any process
        self._checked: set[Chunk] = set()  # and was found whole by this one
        self._journal_end = 0
        self._locks: list[int] = []
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._locks.append(os.open(self.folder / LOCKS, os.O_RDWR | os.O_CREAT, 0o644))
            fcntl.flock(self._locks[0], fcntl.LOCK_EX)
            try:
                self._begin()
            finally:
                fcntl.flock(self._locks[0], fcntl.LOCK_UN)

    def _begin(self) -> None:
        """Make every file with its size, holes all of it; forget what was fetched by another cut of the same model."""
        text = msgspec.json.encode(self.manifest)
        path = self.folder / MANIFEST
        if not path.exists() or path.read_bytes() != text:
            (self.folder / JOURNAL).write_bytes(b"")
            write_whole(path, text)
        for entry in self.manifest.files:
            file = self.folder / entry.name
            file.parent.mkdir(exist_ok=True)
            with file.open("ab") as made:
                if made.tell() != entry.num_bytes:
                    made.truncate(entry.num_bytes)
        self._read_journal()

    def missing(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that are not here whole, damaged ones among them; reads what it has not read before."""
        self._read_journal()
        return [chunk for chunk in chunks if not self._is_whole(chunk)]

    def holds(self, chunk: Chunk) -> bool:
        return chunk in self._checked

    def read(self, chunk: Chunk) -> bytes:
        return _read(self._path(chunk), chunk)

    def digest(self, chunk: Chunk) -> str:
        return self._known[chunk]

    def write(self, chunk: Chunk, data: bytes | memoryview, digest: str) -> None:
        """Keep the bytes of a chunk that was found to have this digest."""
        with self.writing(chunk.num_bytes):
            descriptor = os.open(self._path(chunk), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                at, view = chunk.start, memoryview(data)
                while at < chunk.end:
                    at += os.pwrite(descriptor, view[at - chunk.start :], at)
            finally:
                os.close(descriptor)
            with (self.folder / JOURNAL).open("ab", buffering=0) as journal:
                journal.write(f"{chunk.file} {chunk.start} {chunk.end} {digest}\n".encode())
        self._known[chunk] = digest
        self._checked.add(chunk)

    @contextlib.contextmanager
    def locked(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """While inside, no other process fetches these chunks; ends when the process does, at the latest."""
        spans: list[tuple[int, int]] = []  # all processes lock in ascending order
        for chunk in sorted(chunks):
            start = (chunk.file << 42) + chunk.start
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + chunk.num_bytes)
            else:
                spans.append((start, start + chunk.num_bytes))
        try:
            for start, end in spans:
                fcntl.lockf(self._locks[0], fcntl.LOCK_EX, end - start, start)
            yield
        finally:
            for start, end in spans:
                fcntl.lockf(self._locks[0], fcntl.LOCK_UN, end - start, start)

    @contextlib.contextmanager
    def writing(self, num_bytes: int = 0) -> Iterator[None]:
        """What keeps the cache from being written, in one sentence."""
        try:
            yield
        except OSError as error:
            self._refuse_if_full(num_bytes, is_full=error.errno in NO_ROOM)
            raise ConfigError(
                f"the cache folder {self.folder} cannot be written ({error.strerror}); "
                f"name another one with {CACHE_VARIABLE}"
            ) from error

    def is_here(self, name: str, start: int, end: int) -> bool:
        """Whether these bytes of a file were found whole by this process."""
        index = next(i for i, entry in enumerate(self.manifest.files) if entry.name == name)
        return self._checked.issuperset(chunks_of([(index, start, end)]))

    def refuse_if_full(self, num_bytes: int) -> None:
        """ConfigError if so many bytes more have no room."""
        self._refuse_if_full(num_bytes, is_full=False)

    def _refuse_if_full(self, num_bytes: int, *, is_full: bool) -> None:
        available = free_bytes(self.folder)
        if is_full or num_bytes > available:
            wanted, there = in_one_unit(num_bytes, available)
            raise ConfigError(
                f"{wanted} of weights are needed and {there} are available in {self.folder}; make room "
                f"there, or name another folder with {CACHE_VARIABLE}"
            )

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def _path(self, chunk: Chunk) -> Path:
        return self.folder / self.manifest.files[chunk.file].name

    def _is_whole(self, chunk: Chunk) -> bool:
        if chunk in self._checked:
            return True
        digest = self._known.get(chunk)
        if digest is None:
            return False
        try:
            is_whole = digest_of(self.read(chunk)) == digest
        except OSError:
            is_whole = False
        if is_whole:
            self._checked.add(chunk)
        else:
            log.warning(
                "%s: bytes %d to %d are not what was fetched; they are fetched again",
                self._path(chunk),
                chunk.start,
                chunk.end,
            )
            del self._known[chunk]
        return is_whole

    def _read_journal(self) -> None:
        """Take in what was added since; a line that was cut short by a crash is passed over."""
        try:
            with (self.folder / JOURNAL).open("rb") as journal:
                journal.seek(self._journal_end)
                *lines, rest = journal.read().split(b"\n")
                self._journal_end = journal.tell() - len(rest)
        except OSError:
            return
        for line in lines:
            words = line.decode("ascii", "replace").split()
            if len(words) == 4 and all(word.isdecimal() for word in words[:3]) and is_digest(words[3]):
                chunk = Chunk(*map(int, words[:3]))
                if chunk.file < len(self.manifest.files) and chunk not in self._checked:
                    self._known[chunk] = words[3]


def caches_folder() -> Path:
    """Where this machine keeps fetched models: $EDGE_RUNTIME_CACHE, else edge-runtime in the user's cache folder."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "edge-runtime"


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written there."""
    while not folder.exists():
        folder = folder.parent
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _entries(checkpoint: Checkpoint) -> list[FileEntry]:
    """The weight files, and what small files lie beside them."""
    heads = {file.path.name: 8 + len(file.header_bytes) for file in checkpoint.files}
    entries = [file_entry(file.path.name, file.num_bytes, heads[file.path.name]) for file in checkpoint.files]
    for pattern in SMALL_FILES:
        for path in checkpoint.folder.glob(pattern):
            name = path.relative_to(checkpoint.folder).as_posix()
            if path.is_file() and not path.name.startswith(".") and path.stat().st_size <= MAX_SMALL_BYTES:
                entries.append(file_entry(name, path.stat().st_size))
    return sorted(entries, key=lambda entry: entry.name)


def _read(path: Path, chunk: Chunk) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        data = os.pread(descriptor, chunk.num_bytes, chunk.start)
    finally:
        os.close(descriptor)
    if len(data) != chunk.num_bytes:
        raise OSError(errno.EIO, f"{len(data)} of {chunk.num_bytes} bytes were there", str(path))
    return data


def chunk_ranges(checkpoint: Checkpoint, store: Store, parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Where these parts of a checkpoint lie, as (file, start, end) of the store's manifest."""
    index_of = {entry.name: index for index, entry in enumerate(store.manifest.files)}
    return [(index_of[name], start, end) for name, start, end in checkpoint.ranges(parts)]
