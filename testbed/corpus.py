"""Builds a labelled corpus from what a machine has: sources of Python and of installed packages, their data and documents,
docstrings, and message catalogues in many languages.

Every domain is split by source file, so that no file feeds both calibration and validation. What is written stays on the
machine: it is other people's text under their licences, which `SOURCES.md` lists. Knows no model.
"""

import ast
import gzip
import hashlib
import json
import os
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import distributions
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from edge_runtime.errors import CorpusError

PART_CHARS = 3_600
LEAST_PART_CHARS = 200
MAX_FILE_BYTES = 2 << 20
LEAST_DOCUMENTS = 20
LEAST_DOMAINS = 2
LEAST_FILES = 10  # below this a domain is split by part, since its files are too few
MAX_PARTS = 12  # of one file, so that no file is most of a split
SPLITS = {"valid": 0.05, "calib": 0.15, "train": 0.8}  # name, and share of documents
KINDS: Mapping[str, tuple[str, ...]] = {
    "python": (".py",),
    "c": (".h", ".c", ".hpp", ".cpp", ".cc"),
    "javascript": (".js",),
    "json": (".json",),
    "csv": (".csv",),
    "markup": (".html", ".xml", ".xsl", ".svg", ".css"),
    "settings": (".yaml", ".yml", ".toml", ".ini", ".cfg", ".cmake"),
}
PROSE = "prose"
MO_MAGIC = 0x950412DE
LEAST_LETTERS = 0.5  # of a translation: what is only numbers and marks is no language


class Source(NamedTuple):
    """One file that gives text to one domain."""

    domain: str
    path: Path
    read: Callable[[Path], str]


class Built(NamedTuple):
    """What came of one domain; documents by split."""

    domain: str
    documents: dict[str, int]
    chars: int
    files: int


def default_roots() -> list[Path]:
    """Python's library, the installed packages and the system's message catalogues."""
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), Path(paths["purelib"]), Path(paths["platlib"]), Path("/usr/share/locale")]
    return [root for root in dict.fromkeys(root.resolve() for root in roots) if root.is_dir()]


def build_corpus(
    out: Path,
    roots: Sequence[Path],
    *,
    chars_per_domain: int = 1_000_000,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[list[Built], dict[str, int]]:
    """Write OUT/DOMAIN/{train,calib,valid}.jsonl.gz and OUT/SOURCES.md from the files below some folders.

    returns   the domains that were written, and documents of those that were too small
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CorpusError(f"{out} is there already and not empty; name a new folder for the corpus")
    for root in roots:
        if not root.is_dir():
            raise CorpusError(f"folder {root} does not exist, so no text can be taken from it")
    above = next(each for each in out.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):  # gathering takes minutes, so look first
        raise CorpusError(f"{out} cannot be made in {above}; name another folder for the corpus")
    sources = find_sources(roots)
    built, small = [], {}
    found = {domain: list(each) for domain, each in sorted(sources.items())}
    kept: dict[str, dict[str, list[str]]] = {}
    for number, (domain, each) in enumerate(found.items()):
        progress("gather", number, len(found))
        texts, chars, files = gather(each, chars_per_domain)
        count = sum(map(len, texts.values()))
        if count < LEAST_DOCUMENTS or not all(texts.values()):
            small[domain] = count
            continue
        kept[domain] = texts
        built.append(Built(domain, {split: len(texts[split]) for split in texts}, chars, files))
    progress("gather", len(found), len(found))
    if len(built) < LEAST_DOMAINS:
        said = ", ".join(f"{domain} {count}" for domain, count in sorted(small.items())) or "nothing"
        raise CorpusError(
            f"{len(built)} domains of at least {LEAST_DOCUMENTS} documents were found below "
            f"{', '.join(map(str, roots))}, needed are {LEAST_DOMAINS} (too small: {said}); "
            f"install more packages (Django brings many languages) or give --root FOLDER"
        )
    for domain, texts in kept.items():
        _write(out / domain, domain, texts)
    (out / "SOURCES.md").write_text(_sources_page(roots, built), encoding="utf-8")
    return built, small


def find_sources(roots: Sequence[Path]) -> dict[str, list[Source]]:
    """Every usable file by domain, in an order that a hash of its name gives: the first ones are a fair sample."""
    found: dict[str, dict[str, Source]] = {}

    def add(name: str, source: Source) -> None:
        found.setdefault(source.domain, {}).setdefault(name, source)

    kind_of = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
    for root in roots:
        others = [other for other in roots if other != root and other.is_relative_to(root)]
        for path in sorted(root.rglob("*")):
            if any(path.is_relative_to(other) for other in others) or not _is_usable(path):
                continue
            name = path.relative_to(root).as_posix()
            if path.suffix == ".mo":
                language = _language_of(path)
                if language is not None:
                    add(name, Source(language, path, read_catalogue))
            elif path.name in ("METADATA", "PKG-INFO") or path.suffix in (".md", ".rst"):
                add(name, Source(PROSE, path, _read_text))
            elif path.suffix in kind_of:
                add(name, Source(kind_of[path.suffix], path, _read_text))
                if path.suffix == ".py":
                    add(name, Source(PROSE, path, read_docstrings))
    return {
        domain: [by_name[name] for name in sorted(by_name, key=_hash)] for domain, by_name in found.items()
    }


def _is_usable(path: Path) -> bool:
    if path.is_symlink() or not path.is_file() or "__pycache__" in path.parts:
        return False
    return path.name in ("METADATA", "PKG-INFO") or path.suffix in _SUFFIXES


_SUFFIXES = {suffix for suffixes in KINDS.values() for suffix in suffixes} | {".mo", ".md", ".rst"}


def _language_of(path: Path) -> str | None:
    """The language of `.../LANGUAGE/LC_MESSAGES/NAME.mo` without its country: pt_BR is pt. English ones are the originals."""
    if len(path.parts) < 3 or path.parts[-2] != "LC_MESSAGES":
        return None
    language = path.parts[-3].split("_")[0].split("@")[0].split(".")[0].lower()
    return language if language.isalpha() and language != "en" else None


def gather(sources: Sequence[Source], most_chars: int) -> tuple[dict[str, list[str]], int, int]:
    """The documents of a domain by split, until there are so many characters; how many, and of how many files.

    No document is there twice. Each file goes to the split that lags most behind its share; of a domain of very few
    files each part does.
    """
    texts: dict[str, list[str]] = {name: [] for name in SPLITS}
    seen: set[bytes] = set()
    chars = files = 0
    by_part = len(sources) < LEAST_FILES
    for source in sources:
        if chars >= most_chars:
            break
        parts = []
        for part in islice(cut(source.read(source.path)), MAX_PARTS):
            key = hashlib.blake2b(part.encode(), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                parts.append(part)
        for group in [[part] for part in parts] if by_part else [parts]:
            split = min(SPLITS, key=lambda name: len(texts[name]) / SPLITS[name])
            texts[split] += group
        chars += sum(map(len, parts))
        files += bool(parts)
    return texts, chars, files


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def cut(text: str) -> Iterator[str]:
    """A text in parts of about 3,600 characters, cut at ends of lines; the shortest are left out."""
    part: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), PART_CHARS):
            piece = line[start : start + PART_CHARS]
            if part and size + len(piece) > PART_CHARS:
                yield from _worth_keeping(part)
                part, size = [], 0
            part.append(piece)
            size += len(piece)
    yield from _worth_keeping(part)


def _worth_keeping(part: list[str]) -> Iterator[str]:
    text = "".join(part).strip()
    if len(text) >= LEAST_PART_CHARS:
        yield text


def _read_text(path: Path) -> str:
    """A file's text; nothing of one that is too large, cannot be read or is not UTF-8."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return ""
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def read_docstrings(path: Path) -> str:
    """The docstrings of a module that are longer than a line, one after another."""
    try:
        tree = ast.parse(_read_text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and "\n" in text:
                found.append(text)
    return "\n\n".join(found)


def read_catalogue(path: Path) -> str:
    """The translations of a compiled message catalogue, one a line; nothing of a file that is none or not UTF-8."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return ""
        content = path.read_bytes()
        order = "<" if content[:4] == struct.pack("<I", MO_MAGIC) else ">"
        magic, _, count, _, table = struct.unpack_from(f"{order}5I", content)
        if magic != MO_MAGIC or count > len(content):
            return ""
        found = []
        for index in range(count):
            length, start = struct.unpack_from(f"{order}2I", content, table + 8 * index)
            text = content[start : start + length].decode("utf-8").split("\0")[0].strip()
            if sum(map(str.isalpha, text)) > LEAST_LETTERS * len(text) and not text.startswith(
                "Project-Id-Version"
            ):
                found.append(text)
        return "\n".join(found)
    except (OSError, struct.error, UnicodeDecodeError):
        return ""


def _write(folder: Path, domain: str, texts: Mapping[str, Sequence[str]]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for split, documents in texts.items():
            lines = "".join(json.dumps({"text": text, "domain": domain}) + "\n" for text in documents)
            # No time in the header: the same files give the same bytes.
            (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    except OSError as error:
        raise CorpusError(f"{folder} cannot be written: {error.strerror}; name another folder") from error


def _sources_page(roots: Sequence[Path], built: Sequence[Built]) -> str:
    """Where the text comes from, and under which licences."""
    lines = [
        "# Where this text comes from",
        "",
        "Other people's text under their licences, gathered on this machine for measurements on this machine; do not pass it on.",
        "",
        *(f"- {root}" for root in roots),
        "",
        "| domain | documents | characters | files |",
        "|---|---|---|---|",
        *(
            f"| {each.domain} | {sum(each.documents.values())} | {each.chars} | {each.files} |"
            for each in built
        ),
        "",
        f"Python {sys.version.split()[0]}: PSF-2.0. Installed packages:",
        "",
    ]
    for package in sorted(distributions(), key=lambda each: str(each.metadata["Name"]).lower()):
        said = [package.metadata[key] for key in ("License-Expression", "License") if key in package.metadata]
        licence = next((text.splitlines()[0][:80] for text in said if text and text.strip()), "not stated")
        lines.append(f"- {package.metadata['Name']} {package.version}: {licence}")
    return "\n".join(lines) + "\n"
