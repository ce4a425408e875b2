"""The proxy gates of a node's layers, ready to be asked: which slices of its experts each row of a step runs.

Holds the gate neurons of all experts of a layer, also of those that other nodes host: the choice is made at home. Knows no
request.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_runtime.elastic.sub_experts import SubExperts
from edge_runtime.elastic.tiers import FULL, Elasticity
from edge_runtime.model.build import read_neurons
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.moe import Slices
from kernels import slices
from kernels.layer_runs import SliceGate
from kernels.ops import ExpertBank
from kernels.transfers import on_device, on_host
from topology.ids import ExpertId


class SlicedRows(NamedTuple):
    """What rows of a layer run.

    slices   for the ExpertPort
    dropped  [T] float32, expected share of each row's gate weight that is left out
    lost     [T], the loss that is expected of that, in the unit of the quality ledger
    ran      [T] int32, slices that each row runs
    expert_ids, gate_weights  [T, K], of the slots that `slices` is about; None for those that were given
    """

    slices: Slices
    dropped: Tensor
    lost: NDArray[np.float64]
    ran: Tensor
    expert_ids: Tensor | None = None
    gate_weights: Tensor | None = None


class TierGates:
    """Whoever chooses what rows at a tier run, layer by layer.

    batch_max        all rows of a step run the highest tier among them: the published baseline, which serves some more than
                     they asked
    chooses_experts  the experts are chosen here too, and stand-ins for what the model's own gate chose mean nothing
    """

    batch_max = False
    chooses_experts = False

    def __init__(self, parts: SubExperts, top_k: int) -> None:
        self.elasticity = Elasticity(parts.num_parts, top_k)
        self._drop_loss, self._power = parts.drop_loss, parts.power
        self._splits = _tables(parts)
        self._asked: Tensor | None = None
        self._answer: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what chooses."""
        raise NotImplementedError

    def choose(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        tiers: Tensor,
        caps: NDArray[np.float64] | None = None,
    ) -> SlicedRows | None:
        """What each row runs at its tier [T] int32; None if all run everything.

        caps  [T], the most that a row may lose in this layer; a row whose tier would lose more runs as few slices
              more as that takes. None: nobody's loss matters
        """
        raise NotImplementedError

    def layer(self, layer: int) -> SliceGate | None:
        """What chooses slices of the experts that the model's gate chose, where that is how it is done; else None."""
        return None

    def wanted_by_layer(self, layers: range, tiers: Tensor) -> Tensor | None:
        """`wanted` of every layer: [layers, T] int32; None if all rows run everything everywhere."""
        full = self.elasticity.full_tier
        found = [self.wanted(layer, tiers) if self.layer(layer) is not None else None for layer in layers]
        if all(each is None for each in found):
            return None
        whole = torch.full(tiers.shape, full, dtype=torch.int32)
        return torch.stack([whole if each is None else each for each in found])

    def lost_by_layer(self, layers: Sequence[int], dropped: NDArray[np.float32]) -> NDArray[np.float64]:
        """`lost` of several layers: dropped and found are [layers, T]."""
        prices = np.array([self._drop_loss.get(layer, 0.0) for layer in layers])
        share = dropped.astype(np.float64)
        return prices[:, None] * (share * share if self._power == 2.0 else share)

    def lost(self, layer: int, dropped: Tensor) -> NDArray[np.float64]:
        """The loss that is expected of shares of gate weight that are left out."""
        share = on_host(dropped).numpy().astype(np.float64)
        return self._drop_loss.get(layer, 0.0) * (share * share if self._power == 2.0 else share)

    def wanted(self, layer: int, tiers: Tensor) -> Tensor | None:
        """Slices that each row runs [T] int32, None if all run all of theirs; the layers of a step ask for the same."""
        if self._asked is not tiers:
            full = self.elasticity.full_tier
            wanted = torch.where(tiers == FULL, full, tiers).int()
            if self.batch_max:
                wanted.fill_(int(wanted.max()))
            self._asked, self._answer = tiers, wanted if bool((wanted < full).any()) else None
        if self._answer is None or self._splits is None:
            return self._answer
        return on_device(self._splits[layer])[self._answer.long()]


class ProxyGates(TierGates):
    """Parts of the experts that the model's own gate chose, by a few neurons of each. Made from a checkpoint and an artifact."""

    def __init__(self, checkpoint: Checkpoint, parts: SubExperts, layers: Iterable[int]) -> None:
        spec = checkpoint.spec
        gate = next(layer.gate for layer in spec.layers if layer.gate is not None)
        super().__init__(parts, gate.top_k)
        self._layers: dict[int, SliceGate] = {}
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
            self._layers[layer] = SliceGate(bank, on_device(each.slopes), on_device(each.offsets))

    @property
    def nbytes(self) -> int:
        """Bytes of all gate neurons."""
        return sum(each.neurons.nbytes for each in self._layers.values())

    def layer(self, layer: int) -> SliceGate | None:
        """See TierGates."""
        return self._layers.get(layer)

    def choose(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        tiers: Tensor,
        caps: NDArray[np.float64] | None = None,
    ) -> SlicedRows | None:
        """See TierGates."""
        found = self._layers.get(layer)
        wanted = None if found is None else self.wanted(layer, tiers)
        if found is None or wanted is None:
            return None

        def chosen(at: Tensor | slice, K: Tensor) -> tuple[Tensor, Tensor]:
            return slices.choose_by_neurons(x[at], expert_ids[at], gate_weights[at], *found, K)

        masks, dropped = chosen(slice(None), wanted)
        lost = self.lost(layer, dropped)
        if caps is not None and (lost > caps).any():
            at = torch.from_numpy(np.flatnonzero(lost > caps))
            most = caps[at.numpy()]
            wanted = wanted.clone()
            wanted[at] = least_within(
                wanted[at],
                self.elasticity.full_tier,
                lambda tried: on_device(torch.from_numpy(self.lost(layer, chosen(at, tried)[1]) <= most)),
            )
            masks[at], dropped[at] = chosen(at, wanted[at])
            lost = self.lost(layer, dropped)
        return SlicedRows(Slices(masks, self.elasticity.num_parts), dropped, lost, wanted)


def _tables(parts: SubExperts) -> dict[int, Tensor] | None:
    """By layer [full + 1] int32, what rows of each tier run there; None where it is the tier itself."""
    if parts.splits is None:
        return None
    return {layer: torch.tensor([0, *tiers], dtype=torch.int32) for layer, tiers in parts.splits.items()}


def least_within(too_few: Tensor, enough: int, fits: Callable[[Tensor], Tensor]) -> Tensor:
    """The least tier of each row that fits, by halving: `too_few` [n] int32 do not, `enough` does for all.

    fits  tiers [n] int32 -> [n] bool; what fits at a tier fits at every higher one
    """
    low, high = too_few, torch.full_like(too_few, enough)
    while bool((high - low > 1).any()):
        middle = (low + high) // 2
        is_enough = fits(middle)
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    return high
