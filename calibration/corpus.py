"""A folder of labelled text: `DOMAIN/*.jsonl[.gz]` or `DOMAIN/*.txt`, and a fair sample of its documents.

Files are read as a stream and a sample is kept, so memory does not grow with the corpus. Knows no tokenizer and no
model.

A domain's files belong to a split if their names begin with it (`train.jsonl`, `calib-2.txt`, `valid.jsonl.gz`). Where no
file of a domain says so, every tenth document is for validation and the others are for calibration.
"""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

from edge_runtime.errors import CorpusError

Split = Literal["calibration", "validation"]

PREFIXES: Mapping[str, tuple[str, ...]] = {
    "train": ("train",),
    "calibration": ("calib",),
    "validation": ("valid", "val", "dev", "test"),
}
VALIDATION_EVERY = 10  # documents of a domain without split files
SUFFIXES = (".jsonl", ".jsonl.gz", ".txt")
PART_CHARS = 4_000  # a .txt file is cut at the first empty line behind so many
MAX_PART_CHARS = 64_000  # and here at the latest
MAX_LINE_BYTES = 16 << 20


class Domain(NamedTuple):
    """One label: the files of a split, and which of their documents belong to it."""

    name: str
    files: tuple[Path, ...]
    every: Literal["all", "tenth", "others"]


Seen = Callable[[int], None]
"""Called with bytes read from disk since the last call."""


def find_domains(folder: Path, split: Split) -> list[Domain]:
    """The corpus's domains by name, each with the files of one split; a file beside the folders is a domain of its own."""
    if not folder.is_dir():
        raise CorpusError(
            f"corpus folder {folder} does not exist; it holds DOMAIN/*.jsonl[.gz] or DOMAIN/*.txt"
        )
    found = []
    for path in sorted(folder.iterdir()):
        files = sorted(each for each in path.rglob("*") if _is_text(each)) if path.is_dir() else [path]
        if path.is_dir() or _is_text(path):
            domain = _of_split(path.name.split(".")[0], files, split)
            if domain.files:
                found.append(domain)
    if not found:
        raise CorpusError(
            f"corpus folder {folder} holds no text for {split}: expected DOMAIN/*.jsonl, *.jsonl.gz or *.txt; "
            f"`edge-runtime testbed corpus` makes one"
        )
    return found


def _is_text(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES) and not path.name.startswith(".")


def _of_split(name: str, files: Sequence[Path], split: Split) -> Domain:
    split_of = {path: _split_of(path.name) for path in files}
    if not any(split_of.values()):
        return Domain(name, tuple(files), "tenth" if split == "validation" else "others")
    wanted = [path for path in files if split_of[path] == split]
    if not wanted and split == "calibration":
        wanted = [path for path in files if split_of[path] == "train"]
    return Domain(name, tuple(wanted), "all")


def _split_of(file_name: str) -> str | None:
    for split, prefixes in PREFIXES.items():
        if file_name.lower().startswith(prefixes):
            return split
    return None


def documents(domain: Domain, seen: Seen = lambda num_bytes: None) -> Iterator[str]:
    """Every document of a domain, as it lies in its files."""
    number = 0
    for path in domain.files:
        for text in read_documents(path, seen):
            is_tenth = number % VALIDATION_EVERY == VALIDATION_EVERY - 1
            number += 1
            if domain.every == "all" or is_tenth == (domain.every == "tenth"):
                yield text


def read_documents(path: Path, seen: Seen = lambda num_bytes: None) -> Iterator[str]:
    """The documents of one file: each line's "text" of jsonl, parts of about 4,000 characters of plain text."""
    try:
        with path.open("rb") as raw:
            file: IO[bytes] = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw  # type: ignore[assignment]
            texts = _jsonl(path, file) if ".jsonl" in path.suffixes else _parts(path, file)
            at = 0
            for text in texts:
                seen(raw.tell() - at)
                at = raw.tell()
                yield text
            seen(raw.tell() - at)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} near {error.object[:40]!r}; convert it"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path} cannot be read: {why}") from error


def _jsonl(path: Path, file: IO[bytes]) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise CorpusError(f"{path}, line {number} has more than {MAX_LINE_BYTES} bytes; cut it")
        if not line.strip():
            continue
        try:
            text = json.loads(line.decode("utf-8-sig"))["text"]
            if not isinstance(text, str):
                raise TypeError
        except UnicodeDecodeError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CorpusError(
                f'{path}, line {number}: found {line[:40]!r}, expected a JSON object with a "text"'
            ) from None
        if text.strip():
            yield text


def _parts(path: Path, file: IO[bytes]) -> Iterator[str]:
    part: list[str] = []
    size = 0
    while line := file.readline(MAX_PART_CHARS):
        text = _decoded(line, file)
        part.append(text)
        size += len(text)
        if (size >= PART_CHARS and not text.strip()) or size >= MAX_PART_CHARS:
            yield "".join(part)
            part, size = [], 0
    if "".join(part).strip():
        yield "".join(part)


def _decoded(line: bytes, file: IO[bytes]) -> str:
    """A line's text; one that was cut inside a character gets the rest of it."""
    for _ in range(3):
        try:
            return line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data" or not (more := file.read(1)):
                raise
            line += more
    return line.decode("utf-8-sig")


def sample_documents(
    domains: Sequence[Domain],
    per_domain: int,
    seed: int,
    *,
    max_chars: int,
    seen: Seen = lambda num_bytes: None,
) -> dict[str, list[str]]:
    """At most `per_domain` documents of each domain, every one as likely as another; the same for the same seed.

    max_chars   a document's text beyond is not kept
    """
    found: dict[str, list[str]] = {}
    for domain in domains:
        draw = random.Random(f"{seed} {domain.name}")
        kept: list[str] = []
        for number, text in enumerate(documents(domain, seen)):
            if len(kept) < per_domain:
                kept.append(text[:max_chars])
            elif (place := draw.randrange(number + 1)) < per_domain:
                kept[place] = text[:max_chars]
        draw.shuffle(kept)
        found[domain.name] = kept
    return found


def num_bytes(domains: Sequence[Domain]) -> int:
    """Bytes of all files on disk."""
    return sum(path.stat().st_size for domain in domains for path in domain.files)
