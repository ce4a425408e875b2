"""The gate: rows to expert ids and weights, for every family by its GateSpec. Float32, ties to the lowest id."""

from torch import Tensor

from edge_runtime.model.spec import GateSpec
from kernels import ops
from kernels.ops import LinearWeight


def gate(spec: GateSpec, weight: LinearWeight, x: Tensor, *, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each row's experts.

    x        [T, D] float32, what the layer's norm gave
    weight   [E, D]
    logits   [T, E] float32, written: the scores before the softmax
    returns  expert_ids [T, K] int32, best first, and gate_weights [T, K] float32
    """
    ops.linear(x, weight, out=logits)
    return ops.gate_topk(logits, spec.top_k, renormalise=spec.renormalise)
