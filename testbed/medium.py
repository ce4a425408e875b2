"""Writes a random Qwen3-MoE model folder to measure speed on: `python -m testbed.medium FOLDER`.

1.3 billion parameters in bfloat16, which no cache holds, with a tokenizer trained on the spot. Its answers mean nothing.
`--sizes` names layers of known models, of which it writes four with a vocabulary cut down as the layers are.
Tensors are made and written one by one; equal seeds give equal files. Knows no engine.
"""

import argparse
import hashlib
import json
import math
import struct
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SHARD_BYTES = 1 << 30
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
ITEM_BYTES = 2  # bfloat16
TRAINED_ON_BYTES = 6_000_000
# How text is cut before merging, as Qwen2's tokenizer cuts it: other engines know this rule by that name.
SPLIT_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3-MoE model, in the letters of the repository."""

    D: int = 1024
    L: int = 12
    H: int = 16
    G: int = 8
    P: int = 64
    E: int = 64
    K: int = 8
    F: int = 512
    V: int = 32768
    context_tokens: int = 4096

    def config(self) -> dict[str, object]:
        """config.json, readable by older and newer readers: experts and rope are spelt both ways."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": self.V,
            "hidden_size": self.D,
            "intermediate_size": 4 * self.D,
            "moe_intermediate_size": self.F,
            "num_hidden_layers": self.L,
            "num_attention_heads": self.H,
            "num_key_value_heads": self.G,
            "head_dim": self.P,
            "num_experts": self.E,
            "num_experts_per_tok": self.K,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": self.context_tokens,
            "attention_bias": False,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


SIZES = {
    "medium": Shape(),
    # 4 of 16 layers and of as many parts of 50,304 tokens
    "olmoe": Shape(D=2048, L=4, H=16, G=16, P=128, E=64, K=8, F=1024, V=12576),
    # 4 of 48 layers and of as many parts of 151,936 tokens
    "qwen3-30b": Shape(D=2048, L=4, H=32, G=4, P=128, E=128, K=8, F=768, V=12672),
}
"""By name. A step of four layers is cut like one of all: experts and head take the shares of the whole model."""


class Planned(NamedTuple):
    """A tensor to be written. `std` None stands for ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES


def planned_tensors(shape: Shape) -> Iterator[Planned]:
    """Every tensor in the order of the files. Matrices keep the size of what passes through them."""

    def matrix(name: str, outputs: int, inputs: int) -> Planned:
        return Planned(f"{name}.weight", (outputs, inputs), inputs**-0.5)

    def norm(name: str, width: int) -> Planned:
        return Planned(f"{name}.weight", (width,), None)

    yield Planned("model.embed_tokens.weight", (shape.V, shape.D), 1.0)
    for layer in range(shape.L):
        at = f"model.layers.{layer}"
        yield norm(f"{at}.input_layernorm", shape.D)
        yield matrix(f"{at}.self_attn.q_proj", shape.H * shape.P, shape.D)
        yield matrix(f"{at}.self_attn.k_proj", shape.G * shape.P, shape.D)
        yield matrix(f"{at}.self_attn.v_proj", shape.G * shape.P, shape.D)
        yield matrix(f"{at}.self_attn.o_proj", shape.D, shape.H * shape.P)
        yield norm(f"{at}.self_attn.q_norm", shape.P)
        yield norm(f"{at}.self_attn.k_norm", shape.P)
        yield norm(f"{at}.post_attention_layernorm", shape.D)
        yield matrix(f"{at}.mlp.gate", shape.E, shape.D)
        for expert in range(shape.E):
            yield matrix(f"{at}.mlp.experts.{expert}.gate_proj", shape.F, shape.D)
            yield matrix(f"{at}.mlp.experts.{expert}.up_proj", shape.F, shape.D)
            yield matrix(f"{at}.mlp.experts.{expert}.down_proj", shape.D, shape.F)
    yield norm("model.norm", shape.D)
    yield matrix("lm_head", shape.V, shape.D)


def in_shards(tensors: Iterator[Planned], shard_bytes: int) -> list[list[Planned]]:
    """Cut into files of at most `shard_bytes`, a larger tensor alone in its own."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def random_tensor(planned: Planned, seed: int) -> Tensor:
    """The numbers of one tensor, bfloat16; they depend on its name and the seed alone."""
    if planned.std is None:
        return torch.ones(planned.shape, dtype=torch.bfloat16)
    digest = hashlib.blake2b(f"{seed} {planned.name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(planned.shape, generator=generator).mul_(planned.std).bfloat16()


def write_shard(path: Path, tensors: list[Planned], seed: int) -> None:
    """One safetensors file: length and text of its header, then the tensors in a row."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors:
            file.write(random_tensor(tensor, seed).view(torch.uint16).numpy().tobytes())


def write_weights(folder: Path, shape: Shape, seed: int, shard_bytes: int = SHARD_BYTES) -> None:
    """All shards and the index that says which tensor is where."""
    shards = in_shards(planned_tensors(shape), shard_bytes)
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, tensors, seed)
        where.update(dict.fromkeys((tensor.name for tensor in tensors), name))
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def library_text(num_bytes: int) -> Iterator[str]:
    """Sources of Python's standard library, about so many bytes: text that every machine with Python has."""
    left = num_bytes
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts or left <= 0:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text


def write_tokenizer(folder: Path, shape: Shape, num_bytes: int = TRAINED_ON_BYTES) -> None:
    """A byte-level BPE of at most V tokens. Ids it does not use mean nothing and are never in a prompt."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.V,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_text(num_bytes), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": shape.context_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_model(folder: Path, shape: Shape = Shape(), seed: int = 0) -> None:
    """A whole model folder. The config comes last, so a folder that has one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape)
    write_weights(folder, shape, seed)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m testbed.medium", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes; 2.7 GB, the others 3.5 and 5.1 GB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", choices=SIZES, default="medium")
    options = parser.parse_args()
    write_model(options.folder, SIZES[options.sizes], options.seed)
    print(f"{options.folder}: written")


if __name__ == "__main__":
    main()
