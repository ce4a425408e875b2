"""The proxy gates of a node's layers, ready to be asked: which slices of its experts each row of a step runs.

Holds the gate neurons of all experts of a layer, also of those that other nodes host: the choice is made at home. Knows no
request.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from edge_runtime.elastic.sub_experts import LayerParts, SubExperts
from edge_runtime.elastic.tiers import FULL, Elasticity
from edge_runtime.model.build import read_neurons
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.moe import Slices
from kernels import slices
from kernels.ops import ExpertBank
from topology.ids import ExpertId


class SlicedRows(NamedTuple):
    """What rows of a layer run.

    slices   for the ExpertPort
    dropped  [T] float32, expected share of each row's gate weight that is left out
    """

    slices: Slices
    dropped: Tensor


class _LayerGate(NamedTuple):
    neurons: ExpertBank  # of N * r neurons each, slice after slice
    parts: LayerParts


class ProxyGates:
    """By layer. Made once from a checkpoint and an artifact.

    batch_max  all rows of a step run the highest tier among them: the published baseline, which serves some more than they
               asked
    """

    batch_max = False

    def __init__(self, checkpoint: Checkpoint, parts: SubExperts, layers: Iterable[int]) -> None:
        spec = checkpoint.spec
        gate = next(layer.gate for layer in spec.layers if layer.gate is not None)
        self.elasticity = Elasticity(parts.num_parts, gate.top_k)
        self.sensitivity = parts.sensitivity
        self._layers: dict[int, _LayerGate] = {}
        self._asked: Tensor | None = None
        self._answer: Tensor | None = None
        N, r = parts.num_parts, parts.gate_neurons
        for layer in layers:
            if layer not in parts.layers:
                continue
            each = parts.layers[layer]
            E, F = each.permutation.shape
            first = torch.arange(N).repeat_interleave(r) * (F // N) + torch.arange(r).repeat(N)
            bank = ExpertBank(E, spec.width, N * r)
            for expert in range(E):
                neurons = each.permutation[expert][first]
                bank.set(expert, read_neurons(checkpoint, ExpertId(layer, expert), neurons))
            self._layers[layer] = _LayerGate(bank, each)

    @property
    def nbytes(self) -> int:
        """Bytes of all gate neurons."""
        return sum(each.neurons.nbytes for each in self._layers.values())

    def choose(
        self, layer: int, x: Tensor, expert_ids: Tensor, gate_weights: Tensor, tiers: Tensor
    ) -> SlicedRows | None:
        """What each row runs at its tier [T] int32; None if all run everything."""
        found, wanted = self._layers.get(layer), self._wanted(tiers)
        if found is None or wanted is None:
            return None
        parts = found.parts
        masks, dropped = slices.choose_by_neurons(
            x, expert_ids, gate_weights, found.neurons, parts.slopes, parts.offsets, wanted
        )
        return SlicedRows(Slices(masks, self.elasticity.num_parts), dropped)

    def _wanted(self, tiers: Tensor) -> Tensor | None:
        """Slices that each row runs [T] int32, None if all run all of theirs; the layers of a step ask for the same."""
        if self._asked is not tiers:
            full = self.elasticity.full_tier
            wanted = torch.where(tiers == FULL, full, tiers).int()
            if self.batch_max:
                wanted.fill_(int(wanted.max()))
            self._asked, self._answer = tiers, wanted if bool((wanted < full).any()) else None
        return self._answer
