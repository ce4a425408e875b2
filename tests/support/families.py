"""Every variant of every family that the tests hold against transformers, and the README's table of them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edge_runtime.model.architectures import FAMILIES
from tests.support.tiny_models import (
    COMMON,
    TINY,
    YARN,
    edit_config,
    quiet_transformers,
    randomise,
    read_tensors,
    write_tensors,
    write_tiny,
)

TABLE_BEGIN, TABLE_END = "<!-- families: begin -->", "<!-- families: end -->"

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FP16, FP32 = {"dtype": torch.float16}, {"dtype": torch.float32}
FUSED = {"as_on_hub": False}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "plain": {},
        "fused experts": FUSED,
        "window": {"sliding_window": 16},
        "own head width": {"head_dim": 24},
        "tied head": {"tie_word_embeddings": True},
        "fp16": FP16,
        "fp32, one file": {**FP32, "num_shards": 1},
        "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        "dynamic rope": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
        "yarn rope": {"head_dim": 16, "rope_parameters": {**YARN, "rope_theta": 1e4}},
        "llama3 rope": {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
    },
    "qwen2_moe": {
        "plain": {},
        "fused experts": FUSED,
        "renormalised": {"norm_topk_prob": True},
        "no q/k/v bias": {"qkv_bias": False},
        "layer 1 dense": {"mlp_only_layers": [1]},
        "every second layer dense": {"decoder_sparse_step": 2},
        "windows": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    },
    "qwen3_moe": {
        "plain": {},
        "fused experts": FUSED,
        "layer 0 dense": {"mlp_only_layers": [0]},
        "every second layer dense": {"decoder_sparse_step": 2},
        "no routed layer": {"mlp_only_layers": [0, 1, 2]},
        "not renormalised": {"norm_topk_prob": False},
        "untied head": {"tie_word_embeddings": False},
        "one file": {"num_shards": 1},
        "fp32": FP32,
        "fp16": FP16,
        "biased attention": {"attention_bias": True},
        "window": {"use_sliding_window": True, "sliding_window": 16},
        "one kv head": {"num_key_value_heads": 1},
        "as many kv heads as heads": {"num_key_value_heads": 4},
        "one expert per token": {"num_experts_per_tok": 1},
        "all experts per token": {"num_experts_per_tok": 8},
        "odd widths": {"hidden_size": 52, "moe_intermediate_size": 35, "head_dim": 22, "vocab_size": 509},
        "rope theta 1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    },
    "olmoe": {
        "plain": {},
        "fused experts": FUSED,
        "renormalised": {"norm_topk_prob": True},
        "no clip": {"clip_qkv": None},
        "biased attention": {"attention_bias": True},
        "as many kv heads as heads": {"num_key_value_heads": 4},
    },
    "gpt_oss": {
        "plain": {},
        "mxfp4": {"mxfp4": True},
        "no attention bias": {"attention_bias": False},
        "other clamp and slope": {"swiglu_limit": 0.5, "swiglu_alpha": 1.2},
        "windows in all layers but the last": {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]
        },
        "default rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        "tied head": {"tie_word_embeddings": True},
        "fp32": FP32,
    },
    "deepseek_v2": {
        "plain": {},
        "fused experts": FUSED,
        "no groups": {"topk_method": "greedy", "n_group": None, "topk_group": None},
        "no query latent": {"q_lora_rank": None},
        "biased attention": {"attention_bias": True},
        "biased attention, no query latent": {"attention_bias": True, "q_lora_rank": None},
        "default rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "yarn with unequal scales": {
            "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.5}
        },
        "no dense layer": {"first_k_dense_replace": 0},
        "weights not scaled": {"routed_scaling_factor": 1.0},
        "all dense": {"first_k_dense_replace": 3},
    },
    "gemma4": {
        "plain": {},
        "whole model with other towers": {"whole_model": True},
        "values of their own": {"attention_k_eq_v": False, "num_global_key_value_heads": None},
        "shared keys": {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "biased attention": {"attention_bias": True},
        "no soft cap": {"final_logit_softcapping": None},
        "no experts": {"enable_moe_block": False},
        "untied head": {"tie_word_embeddings": False},
    },
}
"""family -> variant -> what `write_variant` is told."""

SWITCH_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "untied": {"tie_word_embeddings": False},
    "capacity 3": {"expert_capacity": 3},
    "router bias": {"router_bias": True},
    "all layers sparse": {"num_sparse_encoder_layers": 3, "num_sparse_decoder_layers": 4},
    "no layer sparse": {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
    "sparse steps given": {"encoder_sparse_step": 2, "decoder_sparse_step": 1},
    "own head width": {"d_kv": 24},
    "fp32, one file": {**FP32, "num_shards": 1},
}
"""The encoder-decoder family: what `write_tiny_switch` is told."""

CASES = [(family, variant) for family, variants in VARIANTS.items() for variant in variants]


def write_variant(family: str, variant: str, folder: Path) -> Path:
    """Write the checkpoint of one variant."""
    options = dict(VARIANTS[family][variant])
    if options.pop("whole_model", False):
        return _write_whole_gemma4(folder)
    quantises = options.pop("mxfp4", False)
    write_tiny(family, folder, **options)
    if quantises:
        store_as_mxfp4(folder)
    return folder


def _write_whole_gemma4(folder: Path) -> Path:
    """The text model in a folder that has a tower for pictures too."""
    import transformers

    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    text = {"model_type": "gemma4_text", **COMMON, **TINY["gemma4"][1]}
    with quiet_transformers():
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
        model = transformers.Gemma4ForConditionalGeneration(config)
        randomise(model, 0)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest MXFP4 numbers of [.., rows, columns]: blocks [.., rows, columns/32, 16] and scales, uint8."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grouped = weight.float().unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(grouped.abs().amax(-1).clamp_min(2.0**-100))) - 2
    scaled = grouped / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def store_as_mxfp4(folder: Path) -> None:
    """Turn the experts of a gpt_oss checkpoint into MXFP4, as the published ones are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = mxfp4_codes(tensor.transpose(1, 2))
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})


def plain_copy(folder: Path, copy: Path) -> Path:
    """A folder whose MXFP4 experts transformers' own decoder has turned into plain numbers; else the folder itself."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = read_tensors(folder)
    packed = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    if not packed:
        return folder
    for name in packed:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales)
    copy.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    write_tensors(copy, tensors)
    return copy


def family_table() -> str:
    """The README's table: what each family's arithmetic has, and which variants are tested."""
    lines = ["| family | what it has | held against `transformers` in |", "|---|---|---|"]
    tested = VARIANTS | {"switch_transformers": SWITCH_VARIANTS}
    for family in sorted(tested):
        variants = "; ".join(tested[family])
        lines.append(f"| `{family}` | {FAMILIES[family].SUMMARY} | {variants} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(family_table())
