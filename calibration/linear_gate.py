"""The linear gate over sub-experts: the model's own gate with every row N times, and what it chooses at tier K.

Untrained it chooses whole experts; `gate_finetune` trains its rows apart. Weights are those of the trained gate: normalised
over the N * k0 best sub-experts whatever K, since a sum over fewer would inflate what is left. Knows the plain model.
"""

import torch
from torch import Tensor

from calibration.plain_model import PlainModel, Route, Routed, choose_experts
from edge_runtime.errors import ConfigError
from edge_runtime.model.spec import GateSpec

Rows = tuple[Tensor, Tensor | None]
"""Weight [E * N, D] and bias [E * N] or None; row e * N + s is sub-expert s of expert e."""


def expanded(gate: Rows, num_parts: int) -> Rows:
    """Every row of a gate N times."""
    weight, bias = gate
    repeated = None if bias is None else bias.repeat_interleave(num_parts, dim=0)
    return weight.repeat_interleave(num_parts, dim=0), repeated


def linear_route(model: PlainModel, num_parts: int, tier: int) -> Route:
    """Who chooses at tier K where `model.gates` are expanded: the best K of the sub-experts of all experts."""

    def route(layer: int, x: Tensor, logits: Tensor) -> Routed:
        spec = model.spec.layers[layer].gate
        assert spec is not None, f"layer {layer} has no gate"
        extras = {
            name: None if part is None else part.repeat_interleave(num_parts)
            for name, part in model.gate_extras(layer).items()
        }
        ids, weights = choose_experts(spec, logits, top_k=spec.top_k * num_parts, **extras)
        if not (spec.scores == "sigmoid" and not spec.renormalise):
            weights = (
                weights * num_parts
            )  # the softmax is over N times as many, and so is the sum of the best
        ids, weights = ids[:, :tier], weights[:, :tier]
        one_hot = torch.nn.functional.one_hot(ids % num_parts, num_parts)
        return Routed(ids // num_parts, weights[..., None] * one_hot)

    return route


def check_tier(tier: int, spec: GateSpec, num_parts: int) -> None:
    """Refuse a tier that is none."""
    if not 1 <= tier <= spec.top_k * num_parts:
        raise ConfigError(
            f"K is {tier}, expected 1 to {spec.top_k * num_parts}, which is {num_parts} sub-experts of "
            f"{spec.top_k} experts"
        )
