"""A model's sub-experts as calibration left them in an artifact: where neurons go, and what gate neurons foretell.

Checked against the model; knows no file beyond the artifact's sections.
"""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_runtime.artifacts import Artifact
from edge_runtime.elastic.tiers import Elasticity, split_tier, split_tiers
from edge_runtime.errors import ArtifactError
from edge_runtime.model.spec import ModelSpec

TIER_LOSSES = "tier_losses"
PRISM, TIERS = "edge-runtime calibrate prism", "edge-runtime calibrate tiers"


LinearRows = tuple[Tensor, Tensor | None]
"""Of one layer's linear gate: weight [E * N, D] and bias [E * N] or None; row e * N + s is sub-expert s of expert e."""


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
    drop_loss: Mapping[int, float] = MappingProxyType({})
    """By layer, what a token loses when all of the layer's gate weight is missing; empty if it was not measured."""
    power: float = 1.0
    """With what power of the share that is missing a loss grows."""
    tier_losses: Mapping[int, tuple[float, ...]] | None = None
    """By layer, what a token is expected to lose at K = 1, 2, .. N * k0; None if it was not measured."""

    linear: Mapping[int, LinearRows] | None = None
    """By layer, rows of the tuned gate, where that one is to choose; None: the gate neurons do."""
    splits: Mapping[int, tuple[int, ...]] | None = None
    """By layer, what requests of K = 1, 2, .. run there, where K is split over layers; None: K in each."""

    def split_of(self, tier: int) -> dict[int, int]:
        """K of each layer, so that the mean is `tier` and the expected loss least."""
        assert self.tier_losses is not None, "what layers lose was not measured"
        return dict(zip(self.tier_losses, split_tier(tier, list(self.tier_losses.values())), strict=True))

    def with_splits(self) -> "SubExperts":
        """The same with every K split over the layers. Nodes that do so and nodes that do not must not work together."""
        if self.tier_losses is None:
            raise ArtifactError(
                "split_tiers = true, but the calibration artifact has no section tier_losses; run `edge-runtime "
                "calibrate tiers`"
            )
        full = len(next(iter(self.tier_losses.values())))
        spread = split_tiers(range(1, full + 1), list(self.tier_losses.values()))
        splits = {layer: tuple(each[i] for each in spread) for i, layer in enumerate(self.tier_losses)}
        told = hashlib.blake2b(repr(splits).encode(), digest_size=8).hexdigest()
        return self._replace(splits=splits, digest=f"{self.digest}-{told}")


def read_elasticity(artifact: Artifact | None, top_k: int) -> Elasticity | None:
    """How far a model of `top_k` experts per token can be cut down; None if its experts were never split."""
    if artifact is None or not top_k or not artifact.has("partition"):
        return None
    return Elasticity(artifact.whole_number("partition", "num_parts", made_by=PRISM), top_k)


def gate_neurons_of(artifact: Artifact | None) -> int:
    """Gate neurons of an expert, N * r; 0 if the artifact has none."""
    if artifact is None or not (artifact.has("partition") and artifact.has("proxy_gate")):
        return 0
    num_parts = artifact.whole_number("partition", "num_parts", made_by=PRISM)
    return num_parts * artifact.whole_number("proxy_gate", "gate_neurons", made_by=PRISM)


def read_sub_experts(artifact: Artifact, spec: ModelSpec) -> SubExperts | None:
    """What the artifact has; None if its experts were never split. ArtifactError for what does not fit the model."""
    if not artifact.has("partition"):
        return None
    num_parts = artifact.whole_number("partition", "num_parts", made_by=PRISM)
    gate_neurons = artifact.whole_number("proxy_gate", "gate_neurons", made_by=PRISM)
    described = artifact.meta("partition").get("layers")
    permutation = artifact.tensor("partition", "permutation").long()
    gates = [layer.gate for layer in spec.layers if layer.gate is not None]
    E, F = gates[0].num_experts, spec.layers[spec.moe_layers[0]].ffn.width
    shape = (len(gates), E, F)
    if tuple(permutation.shape) != shape or F % num_parts or described != list(spec.moe_layers):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: partition of layers {described} is "
            f"{list(permutation.shape)} in {num_parts} parts, expected {list(shape)} of layers "
            f"{list(spec.moe_layers)}; run `edge-runtime calibrate prism`"
        )
    if not torch.equal(permutation.sort(-1).values, torch.arange(F).expand(shape)):
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: a row of partition is no permutation of {F} neurons; "
            f"run `edge-runtime calibrate prism`"
        )
    wanted = (len(gates), E, num_parts)
    slopes, offsets = (
        torch.from_numpy(artifact.numbers("proxy_gate", name, wanted, made_by=PRISM)).float()
        for name in ("slopes", "offsets")
    )
    if gate_neurons > F // num_parts:
        raise ArtifactError(
            f"calibration artifact {artifact.folder}: proxy_gate has {gate_neurons} gate neurons in a slice, expected 1 to "
            f"{F // num_parts}; run `edge-runtime calibrate prism`"
        )
    layers = {
        layer: LayerParts(permutation[i], slopes[i], offsets[i]) for i, layer in enumerate(spec.moe_layers)
    }
    digest = hashlib.blake2b(permutation.short().numpy().tobytes(), digest_size=16).hexdigest()
    return SubExperts(
        num_parts,
        gate_neurons,
        layers,
        digest,
        *_drop_losses(artifact, spec, num_parts * gates[0].top_k),
    )


def _drop_losses(
    artifact: Artifact, spec: ModelSpec, full: int
) -> tuple[dict[int, float], float, dict[int, tuple[float, ...]] | None]:
    """Loss by layer of all that is missing, the power it grows with, and losses by tier; as far as they were measured.

    The squared deviation of a layer's output is taken as the squared share of gate weight that is missing, times what
    `calibrate tiers` found that to be worth (1 without it).
    """
    measured = artifact.tensors("sensitivity") if artifact.has("sensitivity") else {}
    name, power = ("quadratic", 2.0) if "quadratic" in measured else ("sensitivity", 1.0)
    if name not in measured:
        return {}, 1.0, None
    num_layers = len(spec.moe_layers)
    sensitivity = np.maximum(artifact.numbers("sensitivity", name, (num_layers,)), 0.0).tolist()
    if not artifact.has(TIER_LOSSES) or power != 2.0:
        return dict(zip(spec.moe_layers, sensitivity, strict=True)), power, None
    square, deviation = (
        torch.from_numpy(
            artifact.numbers(TIER_LOSSES, part, (num_layers, full), least=0.0, made_by=TIERS)
        ).float()
        for part in ("square", "deviation")
    )
    worth = deviation.sum(1) / square.sum(1).clamp(min=torch.finfo(torch.float32).tiny)
    losses = deviation * torch.tensor(sensitivity)[:, None]
    return (
        {layer: sensitivity[i] * float(worth[i]) for i, layer in enumerate(spec.moe_layers)},
        power,
        {layer: tuple(losses[i].tolist()) for i, layer in enumerate(spec.moe_layers)},
    )
