"""Model folders, whole and broken: what is wrong is named by file and tensor, expected and found."""

import json
import logging
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge_runtime.errors import CheckpointError, ConfigError, UserError
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.tiny_models import (
    INDEX_FILE,
    TINY,
    edit_config,
    read_tensors,
    write_tensors,
    write_tiny,
    write_tiny_qwen3_moe,
)

Q1 = "model.layers.1.self_attn.q_proj.weight"
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("model") / "tiny", mlp_only_layers=[0])


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def fault(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_shards_with_an_index_give_every_tensor_as_it_was_saved(folder):
    checkpoint = Checkpoint.open(folder)
    assert len(shards(folder)) == 2
    tensors = read_tensors(folder)
    for part in checkpoint.table.all_parts():
        if part.name == HEAD:
            continue  # tied
        with checkpoint.read([part]) as (found,):
            tensor = tensors.pop(part.name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert not tensors


def test_files_without_an_index_and_a_single_file_are_read_too(folder):
    tensors = read_tensors(folder)
    (folder / INDEX_FILE).unlink()
    assert Checkpoint.open(folder).spec.num_layers == 3
    for path in shards(folder):
        path.rename(folder / f"weights-{path.stem[6:11]}.safetensors")
    assert Checkpoint.open(folder).spec.num_layers == 3
    write_tensors(folder, tensors, "anything.safetensors")
    assert Checkpoint.open(folder).spec.num_layers == 3


def test_a_missing_folder_is_named(tmp_path):
    assert fault(tmp_path / "nowhere") == f"model folder {tmp_path / 'nowhere'} does not exist"


def test_a_folder_without_config_is_not_a_model(folder):
    (folder / "config.json").unlink()
    assert "config.json is missing" in fault(folder)


@pytest.mark.parametrize("content", ["{", "", "\x00", "[1]", "nul", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(folder, content):
    (folder / "config.json").write_text(content)
    assert str(folder / "config.json") in fault(folder)


def test_an_unsupported_family_names_the_file_and_the_supported_ones(folder):
    edit_config(folder, model_type="gpt2")
    with pytest.raises(
        ConfigError, match=r"config.json: model_type 'gpt2' is not supported; supported are .*qwen3_moe"
    ):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("key", "number"), [("num_hidden_layers", 10**9), ("num_local_experts", 10**12), ("hidden_size", 10**15)]
)
def test_counts_that_no_model_has_are_refused_before_names_are_made_of_them(folder, key, number):
    edit_config(folder, **{key: number})
    with pytest.raises(ConfigError, match=f"{key} .*must be at most"):
        Checkpoint.open(folder)


def test_a_folder_without_weights_says_what_is_read(folder):
    for path in [*shards(folder), folder / INDEX_FILE]:
        path.unlink()
    assert "no *.safetensors file" in fault(folder)


def test_a_missing_shard_is_named_with_what_it_should_hold(folder):
    shards(folder)[1].unlink()
    message = fault(folder)
    assert "model-00002-of-00002.safetensors is missing" in message
    assert re.search(r"puts \d+ tensors in it", message)


def test_a_renamed_shard_is_noticed(folder):
    shards(folder)[1].rename(folder / "part2.safetensors")
    assert "part2.safetensors is there but not in the index" in fault(folder)


def test_without_an_index_a_missing_shard_shows_as_missing_tensors(folder):
    (folder / INDEX_FILE).unlink()
    shards(folder)[1].unlink()
    message = fault(folder)
    assert re.search(r"\d+ of \d+ tensors are missing \(model\.", message)
    assert "1 weight files were read (no index)" in message


def test_an_index_that_leads_out_of_the_folder_is_refused(folder):
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"][Q1] = "../secret.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert "outside the folder" in fault(folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "x"])
def test_a_damaged_index_is_named(folder, content):
    (folder / INDEX_FILE).write_text(content)
    assert INDEX_FILE in fault(folder)


def test_a_tensor_that_the_index_puts_in_the_wrong_file_is_named(folder):
    index = json.loads((folder / INDEX_FILE).read_text())
    names = sorted(set(index["weight_map"].values()))
    wrong = names[1] if index["weight_map"][Q1] == names[0] else names[0]
    index["weight_map"][Q1] = wrong
    (folder / INDEX_FILE).write_text(json.dumps(index))
    message = fault(folder)
    assert wrong in message and f"tensor {Q1} is not in it" in message


def test_a_tensor_in_two_files_is_ambiguous(folder):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors)
    from safetensors.torch import save_file

    save_file({Q1: tensors[Q1]}, folder / "old.safetensors")
    message = fault(folder)
    assert Q1 in message and "old.safetensors" in message and "keep one" in message


def test_a_shard_truncated_by_one_byte_names_the_tensor_that_is_cut(folder):
    cut(shards(folder)[1], 1)
    message = fault(folder)
    assert "model-00002-of-00002.safetensors is truncated: tensor model." in message
    assert f"the file has {shards(folder)[1].stat().st_size}" in message


def test_a_shard_truncated_by_a_whole_tensor_is_refused(folder):
    extents = Checkpoint.open(folder)._file_of
    last = max(extents.values(), key=lambda file: file.path)
    name, extent = max(last.extents.items(), key=lambda item: item[1].end)
    cut(last.path, extent.end - extent.start)
    assert f"truncated: tensor {name} " in fault(folder)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100])
def test_a_shard_cut_inside_its_header_is_refused(folder, keep):
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes()[:keep])
    assert path.name in fault(folder)


def test_bytes_after_the_last_tensor_are_refused(folder):
    path = shards(folder)[0]
    path.write_bytes(path.read_bytes() + b"\0\0")
    assert "its header describes" in fault(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "BF16", "shape": [2], "data_offsets": [0, 3]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [4, 0]},
        {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [1 << 63, 2], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [1 << 61, 1 << 61], "data_offsets": [0, 4]},
        {"dtype": "Q9", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": "2", "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [2.0], "data_offsets": [0, 4]},
        {"shape": [2], "data_offsets": [0, 4]},
        {"dtype": "BF16", "shape": [2], "data_offsets": [2, 6]},
        [],
        None,
    ],
)
def test_a_header_that_lies_about_a_tensor_is_refused_before_anything_is_read(folder, entry):
    header = json.dumps({Q1: entry}).encode()
    (folder / INDEX_FILE).unlink()
    shards(folder)[0].write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    message = fault(folder)
    assert Q1 in message and shards(folder)[0].name in message


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff\xfe", b"3"])
def test_a_header_that_is_no_json_object_is_refused(folder, header):
    shards(folder)[0].write_bytes(struct.pack("<Q", len(header)) + header)
    assert "is not JSON" in fault(folder)


def test_a_tensor_of_wrong_shape_says_expected_and_found(folder):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {Q1: tensors[Q1][:-1]})
    assert f"tensor {Q1} has shape [127, 64], expected [128, 64]" in fault(folder)


def test_a_tensor_of_a_dtype_we_do_not_read_says_expected_and_found(folder):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {Q1: tensors[Q1].to(torch.int32)})
    assert f"tensor {Q1} has dtype I32, expected one of BF16, F16, F32" in fault(folder)


def test_a_config_of_another_model_is_told_from_a_tensor_that_got_lost(folder):
    edit_config(folder, num_local_experts=0, intermediate_size=96)
    assert "are there that it has no place for (model.layers.1." in fault(folder)
    assert "different models: take both from one" in fault(folder)


@pytest.mark.parametrize(
    ("value", "said"), [(False, "is false; copy the file"), (None, "is not set; copy the file")]
)
def test_a_head_that_is_missing_is_told_with_what_the_config_says(folder, value, said):
    edit_config(folder, tie_word_embeddings=value)
    tensors = read_tensors(folder)
    tensors.pop("lm_head.weight", None)
    write_tensors(folder, tensors)
    assert f"lm_head.weight is missing, and tie_word_embeddings in config.json {said}" in fault(folder)


def test_a_missing_tensor_is_named(folder):
    tensors = read_tensors(folder)
    del tensors[Q1]
    write_tensors(folder, tensors)
    assert f"1 of {len(tensors) + 2} tensors are missing ({Q1})" in fault(
        folder
    )  # the tied head counts as expected


def test_a_tensor_that_belongs_to_nothing_is_named(folder):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {Q1 + "_scale_inv": torch.ones(1)})
    message = fault(folder)
    assert "1 tensors belong to no part of a qwen3_moe model" in message and Q1 + "_scale_inv" in message


def test_biases_that_the_config_does_not_announce_are_refused(folder):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {"model.layers.1.self_attn.q_proj.bias": torch.ones(128)})
    assert "q_proj.bias" in fault(folder)


def test_a_tied_head_may_be_absent(folder):
    assert HEAD not in read_tensors(folder)
    assert Checkpoint.open(folder).spec.tied_head


def test_a_head_equal_to_the_embedding_is_held_once(folder, caplog):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {HEAD: tensors[EMBED].clone()})
    with caplog.at_level(logging.WARNING):
        assert Checkpoint.open(folder).spec.tied_head
    assert not caplog.records


def test_a_head_that_differs_from_the_embedding_wins_over_the_config_with_a_warning(folder, caplog):
    tensors = read_tensors(folder)
    write_tensors(folder, tensors | {HEAD: tensors[EMBED] + 1})
    with caplog.at_level(logging.WARNING):
        assert not Checkpoint.open(folder).spec.tied_head
    assert "lm_head.weight is there and differs" in caplog.text


def test_an_untied_head_must_be_there(folder):
    edit_config(folder, tie_word_embeddings=False)
    message = fault(folder)
    assert HEAD in message and "tie_word_embeddings" in message


def test_every_broken_folder_is_the_users_fault():
    assert issubclass(CheckpointError, UserError) and issubclass(ConfigError, UserError)


def test_equal_models_have_equal_hashes_however_they_are_filed(folder, original):
    original_hash = Checkpoint.open(original).model_hash
    assert Checkpoint.open(folder).model_hash == original_hash
    (folder / INDEX_FILE).unlink()
    assert Checkpoint.open(folder).model_hash == original_hash


def test_one_changed_weight_or_setting_changes_the_hash(folder, original):
    original_hash = Checkpoint.open(original).model_hash
    path = shards(folder)[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    changed_hash = Checkpoint.open(folder).model_hash
    edit_config(folder, rms_norm_eps=1e-5)
    assert len({original_hash, changed_hash, Checkpoint.open(folder).model_hash}) == 3


def test_a_large_model_is_hashed_by_samples(folder, monkeypatch):
    from edge_runtime.model import checkpoint

    whole = Checkpoint.open(folder).model_hash
    monkeypatch.setattr(checkpoint, "HASH_ALL_BYTES", 0)
    sampled = Checkpoint.open(folder).model_hash
    write_tiny_qwen3_moe(folder, mlp_only_layers=[0], seed=1)
    assert len({whole, sampled, Checkpoint.open(folder).model_hash}) == 3


# Families whose experts lie in other ways.


def test_an_expert_stored_twice_is_not_ignored(tmp_path):
    write_tiny("olmoe", tmp_path / "hub")
    write_tiny("olmoe", tmp_path / "fused", as_on_hub=False)
    fused = read_tensors(tmp_path / "fused")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    write_tensors(tmp_path / "hub", read_tensors(tmp_path / "hub") | {name: fused[name]})
    assert f"1 tensors belong to no part of a olmoe model of this config ({name})" in fault(tmp_path / "hub")


def test_one_missing_expert_and_a_missing_tensor_of_all_experts_are_named(tmp_path):
    for as_on_hub, name in (
        (True, "model.layers.2.block_sparse_moe.experts.5.w2.weight"),
        (False, "model.layers.2.mlp.experts.down_proj"),
    ):
        folder = write_tiny("mixtral", tmp_path / str(as_on_hub), as_on_hub=as_on_hub)
        tensors = read_tensors(folder)
        del tensors[name]
        write_tensors(folder, tensors)
        assert "are missing" in fault(folder) and ".layers.2." in fault(folder)


def test_fused_experts_of_another_count_say_expected_and_found(tmp_path):
    folder = write_tiny("qwen2_moe", tmp_path, as_on_hub=False)
    tensors = read_tensors(folder)
    name = "model.layers.0.mlp.experts.down_proj"
    write_tensors(folder, tensors | {name: tensors[name][:7]})
    assert f"tensor {name} has shape [7, 64, 48], expected [8, 64, 48]" in fault(folder)


def test_old_rope_tables_in_a_checkpoint_are_no_part_of_the_model(tmp_path):
    folder = write_tiny("mixtral", tmp_path)
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    write_tensors(folder, read_tensors(folder) | inv_freq)
    assert Checkpoint.open(folder).spec.family == "mixtral"


@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_ties_its_head_or_has_one(family, tmp_path):
    folder = write_tiny(family, tmp_path, num_shards=1, tie_word_embeddings=False)
    tensors = read_tensors(folder)
    assert not Checkpoint.open(folder).spec.tied_head
    write_tensors(folder, {name: tensor for name, tensor in tensors.items() if name != HEAD})
    assert HEAD in fault(folder)
    edit_config(folder, tie_word_embeddings=True)
    assert Checkpoint.open(folder).spec.tied_head


OFFLINE = """
import socket, sys

def refuse(*arguments, **options):
    raise AssertionError("a socket was opened")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from topology.ids import ExpertId

checkpoint = Checkpoint.open(sys.argv[1])
load_trunk(checkpoint, checkpoint.spec, 0, 1, context_tokens=16)
load_experts(checkpoint, checkpoint.spec, [ExpertId(0, 0)])
Tokenizer.open(sys.argv[1]).encode("no network is needed")
assert not any(name.split(".")[0] in ("requests", "httpx", "urllib3") for name in sys.modules), "a client was loaded"
"""


def test_a_local_folder_is_read_without_the_network(demo_model, repository):
    run = subprocess.run(
        [sys.executable, "-c", OFFLINE, demo_model], cwd=repository, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
