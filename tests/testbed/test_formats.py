"""Perplexity by weight format: what is read, what is counted, and that finer formats are nearer."""

import gzip
import json

import pytest
from click.testing import CliRunner

from kernels.packing import packed_expert_bytes
from testbed.formats import main

TEXT = "The quick brown fox jumps over the lazy dog. for i in range(10):\n    print(i)\n" * 4


@pytest.fixture
def lines(tmp_path):
    """A jsonl.gz of three documents, one of them too short to predict anything."""
    path = tmp_path / "some.jsonl.gz"
    texts = (TEXT, "x", "SELECT a, b FROM t WHERE a = 1 ORDER BY b;" * 5)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return path


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_finer_formats_are_nearer_to_the_stored_weights(lines, demo_model):
    formats = "as_stored,float32,int8,int4,mxfp4"
    result = run("--text", lines, "--model", demo_model, "--formats", formats, "--context", 48, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])
    stored, wide, int8, int4, mxfp4 = (row["perplexity"] for row in rows)
    assert wide == stored  # bfloat16 widens exactly and every sum has one order
    assert abs(int8 / stored - 1) < 0.01 and abs(int4 / stored - 1) < 0.2 and abs(mxfp4 / stored - 1) < 0.3
    assert len({row["tokens"] for row in rows}) == 1 and rows[0]["tokens"] > 47
    names = ("bfloat16", "float32", "int8", "int4", "mxfp4")
    assert [row["expert_bytes"] for row in rows] == [
        6 * 32 * packed_expert_bytes(256, 96, name) for name in names
    ]


def test_the_table_is_markdown(lines, demo_model):
    result = run("--text", lines, "--formats", "as_stored,int8/int4", "--context", 16, "--documents", 1)
    table = result.stdout.splitlines()
    assert result.exit_code == 0 and table[0].startswith("| experts, trunk in |")
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| as_stored, as_stored", "| int8, int4"]
    trunks = [float(line.split(" | ")[4].rstrip(" |")) for line in table[2:4]]
    assert trunks[1] < 0.5 * trunks[0]


def test_what_cannot_be_read_is_named(tmp_path, lines):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"words": 1}\n', encoding="utf-8")
    assert "bad.jsonl, line 2" in run("--text", bad).output
    assert "found int3" in run("--text", lines, "--formats", "int3").output
    assert "found int8/int3" in run("--text", lines, "--formats", "int8/int3").output
    empty = tmp_path / "empty.txt"
    empty.write_text("", encoding="utf-8")
    assert "no token to predict" in run("--text", empty).output
