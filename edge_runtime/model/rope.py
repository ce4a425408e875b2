"""Rope tables: cosines and sines of every position, for each way of stretching a context. Knows no layer.

Computed once at load in float32, in the order of operations that transformers uses, so that the tables are equal.
"""

import math

import torch
from torch import Tensor

from edge_runtime.model.spec import ModelSpec, RopeSpec

RopeKey = tuple[RopeSpec | None, int]
"""What makes tables differ: the settings and the width they turn."""


def rope_keys(spec: ModelSpec) -> list[RopeKey]:
    """The different tables of a model, in the order its layers need them first."""
    found = {(layer.attention.rope, layer.attention.rotary_width): None for layer in spec.layers}
    return list(found)


def rope_table_bytes(spec: ModelSpec, num_positions: int) -> int:
    """Bytes of all tables of a model: cos and sin, float32, one column per pair."""
    return sum(2 * num_positions * (width // 2) * 4 for _, width in rope_keys(spec))


def rope_table(rope: RopeSpec | None, width: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [num_positions, width / 2] float32, the attention factor included; no columns without rope."""
    if rope is None:
        return torch.empty(num_positions, 0), torch.empty(num_positions, 0)
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope, width)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def turns_are_finite(rope: RopeSpec | None, width: int, num_positions: int) -> bool:
    """Whether every number of such a table is finite; known without making it."""
    if rope is None:
        return True
    return bool((inverse_frequencies(rope, width) * num_positions).isfinite().all())


def inverse_frequencies(rope: RopeSpec, width: int) -> Tensor:
    """Radians per position of each pair, [width / 2] float32."""
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, width, rope.theta**exponents)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    assert rope.kind == "proportional", f"rope kind {rope.kind!r} passed the config reader"
    turned = int(rope.rotary_share * width // 2)
    return torch.cat([plain[:turned], torch.zeros(width // 2 - turned)]) / rope.factor


def _yarn(rope: RopeSpec, width: int, wavelengths: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are stretched, those between are a mixture."""

    def pair_of(turns: float) -> float:
        """The pair that turns so often within the original context."""
        return (width * math.log(rope.original_context_tokens / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    low_wavelength = rope.original_context_tokens / rope.low_freq_factor
    high_wavelength = rope.original_context_tokens / rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > low_wavelength, plain / rope.factor, plain)
    smooth = (rope.original_context_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(is_between, between, stretched)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cosines and sines (or, squared, the scores) with."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
