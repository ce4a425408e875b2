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


def write_tiny_qwen3_moe(
    folder: Path,
    *,
    num_shards: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random qwen3_moe model: 3 layers, width 64, 8 experts top-2, vocabulary 512; `config` overrides keys.

    Weights are large enough for attention, gate and experts all to matter, and none is left at its neutral value.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    keys = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | config
    with quiet_transformers():
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys))
        randomise(model, seed)
        model = model.to(dtype)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # A shard is closed before it would pass the limit, so aim a little above an even share.
        limit = num_bytes + 1 if num_shards == 1 else -(-num_bytes * 11 // (num_shards * 10))
        model.save_pretrained(folder, max_shard_size=limit)
    return folder


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a random value of a size that matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
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
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()

    def logits(self, token_ids: list[int]) -> Tensor:
        """[T, V] float32, each row's logits of the next token."""
        with torch.no_grad():
            return self.model(torch.tensor([token_ids]), use_cache=False).logits[0]
