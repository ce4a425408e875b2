"""The gate: rows to expert ids and weights, for every family by its GateSpec. Float32, ties to the lowest id."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from edge_runtime.model.spec import GateSpec
from kernels import ops
from kernels.ops import Counting, LinearWeight
from kernels.reference.gate_topk import GateRule


class GateWeights(NamedTuple):
    """One layer's gate; vectors are float32."""

    weight: LinearWeight  # [E, D]
    bias: Tensor | None = None  # [E]
    selection_bias: Tensor | None = None  # [E]
    expert_scale: Tensor | None = None  # [E]
    norm: Tensor | None = None  # [D], the scale of the gate's own norm, D ** -0.5 included


def gate(
    spec: GateSpec,
    weights: GateWeights,
    x: Tensor,
    *,
    logits: Tensor,
    out: tuple[Tensor, Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    counting: Counting | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each row's experts.

    x        [T, D] float32, what the layer's norm gave, or the gate's own
    logits   [T, E] float32, written: the scores before the softmax
    out      where ids and weights go
    options  what `gate_options` gave, for callers in a hurry
    counting where the choices are counted by KV block
    returns  expert_ids [T, K] int32, best first, and gate_weights [T, K] float32
    """
    options = gate_options(spec, weights) if options is None else options
    ops.linear(x, weights.weight, bias=weights.bias, out=logits)
    return ops.gate_topk(
        logits, spec.top_k, renormalise=spec.renormalise, counting=counting, out=out, **options
    )


def gate_options(spec: GateSpec, weights: GateWeights) -> dict[str, Any]:
    """The arguments that a plain softmax gate does not need."""
    found: dict[str, Any] = {}
    if spec.scores != "softmax":
        found["scores"] = spec.scores
    if spec.num_groups > 1:
        found |= {"num_groups": spec.num_groups, "top_groups": spec.top_groups}
    if spec.scale != 1.0:
        found["scale"] = spec.scale
    if weights.expert_scale is not None:
        found["expert_scale"] = weights.expert_scale
    if weights.selection_bias is not None:
        found["selection_bias"] = weights.selection_bias
    return found


def gate_rule(spec: GateSpec, weights: GateWeights) -> GateRule:
    """The same, for a gate that is bound to a layer."""
    return GateRule(renormalise=spec.renormalise, **gate_options(spec, weights))
