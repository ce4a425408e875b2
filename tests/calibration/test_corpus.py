import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.corpus import Domain, documents, find_domains, num_bytes, read_documents, sample_documents
from edge_runtime.errors import CorpusError
from tests.support.calibrating import write_corpus


def jsonl(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One domain with splits, one of a single plain file, one file that is a domain of its own."""
    write_corpus(tmp_path, {"sea": ["a wave", "a ship"]}, "calib.jsonl.gz")
    write_corpus(tmp_path, {"sea": ["a train"]}, "train.jsonl")
    write_corpus(tmp_path, {"sea": ["a harbour"]}, "valid.jsonl")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "all.txt").write_text("\n\n".join("x" * 4_000 + str(i) for i in range(20)))
    (tmp_path / "lone.jsonl").write_bytes(jsonl(*map(str, range(10))))
    (tmp_path / "SOURCES.md").write_text("not a text")
    (tmp_path / "empty").mkdir()
    return tmp_path


def read(folder: Path, split: str) -> dict[str, list[str]]:
    return {domain.name: list(documents(domain)) for domain in find_domains(folder, split)}


def test_files_named_after_a_split_belong_to_it(folder: Path):
    assert read(folder, "calibration")["sea"] == ["a wave", "a ship"]
    assert read(folder, "validation")["sea"] == ["a harbour"]


def test_without_such_files_every_tenth_document_is_for_validation(folder: Path):
    calibration, validation = read(folder, "calibration"), read(folder, "validation")
    assert calibration["lone"] == list("012345678") and validation["lone"] == ["9"]
    assert len(calibration["plain"]) == 18 and len(validation["plain"]) == 2
    assert not set(calibration["plain"]) & set(validation["plain"])


def test_training_text_serves_where_there_is_none_for_calibration(folder: Path):
    (folder / "sea" / "calib.jsonl.gz").unlink()
    assert read(folder, "calibration")["sea"] == ["a train"]
    (folder / "sea" / "valid.jsonl").unlink()
    assert "sea" not in read(folder, "validation")


@given(st.lists(st.text("ab \n\u00e9\u4e2d", min_size=1), min_size=1, max_size=8))
def test_plain_text_is_cut_at_empty_lines_and_nothing_is_lost(tmp_path_factory, paragraphs: list[str]):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    text = "\n\n".join(each * 900 for each in paragraphs)
    path.write_bytes(text.encode())
    parts = list(read_documents(path))
    assert "".join(parts).strip() == text.strip()
    assert all(len(part) <= 70_000 for part in parts)


def test_a_line_longer_than_any_part_is_cut_between_characters(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("\u4e2d" * 200_000)
    parts = list(read_documents(path))
    assert "".join(parts) == "\u4e2d" * 200_000 and max(map(len, parts)) <= 70_000


BAD_FILES = {
    "latin-1 text": ("a.txt", "caf\u00e9 au lait".encode("latin-1"), "not UTF-8"),
    "utf-16 text": ("a.txt", "text".encode("utf-16"), "not UTF-8"),
    "latin-1 lines": ("a.jsonl", '{"text": "caf\u00e9"}'.encode("latin-1"), "not UTF-8"),
    "no JSON": ("a.jsonl", b'{"text": "x"}\nhello\n', "line 2"),
    "no text": ("a.jsonl", b'{"prompt": "x"}\n', 'with a "text"'),
    "text of numbers": ("a.jsonl", b'{"text": 7}\n', "line 1"),
    "a list": ("a.jsonl", b"[1]\n", "line 1"),
    "no gzip": ("a.jsonl.gz", jsonl("x"), "cannot be read"),
    "half of a gzip": ("a.jsonl.gz", gzip.compress(jsonl("x" * 900))[:-9], "cannot be read"),
    "a wrong checksum": ("a.jsonl.gz", gzip.compress(jsonl("x"))[:-8] + bytes(8), "cannot be read"),
    "an endless line": ("a.jsonl", b" " * ((16 << 20) + 1), "more than"),
}


@pytest.mark.parametrize("name, content, why", BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_in_one_sentence(tmp_path: Path, name, content, why):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=why) as error:
        list(read_documents(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_byte_order_marks_and_empty_lines_are_no_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + jsonl("x") + b"\n  \n" + jsonl(" ", "y"))
    assert list(read_documents(path)) == ["x", "y"]


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.mkdir(), lambda p: (p / "d").mkdir(parents=True)]
)
def test_a_corpus_without_text_is_refused(tmp_path: Path, make):
    make(tmp_path / "corpus")
    with pytest.raises(CorpusError, match="DOMAIN"):
        find_domains(tmp_path / "corpus", "calibration")


def test_a_sample_is_bounded_fair_and_the_same_for_its_seed(tmp_path: Path):
    write_corpus(tmp_path, {"d": [f"{i:03} " + "x" * 99 for i in range(300)], "e": ["one"]})
    domains = find_domains(tmp_path, "calibration")
    first = sample_documents(domains, 30, 1, max_chars=10)
    assert first == sample_documents(domains, 30, 1, max_chars=10)
    assert len(first["d"]) == 30 and first["e"] == ["one"] and all(len(text) <= 10 for text in first["d"])
    taken = [
        int(text[:3]) for seed in range(20) for text in sample_documents(domains, 30, seed, max_chars=10)["d"]
    ]
    assert 130 < sum(taken) / len(taken) < 170 and len(set(taken)) > 200


def test_bytes_seen_add_up_to_those_of_the_files(folder: Path):
    domains, seen = find_domains(folder, "calibration"), []
    sample_documents(domains, 5, 1, max_chars=10, seen=seen.append)
    assert sum(seen) == num_bytes(domains)


def test_a_missing_file_is_told(tmp_path: Path):
    with pytest.raises(CorpusError, match="cannot be read"):
        list(documents(Domain("d", (tmp_path / "gone.txt",), "all")))
