"""The command line as scripts and people meet it: help, exit codes, one-sentence errors. No daemon is started here."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import torch

from edge_runtime import cli
from edge_runtime.artifacts import write_section
from edge_runtime.commands import shared
from edge_runtime.errors import MESSAGE_CHARS
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.clusters import MODEL, write_topology
from tests.support.tiny_models import (
    edit_config,
    read_tensors,
    write_tensors,
    write_tiny_qwen3_moe,
    write_tokenizer,
)
from tests.support.traits import write_artifact


class Ended(NamedTuple):
    exit_code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in this process, in an empty folder, and say how it ended."""
    monkeypatch.delenv("EDGE_RUNTIME_TOPOLOGY", raising=False)
    monkeypatch.setenv("EDGE_RUNTIME_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["edge-runtime", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return Ended(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3_moe(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A model of its own, to be broken."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def commands(
    group: click.Group, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli.cli))
OWN = ("apply", "coordinator", "doctor", "down", "keys", "node", "plan", "status", "submit", "up")


def assert_one_sentence(ended: Ended, exit_code: int, *words: str) -> None:
    """One line that begins with `error:` and holds all words; nothing on standard output."""
    assert ended.exit_code == exit_code, ended
    assert ended.out == ""
    assert ended.err.startswith("error: ") and len(ended.err.splitlines()) == 1, ended.err
    for word in words:
        assert word in ended.err, ended.err


# Help.


def test_every_command_of_the_contract_is_there() -> None:
    assert {(name,) for name in OWN} | {("keys", "new")} <= set(ALL)


@pytest.mark.parametrize("path", [(), *ALL], ids=" ".join)
def test_help_of_every_command_shows_an_example_that_names_it(path: tuple[str, ...], run: Run) -> None:
    ended = run(*path, "--help")
    assert ended.exit_code == 0 and ended.err == ""
    assert "Example:\n" in ended.out
    assert " ".join(("edge-runtime", *path)) in ended.out.partition("Example:")[2]


@pytest.mark.parametrize("path", [path for path in ALL if path[0] in OWN and path != ("keys",)], ids=" ".join)
def test_every_command_takes_a_topology(path: tuple[str, ...]) -> None:
    assert "--topology" in [option for parameter in ALL[path].params for option in parameter.opts]


def test_the_version_is_the_distributions(run: Run) -> None:
    assert run("--version").out.startswith("edge-runtime")


# Mistakes of usage.


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nonsense"], "nonsense"),
        (["plan", "--nonsense"], "--nonsense"),
        (["submit", "a", "--max-tokens", "many"], "many"),
        (["submit", "a", "b"], "b"),
        (["node"], "NAME"),
    ],
)
def test_a_mistyped_command_is_one_sentence_that_points_to_help(
    arguments: list[str], word: str, run: Run
) -> None:
    assert_one_sentence(run(*arguments), 2, word, "--help")


@pytest.mark.parametrize("arguments", [["submit"], ["submit", "hello", "--file", "prompts.jsonl"]])
def test_submit_wants_a_prompt_or_a_file_and_not_both(arguments: list[str], run: Run) -> None:
    assert_one_sentence(run(*arguments), 2, "PROMPT", "--file")


def test_an_empty_prompt_is_the_users_fault(run: Run) -> None:
    assert_one_sentence(run("submit", ""), 2, "empty")


def test_logprobs_that_nobody_would_see_are_refused(run: Run) -> None:
    assert_one_sentence(run("submit", "x", "--logprobs", "2"), 2, "--logprobs", "--json")


def test_help_of_a_drain_says_what_it_does(run: Run) -> None:
    said = run("node", "drain", "--help").out
    assert "NAME | drain NAME" in said and "node drain NAME  move the requests and experts" in said


def test_a_missing_prompt_file_is_named(run: Run) -> None:
    assert_one_sentence(run("submit", "--file", "nowhere.jsonl"), 2, "nowhere.jsonl")


@pytest.mark.parametrize(
    ("command", "out", "said"),
    [
        (("calibrate", "m", "--corpus", "c"), "file", "'--out': Directory 'file' is a file"),
        (("testbed", "lanes"), "file", "'--out': Directory 'file' is a file"),
        (("testbed", "routing-daemons", "--corpus", "c"), ".", "'--out': File '.' is a directory"),
    ],
)
def test_a_place_for_results_that_cannot_hold_them_is_refused_before_anything_is_measured(
    run: Run, tmp_path: Path, command: tuple[str, ...], out: str, said: str
) -> None:
    (tmp_path / "file").write_text("")
    assert_one_sentence(run(*command, "--out", out), 2, said)


def test_what_is_wrong_with_files_is_told_before_a_cluster_is_looked_for(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "one_node")  # nobody serves it
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "there").write_text("")
    for out, said in (("there", "there exists already"), (".", "is a folder"), ("no/out", "does not exist")):
        assert_one_sentence(run("batch", "prompts.jsonl", "--out", out, "--topology", topology), 2, said)
    (tmp_path / "key").write_bytes(b"\xff")
    for key, said in (
        ("nowhere", "cannot be read: No such file"),
        ("key", "it is not UTF-8 text, by byte 1"),
    ):
        assert_one_sentence(run("gateway", "--api-key-file", key, "--topology", topology), 2, said)


# The topology file.


@pytest.mark.parametrize("command", ["up", "down", "coordinator", "status", "plan"])
def test_without_a_topology_file_every_command_says_where_it_looked(command: str, run: Run) -> None:
    assert_one_sentence(run(command), 2, "topology.toml", "--topology", "EDGE_RUNTIME_TOPOLOGY")


def test_the_default_and_the_variable_name_the_file_too(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = write_topology(tmp_path, "one_node")
    there = write_topology(tmp_path / "there", "two_nodes")
    assert json.loads(run("plan", "--json").out)["cluster"] == "one-node"
    monkeypatch.setenv("EDGE_RUNTIME_TOPOLOGY", str(there))
    assert json.loads(run("plan", "--json").out)["cluster"] == "two-nodes"
    assert json.loads(run("plan", "--json", "--topology", here).out)["cluster"] == "one-node"


def test_a_file_with_faults_shows_all_of_them_with_their_lines(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes")
    text = topology.read_text()
    topology.write_text(text.replace('"408 MiB"', '"408 apples"').replace('["experts"]', '["expert"]'))
    ended = run("plan", "--topology", topology)
    assert ended.exit_code == 2 and "Traceback" not in ended.err
    assert "2 faults" in ended.err and "apples" in ended.err and ended.err.count("line ") == 2


def test_a_node_that_the_file_does_not_have_is_told_the_names(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes")
    assert_one_sentence(run("node", "dest", "--topology", topology), 2, "dest", "desk", "attic")


def test_an_address_that_others_can_reach_needs_keys(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes")
    topology.write_text(topology.read_text().replace('address = "127.0.0.1', 'address = "10.1.2.3', 1))
    assert_one_sentence(run("plan", "--topology", topology), 2, "10.1.2.3", "keys")


# The plan.


def test_a_plan_says_in_bytes_what_each_node_will_hold_and_why(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "eight_nodes")
    body = json.loads(run("plan", "--json", "--topology", topology).out)
    assert len(body["nodes"]) == 8 and body["experts"] == 192
    for node in body["nodes"]:
        parts = ("process", "trunk", "kv", "workspace", "expert")
        assert sum(node[f"{part}_bytes"] for part in parts) == node["planned_bytes"] <= node["memory_bytes"]
        assert node["why"] and node["num_experts"] < 192
    table = run("plan", "--topology", topology).out
    assert all(node["name"] in table for node in body["nodes"])


@pytest.mark.parametrize("sizes", [("352 MiB", "362 MiB"), ("380 MiB", "352 MiB")])
def test_too_little_memory_is_told_as_needed_and_available_in_one_unit(
    sizes: tuple[str, str], run: Run, tmp_path: Path
) -> None:
    topology = write_topology(tmp_path, "two_nodes")
    text = topology.read_text()
    for much, little in zip(("408 MiB", "362 MiB"), sizes, strict=True):
        text = text.replace(f'"{much}"', f'"{little}"')
    topology.write_text(text)
    ended = run("plan", "--topology", topology)
    assert_one_sentence(ended, 2, "need")
    units = re.findall(r"\b\d+\.\d+ ([KMG]iB)", ended.err)
    assert len(units) >= 2 and len(set(units)) == 1, ended.err


# The model.


def plan_of(model: Path, run: Run, tmp_path: Path) -> Ended:
    return run("plan", "--topology", write_topology(tmp_path, "one_node", model=model))


def test_a_model_in_order_is_planned(model: Path, run: Run, tmp_path: Path) -> None:
    assert plan_of(model, run, tmp_path).exit_code == 0


def test_a_context_longer_than_the_models_is_told_with_both_lengths(
    model: Path, run: Run, tmp_path: Path
) -> None:
    limit = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    topology = write_topology(tmp_path, "one_node", model=model, context_tokens=str(limit + 1))
    said = (f"context_tokens is {limit + 1}", f"can read {limit} tokens", str(model))
    assert_one_sentence(run("plan", "--topology", topology), 2, *said)


def test_a_missing_shard_is_named(model: Path, run: Run, tmp_path: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    (model / shard).unlink()
    assert_one_sentence(plan_of(model, run, tmp_path), 2, shard)


@pytest.mark.parametrize("cut", [1, 3 * 64 * 48 * 2])
def test_a_truncated_shard_is_named(cut: int, model: Path, run: Run, tmp_path: Path) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-cut])
    assert_one_sentence(plan_of(model, run, tmp_path), 2, shard.name, "bytes")


def test_a_tensor_of_wrong_shape_is_named_with_both_shapes(model: Path, run: Run, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors = read_tensors(model)
    write_tensors(model, tensors | {name: tensors[name][:, :-1]})
    assert_one_sentence(plan_of(model, run, tmp_path), 2, name, "[48, 63]", "[48, 64]")


def test_what_a_node_would_end_with_is_told_by_plan(model: Path, run: Run, tmp_path: Path) -> None:
    tokenizer, config = model / "tokenizer.json", json.loads((model / "config.json").read_text())
    for ids, said in (
        (512, "names 512, expected ids below"),
        ("2", "found eos_token_id '2', expected an id"),
    ):
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert_one_sentence(plan_of(model, run, tmp_path), 2, "generation_config.json", said)
    (model / "generation_config.json").unlink()
    for changes, said in (
        ({"hidden_act": None}, "hidden_act = null is not supported, only 'silu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is missing, expected the rows"),
    ):
        (model / "config.json").write_text(json.dumps(config | changes))
        assert_one_sentence(plan_of(model, run, tmp_path), 2, "config.json", said)
    (model / "config.json").write_text(json.dumps(config))
    for content, said in (
        ("", "is empty"),
        ("{}", "is not a tokenizer"),
        ("version https://git-lfs.github.com/spec/v1\n", "is a git-LFS pointer"),
        ("<!DOCTYPE html>", "is a web page"),
    ):
        tokenizer.write_text(content)
        assert_one_sentence(plan_of(model, run, tmp_path), 2, "tokenizer.json", said)
    tokenizer.unlink()
    assert_one_sentence(plan_of(model, run, tmp_path), 2, "tokenizer.json is missing")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; copy the file again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", "run `git lfs pull`"),
        (b"\n<HTML>" + b"x" * 99, "is a web page"),
        (b"x" * 99, "is not a whole safetensors file: .*; copy the file again"),
    ],
)
def test_what_stands_in_a_shards_place_is_told(
    content: bytes, said: str, model: Path, run: Run, tmp_path: Path
) -> None:
    (model / "model-00002-of-00002.safetensors").write_bytes(content)
    ended = plan_of(model, run, tmp_path)
    assert_one_sentence(ended, 2, "model-00002-of-00002.safetensors")
    assert re.search(said, ended.err)


def test_an_unsupported_family_is_told_the_supported_ones(model: Path, run: Run, tmp_path: Path) -> None:
    edit_config(model, model_type="llama")
    assert_one_sentence(plan_of(model, run, tmp_path), 2, "llama", "qwen3_moe")


def test_a_model_folder_that_does_not_exist_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "one_node", model=tmp_path / "nowhere")
    assert_one_sentence(run("plan", "--topology", topology), 2, "nowhere", "line ")


# Keys.


def test_keys_are_made_for_everybody_of_the_file_and_never_overwritten(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes", keys='"keys"')
    ended = run("keys", "new", "--topology", topology)
    assert ended.exit_code == 0
    made = {path.name for path in (tmp_path / "keys").iterdir()}
    names = ("coordinator", "client", "desk", "attic")
    assert made == {f"{name}.{suffix}" for name in names for suffix in ("key", "key_secret")}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "keys").glob("*.key_secret"))
    assert_one_sentence(run("keys", "new", "--topology", topology), 2, "exists")
    assert run("keys", "new", "laptop", "--topology", topology).exit_code == 0


def test_a_missing_key_and_one_that_others_can_read_are_refused(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes", keys='"keys"')
    assert_one_sentence(
        run("status", "--topology", topology), 2, "client.key_secret", "edge-runtime keys new"
    )
    run("keys", "new", "--topology", topology)
    secret = tmp_path / "keys" / "client.key_secret"
    secret.chmod(0o644)
    assert_one_sentence(run("status", "--topology", topology), 2, str(secret), "chmod 600")


# A cluster that is not there.


def test_a_coordinator_that_is_not_there_is_waited_for_aloud_and_is_the_clusters_fault(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "QUIET_S", 0.1)
    monkeypatch.setattr(shared, "CONNECT_S", 0.3)
    topology = write_topology(tmp_path, "two_nodes")
    for command in (["status"], ["submit", "hello"]):
        ended = run(*command, "--topology", topology)
        waiting, error = ended.err.splitlines()
        assert (ended.exit_code, ended.out) == (3, "")
        assert waiting.startswith("waiting for the coordinator at 127.0.0.1:")
        assert error.startswith("error: coordinator at 127.0.0.1:")


def test_down_of_what_is_not_up_is_done(run: Run, tmp_path: Path) -> None:
    topology = write_topology(tmp_path, "two_nodes")
    for _ in range(2):
        ended = run("down", "--topology", topology)
        assert ended.exit_code == 0 and "nothing" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("submit", "x", "--k", "much"), "'--k': 'much' is not a number"),
        (("submit", "x", "--k", "nan"), "'--k': 'nan' is not a number"),
        (("submit", "x", "--sub-experts", "2.5"), "'--sub-experts': '2.5' is not a whole number"),
        (("submit", "x", "--temperature", "1e999"), "'--temperature': '1e999' is not a number"),
        (("batch", "x", "--out", "y", "--size", "all"), "'--size': 'all' is not a whole number"),
        (("submit", "x", "--max-tokens", "1" * 100_000), " ... "),
        (("calibrate", "gate", "m", "--corpus", "c", "--learning-rate", "nan"), "'nan' is not a number"),
        (("calibrate", "gate", "m", "--corpus", "c", "--learning-rate", "0"), "not in the range x>0"),
        (("testbed", "lanes", "--dwell", "inf"), "'inf' is not a number"),
        (("testbed", "link", "a", "b", "--rtt", "soon"), "'--rtt': \"soon\" is not a duration"),
        (("testbed", "link", "a", "b", "--loss", "200%"), "'--loss': \"200%\" is not a share"),
        (("testbed", "chaos", "--requests", "0"), "'--requests': 0 is not in the range x>=1"),
    ],
)
def test_what_is_no_number_is_told_in_words_of_no_language_for_programs(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    ended = run(*arguments)
    assert ended.exit_code == 2 and said in ended.err and ended.err.count("\n") == 1
    assert len(ended.err) < 2 * MESSAGE_CHARS


@pytest.mark.parametrize(
    ("section", "tensors", "told"),
    [
        (
            "frequency",
            {"overall": torch.ones(2, 8)},
            "tensor overall of section frequency has the shape [2, 8]",
        ),
        ("mismatch", {"mismatch": torch.ones(2, 6, 8)}, "tensor mismatch of section mismatch has the shape"),
        ("sensitivity", {"sensitivity": torch.full((3,), torch.nan)}, "3 numbers of 3 that are not finite"),
        ("signature_fit", {"idf": torch.ones(3, 8)}, "section signature_fit lacks centroids"),
        ("partition", {"permutation": torch.zeros(1)}, "section partition says num_parts = None"),
    ],
)
def test_plan_tells_what_a_coordinator_or_a_node_would_end_with(
    run: Run, model: Path, tmp_path: Path, section: str, tensors: dict[str, torch.Tensor], told: str
) -> None:
    """A file of an artifact that is whole and says what cannot be; and one that is cut short."""
    checkpoint = Checkpoint.open(model)
    layers, experts = checkpoint.spec.moe_layers, 8
    folder = write_artifact(model / "calibration", checkpoint.model_hash, layers, experts)
    topology = write_topology(
        tmp_path / "cluster", "two_nodes", model=model, placement='"similarity"', sub_experts="true"
    )
    meta = {"layers": list(layers)}
    write_section(folder, section, tensors, meta, model_hash=checkpoint.model_hash)
    ended = run("plan", "--topology", topology)
    assert ended.exit_code == 2 and told in ended.err and ended.err.count("\n") == 1
    assert str(folder) in ended.err, "which artifact"
    path = folder / f"{section}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    ended = run("plan", "--topology", topology)
    assert ended.exit_code == 2 and "is truncated or foreign" in ended.err and ended.err.count("\n") == 1


def test_what_needs_split_experts_says_so_where_there_is_no_artifact(run: Run, tmp_path: Path) -> None:
    for command in ("gate", "tiers"):
        ended = run("calibrate", command, MODEL, "--corpus", tmp_path, "--out", tmp_path / "none")
        assert ended.exit_code == 2 and "none does not exist; run `edge-runtime calibrate prism`" in ended.err
