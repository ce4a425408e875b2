"""Writes tiny random checkpoints with transformers, and loads the reference that ours must equal."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_FILE = "model.safetensors.index.json"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence what transformers itself warns of and shows while it saves and loads."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub|torch)(\.|$)")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "intermediate_size": 96,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 40,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "routed_scaling_factor": 16.0,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                **YARN,
                "rope_theta": 10000.0,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "intermediate_size": 96,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 16,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "swiglu_limit": 2.0,
            "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
        },
    ),
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": (
        "Olmoe",
        {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 1.5},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
    ),
}
"""family -> how transformers calls it, and its keys beside COMMON."""


def write_tiny(
    family: str,
    folder: Path,
    *,
    num_shards: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    as_on_hub: bool = True,
    **config: Any,
) -> Path:
    """A random model of one family: width 64, 8 experts top-2, vocabulary 512; `config` overrides keys.

    Weights are large enough for attention, gate and experts all to matter, and none is left at its neutral value.

    as_on_hub   names as the family's published checkpoints have them, or as transformers holds them in memory
    """
    import transformers

    name, keys = TINY[family]
    keys = COMMON | keys | config
    with quiet_transformers():
        model_class = getattr(transformers, name.removesuffix("Text") + "ForCausalLM")
        model = model_class(getattr(transformers, name + "Config")(**keys))
        randomise(model, seed)
        model = model.to(dtype)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # A shard is closed before it would pass the limit, so aim a little above an even share.
        limit = num_bytes + 1 if num_shards == 1 else -(-num_bytes * 11 // (num_shards * 10))
        model.save_pretrained(folder, max_shard_size=limit, save_original_format=as_on_hub)
    return folder


def write_tiny_qwen3_moe(folder: Path, **options: Any) -> Path:
    """A random qwen3_moe model of 3 layers; see `write_tiny`."""
    return write_tiny("qwen3_moe", folder, **options)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of two words, for models that are only looked at."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a random value of a size that matters."""
    generator = torch.Generator().manual_seed(seed)
    scalars = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *scalars]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Set and remove keys of config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in remove}))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, Tensor], file: str = "model.safetensors") -> None:
    """Replace a checkpoint's weights by these, in one file without an index."""
    from safetensors.torch import save_file

    for path in [*folder.glob("*.safetensors"), folder / INDEX_FILE]:
        path.unlink(missing_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)


class Reference:
    """transformers on the same weights: float32, eager attention, no cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        config = json.loads((folder / "config.json").read_text())
        auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
        with quiet_transformers():
            self.model = auto.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V] float32, each row's logits of the next token."""
        with torch.no_grad():
            # Hidden states are not looked at; but without them transformers stumbles over gemma4's shared keys.
            ids = torch.tensor([token_ids])
            return self.model(ids, use_cache=False, output_hidden_states=True).logits[0]
