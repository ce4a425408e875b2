"""The linear gate of a node's layers: which sub-experts of all experts each row at a tier runs, and how much each counts.

Where the proxy gate leaves out parts of the experts that the model's own gate chose, this one chooses for itself: it has a
row for every sub-expert, tuned by calibration. Rows at the full tier never ask it. Knows no request.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from edge_runtime.artifacts import Artifact
from edge_runtime.elastic.gates import SlicedRows, TierGates
from edge_runtime.elastic.sub_experts import LinearRows, SubExperts
from edge_runtime.errors import ArtifactError
from edge_runtime.model.gate import GateWeights, gate_options
from edge_runtime.model.moe import Slices
from edge_runtime.model.spec import GateSpec, ModelSpec
from kernels import ops
from kernels.ops import LinearWeight

SECTION, MADE_BY = "linear_gate", "edge-runtime calibrate gate"


def read_linear_gate(artifact: Artifact, spec: ModelSpec, num_parts: int) -> dict[int, LinearRows] | None:
    """The tuned rows by layer; None if the gate was never tuned. ArtifactError for rows of another model or partition."""
    if not artifact.has(SECTION):
        return None
    E = max(layer.gate.num_experts for layer in spec.layers if layer.gate)
    shape = (len(spec.moe_layers), E * num_parts, spec.width)  # a row for every sub-expert
    weight = torch.from_numpy(artifact.numbers(SECTION, "weight", shape, made_by=MADE_BY))
    bias = None
    if "bias" in artifact.tensors(SECTION):
        bias = torch.from_numpy(artifact.numbers(SECTION, "bias", shape[:2], made_by=MADE_BY))
    return {
        layer: (weight[i].float(), None if bias is None else bias[i].float())
        for i, layer in enumerate(spec.moe_layers)
    }


def with_linear_gate(parts: SubExperts, artifact: Artifact, spec: ModelSpec) -> SubExperts:
    """The same sub-experts, chosen by the tuned gate. Nodes of which some do so must not work together."""
    rows = read_linear_gate(artifact, spec, parts.num_parts)
    if rows is None:
        raise ArtifactError(
            f'gate = "linear", but calibration artifact {artifact.folder} has no section {SECTION}; run `edge-runtime '
            'calibrate gate`, or write gate = "proxy"'
        )
    if any(layer.gate is not None and layer.gate.reads_residual for layer in spec.layers):
        raise ArtifactError(
            f'gate = "linear", but gates of {spec.family} read what experts do not, and only the proxy gate is served '
            'there; write gate = "proxy"'
        )
    digest = hashlib.blake2b(digest_size=8)
    for weight, _ in rows.values():
        digest.update(weight.contiguous().numpy().tobytes())
    return parts._replace(linear=rows, digest=f"{parts.digest}-{digest.hexdigest()}")


class _Layer(NamedTuple):
    spec: GateSpec
    weight: LinearWeight  # [E * N, D]
    bias: Tensor | None  # [E * N]
    options: dict[str, object]


class LinearGates(TierGates):
    """By layer. Made once from a partition with tuned rows, and the gates of the trunk for what theirs have besides."""

    chooses_experts = True

    def __init__(self, spec: ModelSpec, parts: SubExperts, gates: Iterable[tuple[int, GateWeights]]) -> None:
        first = next(layer.gate for layer in spec.layers if layer.gate is not None)
        super().__init__(parts, first.top_k)
        assert parts.linear is not None, "a linear gate has rows"
        N = parts.num_parts
        self._layers: dict[int, _Layer] = {}
        for layer, own in gates:
            gate = spec.layers[layer].gate
            assert gate is not None, f"layer {layer} has no gate"
            weight, bias = parts.linear[layer]
            options = {
                name: part.repeat_interleave(N) if isinstance(part, Tensor) else part
                for name, part in gate_options(gate, own).items()
            }
            self._layers[layer] = _Layer(gate, ops.pack_linear(weight.contiguous()), bias, options)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(each.weight.nbytes for each in self._layers.values())

    def choose(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        tiers: Tensor,
        caps: np.ndarray | None = None,
    ) -> SlicedRows | None:
        """See TierGates. A row at tier K has K slots of one sub-expert each; a whole one its experts, as its gate chose."""
        found = self._layers.get(layer)
        wanted = None if found is None else self.wanted(layer, tiers)
        if found is None or wanted is None:
            return None
        N, full, (T, k0) = self.elasticity.num_parts, self.elasticity.full_tier, expert_ids.shape
        at = (wanted < full).nonzero().view(-1)
        logits = ops.linear(x[at], found.weight, bias=found.bias)
        ids, weights = ops.gate_topk(logits, full, renormalise=found.spec.renormalise, **found.options)  # type: ignore[arg-type]
        if not (found.spec.scores == "sigmoid" and not found.spec.renormalise):
            weights = weights * N  # the softmax is over N times as many, and so is the sum of the best
        # What is left out when the best K run: of all weight that the best N * k0 have.
        total = weights.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        left_out = torch.cat([torch.ones(len(at), 1), 1 - (weights.cumsum(1) / total)], 1).clamp(0, 1)
        left_out[:, full] = 0.0
        own = wanted[at]
        if caps is not None:
            fits = torch.from_numpy(self.lost(layer, left_out) <= caps[at.numpy(), None])
            own = torch.maximum(own, fits.int().argmax(1).int())
        wanted = wanted.clone()
        wanted[at] = own
        is_less = own < full
        at, ids, weights, left_out, own = (part[is_less] for part in (at, ids, weights, left_out, own))
        num_columns = max(k0, int(own.max()) if len(own) else 0)
        chosen = expert_ids[:, :1].repeat(
            1, num_columns
        )  # a slot of which nothing runs names the row's first
        masks = torch.zeros(T, num_columns, dtype=torch.int32)
        shares = torch.zeros(T, num_columns)
        chosen[:, :k0], masks[:, :k0], shares[:, :k0] = expert_ids, (1 << N) - 1, gate_weights
        if len(at):
            kept = torch.arange(num_columns) < own[:, None]
            ids, weights = ids[:, :num_columns], weights[:, :num_columns]
            if ids.shape[1] < num_columns:
                more = num_columns - ids.shape[1]
                ids, weights = (
                    torch.nn.functional.pad(ids, (0, more)),
                    torch.nn.functional.pad(weights, (0, more)),
                )
            chosen[at] = torch.where(kept, ids // N, expert_ids[at, :1])
            masks[at] = torch.where(kept, 1 << (ids % N), 0).int()
            shares[at] = weights.masked_fill(~kept, 0.0)
        dropped = torch.zeros(T)
        dropped[at] = left_out.gather(1, own[:, None].long()).view(-1)
        return SlicedRows(Slices(masks, N), dropped, self.lost(layer, dropped), wanted, chosen, shares)
