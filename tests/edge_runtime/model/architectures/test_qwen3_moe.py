"""What a qwen3_moe config.json becomes, and what of it is refused."""

import json
import logging

import pytest

from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures import read_model

SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 128,
}


def spec(**changes):
    config = {key: value for key, value in (SMALL | changes).items() if value != "ABSENT"}
    return read_model(config)[0]


def refusal(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        spec(**changes)
    return str(caught.value)


def test_the_demo_model_is_read_as_its_readme_says(demo_model):
    read, table, _ = read_model(json.loads((demo_model / "config.json").read_text()))
    layer = read.layers[5]
    assert (read.num_layers, read.width, read.vocab_size, read.context_tokens) == (6, 256, 8192, 512)
    assert (layer.kind, layer.gate.num_experts, layer.gate.top_k, layer.ffn.width) == ("moe", 32, 4, 96)
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_width) == (4, 2, 64)
    assert layer.gate.renormalise and read.tied_head and layer.attention.qk_norm == "head"
    assert table.name("expert_down", 5, 31) == "model.layers.5.mlp.experts.31.down_proj.weight"
    assert table.part("expert_down", 5, 31).shape == (256, 96)
    assert table.part("q", 0).shape == (256, 256) and table.part("k", 0).shape == (128, 256)


def test_a_spec_is_plain_data_that_can_be_compared_and_hashed():
    assert spec() == spec() and hash(spec()) == hash(spec())
    assert spec() != spec(norm_topk_prob=False)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    ],
)
def test_every_spelling_of_the_rope_settings_is_read(rope):
    assert spec(**rope).layers[0].attention.rope.theta == 1e6


def test_rope_theta_is_ten_thousand_if_nothing_says_otherwise():
    assert spec().layers[0].attention.rope.theta == 10_000.0


def test_the_count_of_experts_has_two_names():
    assert spec(num_experts="ABSENT", num_local_experts=8) == spec()


def test_the_head_width_is_what_the_heads_share_if_it_is_not_given():
    assert spec(head_dim="ABSENT").layers[0].attention.head_width == 16


@pytest.mark.parametrize(
    ("changes", "moe_layers"),
    [
        ({}, (0, 1, 2, 3)),
        ({"mlp_only_layers": [0]}, (1, 2, 3)),
        ({"decoder_sparse_step": 2}, (1, 3)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1,)),
        ({"num_experts": 0}, ()),
        ({"mlp_only_layers": None}, (0, 1, 2, 3)),
    ],
)
def test_dense_layers_are_where_the_config_puts_them(changes, moe_layers):
    read = spec(**changes)
    assert read.moe_layers == moe_layers
    assert all(layer.ffn.width == (48 if layer.kind == "moe" else 96) for layer in read.layers)


def test_weights_are_renormalised_only_if_the_config_says_so():
    assert not spec(norm_topk_prob="ABSENT").layers[0].gate.renormalise


def test_a_window_as_long_as_the_context_hides_nothing_and_is_accepted():
    assert spec(use_sliding_window=True, sliding_window=128).layers[0].attention.window is None
    assert spec(use_sliding_window=False, sliding_window=4, max_window_layers=2) == spec()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type 'llama'", "supported are ", "qwen3_moe"]),
        ({"model_type": "ABSENT"}, ["model_type None", "qwen3_moe"]),
        ({"hidden_act": "gelu"}, ["hidden_act = 'gelu'", "'silu'"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window = 0", "at least 1"]),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            ["rope_scaling.rope_type = 'longrope'", "'default'"],
        ),
        ({"rope_parameters": {"type": "linear", "factor": 0}}, ["rope_parameters.factor = 0"]),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            ["rope_parameters.partial_rotary_factor = 0.5"],
        ),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor = 0.25"]),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, ["rope_parameters.mrope_section = [1, 2]"]),
        ({"rope_theta": -1.0}, ["rope_theta = -1.0", "above 0"]),
        ({"rope_theta": True}, ["rope_theta = True"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling = 'yarn'", "object"]),
        (
            {"quantization_config": {"quant_method": "awq"}},
            ["quantization_config.quant_method = 'awq'", "fp8"],
        ),
        ({"hidden_size": "ABSENT"}, ["hidden_size is missing"]),
        ({"hidden_size": 0}, ["hidden_size = 0", "at least 1"]),
        ({"hidden_size": "64"}, ["hidden_size = '64'", "whole number"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers = True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "4 heads"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok = 9", "8 experts"]),
        ({"mlp_only_layers": [4]}, ["mlp_only_layers = [4]", "0 to 3"]),
        ({"mlp_only_layers": "0"}, ["mlp_only_layers = '0'", "list"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings = 1", "true or false"]),
        ({"rms_norm_eps": 0.0}, ["rms_norm_eps = 0.0", "above 0"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_key_and_value(changes, words):
    message = refusal(**changes)
    assert message.startswith("config.json: ")
    for word in words:
        assert word in message


def test_a_key_that_nothing_understands_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        spec(new_attention_trick=3, another_switch=False, use_cache=True)
    assert "new_attention_trick = 3" in caplog.text
    assert "another_switch" not in caplog.text and "use_cache" not in caplog.text
