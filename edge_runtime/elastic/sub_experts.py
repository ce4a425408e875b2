"""A model's sub-experts as calibration left them in an artifact: where neurons go, and what gate neurons foretell.

Checked against the model; knows no file beyond the artifact's sections.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from edge_runtime.artifacts import Artifact
from edge_runtime.elastic.tiers import Elasticity
from edge_runtime.errors import ArtifactError
from edge_runtime.model.spec import ModelSpec


class LayerParts(NamedTuple):
    """One routed layer. E experts, F width, N sub-experts.

    permutation      [E, F] int64    new place -> neuron of the checkpoint; sub-expert s is slice s of N
    slopes, offsets  [E, N] float32  a slice's expected mass by the mean activation of its gate neurons
    """

    permutation: Tensor
    slopes: Tensor
    offsets: Tensor


class SubExperts(NamedTuple):
    """The sub-experts of a model.

    num_parts     N
    gate_neurons  r: the first rows of each slice are its gate neurons
    layers        by number of the routed layer
    """

    num_parts: int
    gate_neurons: int
    layers: dict[int, LayerParts]
    digest: str = ""
    """Equal where neurons lie alike: nodes that differ in it must not work together."""
    sensitivity: Mapping[int, float] = MappingProxyType({})
    """By layer, what a token loses when all of the layer's gate weight is missing; empty if it was not measured."""


def read_elasticity(artifact: Artifact | None, top_k: int) -> Elasticity | None:
    """How far a model of `top_k` experts per token can be cut down; None if its experts were never split."""
    if artifact is None or not top_k or not artifact.has("partition"):
        return None
    return Elasticity(int(artifact.meta("partition")["num_parts"]), top_k)


def read_sub_experts(artifact: Artifact, spec: ModelSpec) -> SubExperts | None:
    """What the artifact has; None if its experts were never split. ArtifactError for what does not fit the model."""
    if not artifact.has("partition"):
        return None
    meta, gate_meta = artifact.meta("partition"), artifact.meta("proxy_gate")
    num_parts, gate_neurons = int(meta["num_parts"]), int(gate_meta["gate_neurons"])
    permutation = artifact.tensor("partition", "permutation").long()
    slopes, offsets = (artifact.tensor("proxy_gate", name).float() for name in ("slopes", "offsets"))
    gates = [layer.gate for layer in spec.layers if layer.gate is not None]
    E, F = gates[0].num_experts, spec.layers[spec.moe_layers[0]].ffn.width
    shape = (len(gates), E, F)
    if tuple(permutation.shape) != shape or F % num_parts or list(meta["layers"]) != list(spec.moe_layers):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: partition of layers {meta['layers']} is "
            f"{list(permutation.shape)} in {num_parts} parts, expected {list(shape)} of layers "
            f"{list(spec.moe_layers)}; run `edge-runtime calibrate prism`"
        )
    if not torch.equal(permutation.sort(-1).values, torch.arange(F).expand(shape)):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: a row of partition is no permutation of {F} neurons; "
            f"run `edge-runtime calibrate prism`"
        )
    wanted = (len(gates), E, num_parts)
    if (
        tuple(slopes.shape) != wanted
        or tuple(offsets.shape) != wanted
        or not 1 <= gate_neurons <= F // num_parts
    ):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: proxy_gate has slopes {list(slopes.shape)} and "
            f"{gate_neurons} gate neurons, expected {list(wanted)} and 1 to {F // num_parts}; "
            f"run `edge-runtime calibrate prism`"
        )
    layers = {
        layer: LayerParts(permutation[i], slopes[i], offsets[i]) for i, layer in enumerate(spec.moe_layers)
    }
    digest = hashlib.blake2b(permutation.short().numpy().tobytes(), digest_size=16).hexdigest()
    return SubExperts(num_parts, gate_neurons, layers, digest, _sensitivity(artifact, spec))


def _sensitivity(artifact: Artifact, spec: ModelSpec) -> dict[int, float]:
    if not artifact.has("sensitivity") or "sensitivity" not in artifact.tensors("sensitivity"):
        return {}
    measured = artifact.tensor("sensitivity", "sensitivity").float().flatten().tolist()
    return dict(zip(spec.moe_layers, measured, strict=False))
