"""A corpus from folders of files: what belongs where, splits without common files, and refusals."""

import gzip
import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from calibration.corpus import documents, find_domains
from edge_runtime.errors import CorpusError
from testbed.corpus import (
    PART_CHARS,
    Source,
    build_corpus,
    cut,
    find_sources,
    gather,
    read_catalogue,
    read_docstrings,
)
from testbed.corpus_cli import corpus


def catalogue(path: Path, texts: dict[str, str], order: str = "<") -> Path:
    """A compiled message catalogue."""
    originals, translations = sorted(texts), [texts[each] for each in sorted(texts)]
    data, tables, at = b"", [], 28 + 16 * len(texts)
    for group in (originals, translations):
        table = b""
        for text in group:
            content = text.encode()
            table += struct.pack(f"{order}2I", len(content), at + len(data))
            data += content + b"\0"
        tables.append(table)
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(texts), 28, 28 + 8 * len(texts), 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(tables) + data)
    return path


def module(number: int) -> str:
    body = "".join(f"def count_{number}_{i}(ship):\n    return ship * {i}\n\n\n" for i in range(40))
    return f'"""A module about ships, number {number}.\n\nIt counts them{" and counts them again" * 20}."""\n\n{body}'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twenty-five modules, catalogues of one language in twenty-five files, a little JSON, and files that are no text."""
    root = tmp_path / "root"
    for number in range(25):
        (root / f"package{number % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"package{number % 3}" / f"module{number}.py").write_text(module(number))
        texts = {f"message {number} {i}": f"Nachricht {number} {i} von dem alten Schiff" for i in range(40)}
        catalogue(
            root / f"app{number}" / "locale" / "de_AT" / "LC_MESSAGES" / "django.mo",
            texts | {"": "Project-Id-Version: 1"},
        )
        catalogue(root / f"app{number}" / "locale" / "en" / "LC_MESSAGES" / "django.mo", texts)
    (root / "few.json").write_text(json.dumps({"waves": list(range(200))}))
    (root / "package0" / "binary.py").write_bytes(b"\xff\xfe" * 400)
    (root / "package0" / "linked.py").symlink_to(root / "package1" / "module1.py")
    (root / "package0" / "__pycache__").mkdir()
    (root / "package0" / "__pycache__" / "module.json").write_text("x" * 400)
    return root


def test_what_is_built_is_read_by_calibration_and_names_its_sources(root: Path, tmp_path: Path):
    built, small = build_corpus(tmp_path / "out", [root])
    assert [each.domain for each in built] == ["de", "prose", "python"] and small == {"json": 1}
    for split in ("calibration", "validation"):
        domains = find_domains(tmp_path / "out", split)
        assert [domain.name for domain in domains] == ["de", "prose", "python"]
        assert all(list(documents(domain)) for domain in domains)
    (de,) = (domain for domain in find_domains(tmp_path / "out", "calibration") if domain.name == "de")
    text = "".join(documents(de))
    assert "Nachricht" in text and "message" not in text and "Project-Id" not in text
    page = (tmp_path / "out" / "SOURCES.md").read_text()
    assert str(root) in page and "| python | 25 |" in page and "numpy" in page


def test_no_file_feeds_two_splits_and_no_document_comes_twice(root: Path):
    texts, chars, files = gather(find_sources([root])["python"], 10**9)
    numbers = {
        split: {part.split("number ")[1].split(".")[0] for part in parts} for split, parts in texts.items()
    }
    assert sum(map(len, numbers.values())) == files == 25
    everything = [part for parts in texts.values() for part in parts]
    assert len(set(everything)) == len(everything) and sum(map(len, everything)) == chars


def test_a_domain_of_few_files_is_split_by_part():
    source = Source(
        "d", Path("a"), lambda path: "".join(f"line {i} of one long file\n" for i in range(5_000))
    )
    texts, _, files = gather([source], 10**9)
    assert files == 1 and all(texts.values()) and sum(map(len, texts.values())) == 12


def test_characters_of_a_domain_are_bounded(root: Path):
    sources = find_sources([root])["python"]
    _, whole, _ = gather(sources, 10**9)
    _, chars, files = gather(sources, whole // 3)
    assert whole // 3 <= chars < whole // 2 and files < 25


@given(st.lists(st.text("ab\u4e2d ", max_size=900), max_size=60))
def test_parts_are_of_one_length_at_most_and_keep_the_order(lines: list[str]):
    text = "\n".join(lines)
    parts = list(cut(text))
    at = 0
    for part in parts:
        assert 200 <= len(part) <= PART_CHARS
        at = text.index(part, at) + len(part)


def test_the_same_files_give_the_same_bytes(root: Path, tmp_path: Path):
    for name in "ab":
        build_corpus(tmp_path / name, [root])
    first, second = (
        {p.name + p.parent.name: p.read_bytes() for p in (tmp_path / n).rglob("*.gz")} for n in "ab"
    )
    assert first.keys() == {k.replace("/a", "/b") for k in second} and list(first.values()) == list(
        second.values()
    )
    assert all(json.loads(line)["text"] for line in gzip.decompress(next(iter(first.values()))).splitlines())


@pytest.mark.parametrize("order", ["<", ">"])
def test_catalogues_of_either_byte_order_are_read(tmp_path: Path, order: str):
    path = catalogue(tmp_path / "a.mo", {"ship": "das Schiff", "n": "1 %", "one\0many": "eins\0viele"}, order)
    assert read_catalogue(path).splitlines() == ["eins", "das Schiff"]


@given(st.binary(max_size=200))
def test_garbage_is_no_catalogue_and_no_module(tmp_path_factory, content: bytes):
    path = tmp_path_factory.mktemp("garbage") / "a.mo"
    path.write_bytes(struct.pack("<I", 0x950412DE) + content)
    assert isinstance(read_catalogue(path), str)
    path.write_bytes(content)
    assert read_catalogue(path) == "" or content.startswith(struct.pack("<I", 0x950412DE))
    assert isinstance(read_docstrings(path), str)


def test_little_text_a_full_folder_or_no_folder_is_refused(root: Path, tmp_path: Path):
    (tmp_path / "poor").mkdir()
    (tmp_path / "poor" / "a.py").write_text(module(1))
    with pytest.raises(
        CorpusError, match=r"0 domains .* needed are 2 \(too small: prose 1, python 1\); install"
    ):
        build_corpus(tmp_path / "out", [tmp_path / "poor"])
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorpusError, match="out cannot be made in .*a.py; name another folder"):
        build_corpus(tmp_path / "poor" / "a.py" / "out", [root])
    with pytest.raises(CorpusError, match="not empty"):
        build_corpus(root, [root])
    with pytest.raises(CorpusError, match="gone does not exist"):
        build_corpus(tmp_path / "out", [tmp_path / "gone"])


def test_the_command_says_what_it_wrote(root: Path, tmp_path: Path):
    result = CliRunner().invoke(corpus, [str(tmp_path / "out"), "--root", str(root)])
    assert result.exit_code == 0, result.output
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["de", "prose", "python"]
    assert "1 domains are too small" in result.stderr and "SOURCES.md" in result.stderr
