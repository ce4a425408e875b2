"""Configs: what each family reads, in every spelling, and what it refuses by key and value."""

import copy
from typing import Any

import pytest
import torch

from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures import FAMILIES, read_model
from edge_runtime.model.rope import rope_table
from edge_runtime.model.spec import ModelSpec
from tests.support.families import LLAMA3
from tests.support.tiny_models import COMMON, TINY, YARN, quiet_transformers


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a family's tiny model as transformers writes it, with some keys changed."""
    import transformers

    name, keys = TINY[family]
    with quiet_transformers():
        config = getattr(transformers, name + "Config")(**copy.deepcopy(COMMON | keys)).to_dict()
    return {key: value for key, value in (config | changes).items() if value is not REMOVED}


REMOVED = object()


def spec_of(family: str, **changes: Any) -> ModelSpec:
    return read_model(config_of(family, **changes))[0]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
    ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide 4 heads"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the 8 experts"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 must be"),
    ("mixtral", {"sliding_window": 0}, "sliding_window = 0 must be"),
    ("mixtral", {"hidden_size": "64"}, "hidden_size = '64' must be"),
    ("mixtral", {"hidden_size": REMOVED}, "hidden_size is missing"),
    ("mixtral", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1 must be true or false"),
    (
        "mixtral",
        {"rope_scaling": {"type": "longrope"}},
        "rope_scaling.rope_type = 'longrope' is not supported",
    ),
    ("mixtral", {"rope_scaling": {"type": "yarn", "factor": 0}}, "rope_scaling.factor = 0 must be"),
    ("mixtral", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2, "low": 1}}, "rope_scaling.low = 1 is not"),
    ("mixtral", {"rope_scaling": {"type": "default", "factor": 2}}, "rope_scaling.factor = 2 is not"),
    ("mixtral", {"rope_scaling": [1]}, "rope_scaling = [1] must be an object"),
    ("mixtral", {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate = 1 must be true or false"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported, only 1.0"),
    ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan must be a number above 0"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be"),
    ("qwen2_moe", {"mlp_only_layers": [3]}, "mlp_only_layers = [3] names a layer outside 0 to 2"),
    (
        "qwen2_moe",
        {"layer_types": ["sliding_attention"] * 3},
        "is not supported with use_sliding_window false",
    ),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types = ['full_attention'] must have"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes' must be true or false"),
    ("olmoe", {"num_attention_heads": 6}, "num_attention_heads = 6 does not divide hidden_size 64"),
    ("olmoe", {"head_dim": 32}, "head_dim = 32 is not supported"),
    ("olmoe", {"clip_qkv": -1.0}, "clip_qkv = -1.0 must be a number above 0"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "must have full_attention or sliding_attention"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit = 0 must be a number above 0"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' is not supported"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True is not supported"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' is not supported"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True is not supported"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads = 2 must be 4"),
    ("deepseek_v2", {"n_group": 3}, "n_group = 3 does not divide 8 experts"),
    ("deepseek_v2", {"topk_group": 5}, "topk_group = 5 does not fit 4 groups"),
    ("deepseek_v2", {"num_experts_per_tok": 5}, "topk_group = 2 does not fit 4 groups and top 5"),
    ("deepseek_v2", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 must be even"),
    ("gemma4", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input = 256 is not supported"),
    (
        "gemma4",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention = 'all' is not supported",
    ),
    ("gemma4", {"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported"),
    (
        "gemma4",
        {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
        "must end with full_attention",
    ),
    ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 leaves a kind of layer without"),
    ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 leaves a kind of layer without"),
    ("gemma4", {"per_layer_config": {"1": {"window": 3}}}, "per_layer_config.1.window = 3 is not supported"),
    ("gemma4", {"per_layer_config": {"9": {}}}, "names a layer outside 0 to 3"),
    ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_key_value_heads = 3 does not"),
    ("gemma4", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.sliding_attention"),
]


@pytest.mark.parametrize(("family", "changes", "said"), REFUSED)
def test_what_cannot_be_run_is_refused_by_key_and_value(family, changes, said):
    with pytest.raises(ConfigError) as caught:
        read_model(config_of(family, **changes), source="here/config.json")
    assert said in str(caught.value) and str(caught.value).startswith("here/config.json: ")


@pytest.mark.parametrize("family", sorted(TINY))
def test_transformers_own_config_is_read_without_a_warning(family, caplog):
    config = config_of(family)
    spec, table, quantisation = read_model(config)
    assert not caplog.records
    assert spec.family == family and spec.num_layers == config["num_hidden_layers"]
    assert quantisation.method == "none"
    assert all(part.shape and all(size > 0 for size in part.shape) for part in table.all_parts())


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_key_that_nobody_knows_is_told_of(family, caplog):
    read_model(config_of(family, mystery_factor=3))
    assert "key mystery_factor = 3 is not known and has no effect" in caplog.text


def test_a_nested_text_config_is_the_model(caplog):
    nested = {"model_type": "gemma4", "text_config": config_of("gemma4"), "vision_config": {}}
    assert read_model(nested)[0] == spec_of("gemma4")
    with pytest.raises(ConfigError, match="text_config = 3 must be an object"):
        read_model({"model_type": "gemma4", "text_config": 3})


def test_gemma4_head_widths_may_be_told_for_all_global_layers_or_layer_by_layer():
    by_layer = spec_of("gemma4")
    as_published = spec_of(
        "gemma4", per_layer_config=REMOVED, global_head_dim=32, num_global_key_value_heads=1
    )
    assert as_published == by_layer
    assert [layer.attention.head_width for layer in by_layer.layers] == [16, 32, 16, 32]
    assert [layer.attention.num_kv_heads for layer in by_layer.layers] == [2, 1, 2, 1]


def test_gemma4_layers_that_share_keys_use_the_last_of_their_kind_that_has_some():
    spec = spec_of("gemma4", num_kv_shared_layers=2)
    assert [layer.attention.kv_shared_with for layer in spec.layers] == [None, None, 0, 1]


def test_which_layers_are_dense_follows_from_each_familys_keys():
    def kinds(family: str, **changes: Any) -> list[str]:
        return [layer.kind for layer in spec_of(family, **changes).layers]

    assert kinds("deepseek_v2", first_k_dense_replace=2) == ["dense", "dense", "moe"]
    assert kinds("qwen2_moe", mlp_only_layers=[0, 2]) == ["dense", "moe", "dense"]
    assert kinds("qwen3_moe", decoder_sparse_step=2) == ["dense", "moe", "dense"]
    assert kinds("qwen2_moe", decoder_sparse_step=3, mlp_only_layers=[2]) == ["dense"] * 3


def test_windows_follow_from_each_familys_keys():
    def windows(family: str, **changes: Any) -> list[int | None]:
        return [layer.attention.window for layer in spec_of(family, **changes).layers]

    slides = {"use_sliding_window": True, "sliding_window": 16, "layer_types": REMOVED}
    assert windows("gpt_oss") == [16, None, 16]
    assert windows("gpt_oss", sliding_window=128) == [None] * 3  # as long as the context
    assert windows("mixtral", sliding_window=16) == [16] * 3
    assert windows("qwen3_moe", **slides) == [16] * 3
    assert windows("qwen3_moe", sliding_window=16) == [None] * 3
    assert windows("qwen2_moe", **slides, max_window_layers=2) == [16, None, None]
    assert windows("qwen2_moe", **slides, max_window_layers=28) == [16, None, 16]
    assert windows("gemma4") == [16, None, 16, None]


SPELLINGS = [
    {"rope_theta": 1e5, "rope_scaling": YARN},
    {
        "rope_theta": 1e5,
        "rope_scaling": {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}},
    },
    {"rope_parameters": {**YARN, "rope_theta": 1e5}},
    {"rope_theta": 3.0, "rope_parameters": {**YARN, "rope_theta": 1e5}},
    {
        "rope_scaling": {**YARN, "rope_theta": 1e5},
        "rope_parameters": {"rope_type": "default", "rope_theta": 2.0},
    },
    {
        "rope_theta": 1e5,
        "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_rope_means_the_same(family, spelling):
    expected = spec_of(family, rope_parameters={**YARN, "rope_theta": 1e5}).layers[0].attention
    found = spec_of(family, **{"rope_parameters": None} | copy.deepcopy(spelling)).layers[0].attention
    assert found == expected


@pytest.mark.parametrize(
    ("family", "theta"), [("mixtral", 1e6), ("qwen2_moe", 1e4), ("olmoe", 1e4), ("gpt_oss", 150_000.0)]
)
def test_a_config_without_rope_settings_has_its_familys_default(family, theta):
    rope = spec_of(family, rope_parameters=None).layers[0].attention.rope
    assert rope.theta == theta
    assert (rope.kind, rope.factor) == (("yarn", 32.0) if family == "gpt_oss" else ("default", 1.0))


ROPES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"rope_type": "default", "rope_theta": 1e6}),
    ("mixtral", {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}),
    ("mixtral", {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}),
    ("mixtral", {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 64}),
    ("mixtral", {**YARN, "rope_theta": 1e4}),
    ("mixtral", {**YARN, "rope_theta": 1e4, "attention_factor": 1.5}),
    ("mixtral", {**YARN, "rope_theta": 1e4, "beta_fast": None, "beta_slow": None}),
    ("gpt_oss", {**YARN, "rope_theta": 150_000.0, "truncate": False}),
    (
        "gpt_oss",
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
]


@pytest.mark.parametrize(("family", "settings"), ROPES)
def test_rope_tables_are_those_of_transformers(family, settings):
    import transformers
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    changes = {"rope_parameters": settings, "head_dim": 64, "max_position_embeddings": 128}
    config = config_of(family, **copy.deepcopy(changes))
    rope = read_model(config)[0].layers[0].attention.rope
    cos, sin = rope_table(rope, 64, 128)
    classes = {"mixtral": MixtralRotaryEmbedding, "gpt_oss": GptOssRotaryEmbedding}
    with quiet_transformers():
        theirs = classes[family](getattr(transformers, TINY[family][0] + "Config")(**config))
    expected = theirs(torch.zeros(1), torch.arange(128)[None])
    for found, wanted in zip((cos, sin), expected, strict=True):
        assert torch.equal(found, wanted[0, :, :32])


def test_gemma4s_two_ropes_are_those_of_transformers():
    import transformers
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = config_of("gemma4")
    layers = read_model(config)[0].layers
    with quiet_transformers():
        theirs = Gemma4TextRotaryEmbedding(transformers.Gemma4TextConfig(**config))
    for index, kind in ((0, "sliding_attention"), (1, "full_attention")):
        attention = layers[index].attention
        found = rope_table(attention.rope, attention.head_width, 128)
        expected = theirs(torch.zeros(1), torch.arange(128)[None], kind)
        for ours, wanted in zip(found, expected, strict=True):
            assert torch.equal(ours, wanted[0, :, : attention.head_width // 2])


def test_latent_attention_scales_scores_by_yarns_factor_twice():
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

    for changes in ({"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {}):
        config = config_of("deepseek_v2", rope_parameters={**YARN, "rope_theta": 1e4, **changes})
        with quiet_transformers():
            expected = DeepseekV2Attention(DeepseekV2Config(**copy.deepcopy(config)), 0).scaling
        assert read_model(config)[0].layers[0].attention.scale == pytest.approx(expected, rel=1e-12)


def test_an_unsupported_family_names_the_supported_ones():
    with pytest.raises(
        ConfigError, match="'gpt2' is not supported; supported are deepseek_v2, .*switch_transformers"
    ):
        read_model({"model_type": "gpt2"})
    assert len(FAMILIES) == 9  # gemma4 by two names
