"""What a step must read and compute at least, and what therefore limits it. Arithmetic on a model's numbers; no engine.

The floor of a step is the larger of its bytes at the machine's stream speed and its arithmetic at the machine's peak.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.errors import ConfigError

LIMITS_FROM = 0.6  # a floor that explains this much of the time is called the limit; below it is overhead
BLOCK_BYTES = {
    "bf16": 2.0, "bf16x2": 2.0, "fp16": 2.0, "fp32": 4.0, "int8": 34 / 32, "int4": 18 / 32, "mxfp4": 17 / 32
}  # fmt: skip
"""Bytes per weight as GGUF stores them: q8_0 and q4_0 keep a 2-byte scale per 32 weights, mxfp4 a byte."""


@dataclass(frozen=True)
class Sizes:
    """How many numbers a model has, by how often a step reads them."""

    trunk: int
    """Matrices of every layer but the routed experts'."""
    head: int
    embedding: int
    expert: int
    """One routed expert."""
    experts: int
    """Routed experts in a layer."""
    top_k: int
    moe_layers: int
    kv_per_token: int
    """Keys and values of one token, all layers."""
    attention_flops: int
    """Operations of one row with one position before it, all layers."""

    @property
    def total(self) -> int:
        return self.trunk + self.head + self.embedding + self.expert * self.experts * self.moe_layers


@dataclass(frozen=True)
class Cost:
    """Least bytes read from memory, and operations (a multiply-add is two)."""

    bytes: float
    flops: float

    def floor_s(self, stream_bps: float, peak_flops: float) -> float:
        """Seconds below which this cannot be done. stream_bps in bytes per second."""
        return max(self.bytes / stream_bps, self.flops / peak_flops)


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """From the config.json of a Qwen3-MoE model whose every layer is routed. ConfigError for others."""
    if (found := config.get("model_type")) != "qwen3_moe":
        raise ConfigError(
            f"--peers: found a model of the kind {found!r}, expected 'qwen3_moe', the one whose least bytes and operations "
            "are known here; `edge-runtime bench --topology` measures others"
        )
    D, L, P = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    q, kv = config["num_attention_heads"] * P, config["num_key_value_heads"] * P
    E, V = config["num_experts"], config["vocab_size"]
    return Sizes(
        trunk=L * D * (2 * q + 2 * kv + E),
        head=V * D,
        embedding=0 if config["tie_word_embeddings"] else V * D,
        expert=3 * D * config["moe_intermediate_size"],
        experts=E,
        top_k=config["num_experts_per_tok"],
        moe_layers=L,
        kv_per_token=2 * L * kv,
        attention_flops=4 * L * q,
    )


def decode_cost(
    sizes: Sizes,
    requests: int,
    context: float,
    distinct_experts: float,
    *,
    trunk_bytes: float,
    expert_bytes: float,
    kv_bytes: float,
) -> Cost:
    """One step of `requests` rows, each with `context` positions.

    distinct_experts   how many experts of a layer these rows use between them
    trunk_bytes, expert_bytes, kv_bytes   bytes of one number of each
    """
    read = (sizes.trunk + sizes.head) * trunk_bytes
    read += sizes.moe_layers * distinct_experts * sizes.expert * expert_bytes
    read += requests * context * sizes.kv_per_token * kv_bytes
    weights = sizes.trunk + sizes.head + sizes.moe_layers * sizes.top_k * sizes.expert
    return Cost(read, requests * (2 * weights + context * sizes.attention_flops))


def prefill_cost(sizes: Sizes, tokens: int, *, trunk_bytes: float, expert_bytes: float) -> Cost:
    """A prompt of `tokens`, whose last row alone needs the head. Every expert is used by some row."""
    used = min(sizes.experts, tokens * sizes.top_k)
    read = (sizes.trunk + sizes.head) * trunk_bytes + sizes.moe_layers * used * sizes.expert * expert_bytes
    weights = sizes.trunk + sizes.moe_layers * sizes.top_k * sizes.expert
    flops = 2 * tokens * weights + 2 * sizes.head + sizes.attention_flops * tokens * (tokens + 1) / 2
    return Cost(read, flops)


@dataclass(frozen=True)
class Limit:
    """How much of the time each floor explains: 1 is the machine's best."""

    bandwidth: float
    arithmetic: float

    @property
    def name(self) -> str:
        """`bandwidth`, `arithmetic`, or `overhead` where neither explains most of the time."""
        if max(self.bandwidth, self.arithmetic) < LIMITS_FROM:
            return "overhead"
        return "bandwidth" if self.bandwidth >= self.arithmetic else "arithmetic"


def limit_of(cost: Cost, seconds: float, stream_bps: float, peak_flops: float) -> Limit:
    """What bounds work of this cost that took so long."""
    return Limit(cost.bytes / stream_bps / seconds, cost.flops / peak_flops / seconds)
