"""Names and shapes of a GGUF, from a config alone; the file itself needs the package `gguf`."""

import json

import pytest

from edge_runtime.errors import ConfigError
from testbed.bench.peers.gguf_file import convert, entries, padded_tokens
from testbed.medium import Shape, planned_tensors, write_tokenizer

TINY = Shape(D=32, L=2, H=4, G=2, P=16, E=4, K=2, F=16, V=400, context_tokens=64)


def test_every_tensor_of_the_model_goes_into_the_file_once():
    sources = [name for entry in entries(TINY.config()) for name in entry.sources]
    assert sorted(sources) == sorted(tensor.name for tensor in planned_tensors(TINY))


def test_names_are_those_of_qwen3moe_and_shapes_those_of_the_sources():
    shapes = {tensor.name: tensor.shape for tensor in planned_tensors(TINY)}
    found = {entry.name: entry for entry in entries(TINY.config())}
    assert found["blk.1.ffn_down_exps.weight"].shape == (4, 32, 16)
    assert found["blk.1.ffn_gate_exps.weight"].sources[3] == "model.layers.1.mlp.experts.3.gate_proj.weight"
    assert found["blk.0.attn_output.weight"].sources == ("model.layers.0.self_attn.o_proj.weight",)
    assert found["blk.0.ffn_gate_inp.weight"].is_plain
    assert not found["output.weight"].is_plain
    for entry in found.values():
        (shape,) = {shapes[name] for name in entry.sources}
        assert entry.shape == (shape if len(entry.sources) == 1 else (len(entry.sources), *shape)), entry.name


def test_a_tied_head_is_not_written_twice():
    config = TINY.config() | {"tie_word_embeddings": True}
    assert "output.weight" not in {entry.name for entry in entries(config)}


def test_ids_that_the_tokenizer_does_not_use_are_filled_up(tmp_path):
    write_tokenizer(tmp_path, TINY, num_bytes=20_000)
    tokens, kinds, merges = padded_tokens(tmp_path, 500)
    assert len(tokens) == len(kinds) == 500
    assert len(set(tokens)) == 500
    assert kinds[0] == 3 and tokens[1] == "<|bos|>"
    assert kinds[-1] == 5
    assert all(merge.count(" ") == 1 for merge in merges)


def test_another_family_is_refused_by_name(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(ConfigError, match="mixtral; only qwen3_moe"):
        convert(tmp_path, tmp_path / "x.gguf", "bf16")
