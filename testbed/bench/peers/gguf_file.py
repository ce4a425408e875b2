"""Converts a Qwen3-MoE model folder to GGUF, for llama.cpp: `python -m testbed.bench.peers.gguf_file MODEL FILE --format bf16`.

Needs the package `gguf`. Every matrix takes the format asked for, head and embedding too; norms and gates stay float32.
One layer is in memory at a time.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from edge_runtime.errors import ConfigError

FORMATS = ("bf16", "q8_0", "q4_0")
FILE_TYPES = {"bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}
ARCHITECTURE = "qwen3moe"


class Entry(NamedTuple):
    """One tensor of the GGUF: its name there, and the tensors of the folder that are stacked to make it."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    is_plain: bool
    """Float32 whatever the format: norms and gates."""


def entries(config: dict[str, Any]) -> Iterator[Entry]:
    """Every tensor in the order of the file, from the numbers of config.json."""
    D, F, E = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    V, P = config["vocab_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * P, config["num_key_value_heads"] * P
    yield Entry("token_embd.weight", ("model.embed_tokens.weight",), (V, D), False)
    for layer in range(config["num_hidden_layers"]):
        theirs, ours = f"blk.{layer}", f"model.layers.{layer}"

        def one(
            name: str, source: str, *shape: int, plain: bool = False, theirs: str = theirs, ours: str = ours
        ) -> Entry:
            return Entry(f"{theirs}.{name}.weight", (f"{ours}.{source}.weight",), shape, plain)

        yield one("attn_norm", "input_layernorm", D, plain=True)
        yield one("attn_q", "self_attn.q_proj", q, D)
        yield one("attn_k", "self_attn.k_proj", kv, D)
        yield one("attn_v", "self_attn.v_proj", kv, D)
        yield one("attn_output", "self_attn.o_proj", D, q)
        yield one("attn_q_norm", "self_attn.q_norm", P, plain=True)
        yield one("attn_k_norm", "self_attn.k_norm", P, plain=True)
        yield one("ffn_norm", "post_attention_layernorm", D, plain=True)
        yield one("ffn_gate_inp", "mlp.gate", E, D, plain=True)
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            sources = tuple(f"{ours}.mlp.experts.{expert}.{name}_proj.weight" for expert in range(E))
            yield Entry(f"{theirs}.ffn_{name}_exps.weight", sources, (E, *shape), False)
    yield Entry("output_norm.weight", ("model.norm.weight",), (D,), True)
    if not config["tie_word_embeddings"]:
        yield Entry("output.weight", ("lm_head.weight",), (V, D), False)


def padded_tokens(folder: Path, vocab_size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens by id, their kinds (1 plain, 3 control, 5 unused), and merges, as the file wants them."""
    read = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[UNUSED{index}]" for index in range(vocab_size)]
    kinds = [5] * vocab_size
    for token, index in read["model"]["vocab"].items():
        tokens[index], kinds[index] = token, 1
    for added in read["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 1
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in read["model"]["merges"]]
    return tokens, kinds, merges


def convert(folder: Path, target: Path, format: str) -> None:
    """Write `target`. It appears under its name only when it is complete."""
    try:
        import gguf  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "the package gguf is not installed, which is needed to write GGUF: `pip install gguf`"
        ) from error
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen3_moe":
        raise ConfigError(f"{folder} is a {config['model_type']}; only qwen3_moe is written as GGUF")
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, ARCHITECTURE)
    _write_settings(writer, gguf, folder, config, format)
    kind = gguf.GGMLQuantizationType[format.upper()]
    plain = gguf.GGMLQuantizationType.F32
    plan = list(entries(config))
    for entry in plan:
        stored = plain if entry.is_plain else kind
        shape = gguf.quant_shape_to_byte_shape(entry.shape, stored) if stored != plain else entry.shape
        num_bytes = int(np.prod(shape)) * (4 if stored == plain else 1)
        dtype = np.dtype(np.float32 if stored == plain else np.uint8)
        writer.add_tensor_info(
            entry.name, shape, dtype, num_bytes, raw_dtype=None if stored == plain else kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    read = _reader(folder)
    for entry in plan:
        values = torch.stack([read(name) for name in entry.sources]).view(entry.shape).numpy()
        writer.write_tensor_data(values if entry.is_plain else gguf.quants.quantize(values, kind))
    writer.close()
    unfinished.replace(target)


def _write_settings(writer: Any, gguf: Any, folder: Path, config: dict[str, Any], format: str) -> None:
    rope = config.get("rope_parameters") or {}
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[format]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    tokens, kinds, merges = padded_tokens(folder, config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _reader(folder: Path) -> Callable[[str], Tensor]:
    """Name -> float32 tensor, read when asked."""
    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
    return lambda name: file_of[name].get_tensor(name).float()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testbed.bench.peers.gguf_file")
    parser.add_argument("model", type=Path, help="folder with config.json, tokenizer.json and safetensors")
    parser.add_argument("file", type=Path, help="the GGUF to write")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    options = parser.parse_args()
    convert(options.model, options.file, options.format)
    print(f"{options.file}: {options.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
