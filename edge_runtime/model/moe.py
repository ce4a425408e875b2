"""Routed experts: the seam between a layer and whoever computes its experts, and the computer on this node.

An `ExpertPort` may be this node's own experts or those of many; the layer does not know. Knows no socket.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import ops
from kernels.ops import ExpertBank, ExpertWeight
from kernels.slices import sliced_experts, sliced_ffn
from kernels.transfers import on_device, on_host
from topology.ids import ExpertId

Beside = Callable[[], None] | None
"""Work that needs no reply and is done while replies are on their way."""


class Slices(NamedTuple):
    """Which parts of their experts a layer's routed slots run.

    masks      [T, K] int32, bit s for slice s
    num_parts  slices of an expert
    """

    masks: Tensor
    num_parts: int


class Missing(NamedTuple):
    """Routed slots whose output did not come.

    slots   [n] int64, flat t * K + j
    why     for people: names the node and the experts
    """

    slots: Tensor
    why: str


class Owed(NamedTuple):
    """Outputs of a layer's routed slots that came one layer late.

    slots    [n] int64, flat t * K + j; outputs [n, D] float32, not weighted
    missing  of them, those that did not come at all
    """

    slots: Tensor
    outputs: Tensor
    missing: Missing | None


def joined(first: Missing | None, second: Missing | None) -> Missing | None:
    """What either lacks."""
    if first is None or second is None:
        return first or second
    return Missing(torch.cat([first.slots, second.slots]), f"{first.why}; {second.why}")


class ExpertPort(Protocol):
    """Whoever computes the routed experts of a layer."""

    host_names: list[str]
    """This node first, then whoever else computes."""

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        """Fill `out` with each slot's unweighted expert output; say which slots stay unfilled.

        x            [T, D] float32
        expert_ids   [T, K] int32
        out          [T*K, D] float32; out[t*K + j] is expert expert_ids[t, j] applied to x[t]
        beside       work of the layer's own (a shared expert), called once: while others compute, if others do
        slices       parts of the experts that run; None for all
        """

    def add_here(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        hidden: Tensor,
        out: Tensor,
        slices: Slices | None = None,
    ) -> bool | None:
        """hidden [T, D] += the weighted sum, in one call, if this node serves every expert of the layer.

        out      as in `run`
        returns  whether hidden is finite afterwards; None if others serve some, and nothing was done
        """


class ExpertStore:
    """The experts resident on this node, by layer."""

    def __init__(self, num_experts: int, width: int, expert_width: int) -> None:
        self._shape = (num_experts, width, expert_width)
        self._banks: dict[int, ExpertBank] = {}
        self._absent: dict[int, Tensor] = {}  # layer -> [E] bool
        self._whole: Mapping[int, ExpertBank] = MappingProxyType({})

    def bank(self, layer: int) -> ExpertBank | None:
        """The layer's resident experts, None if there are none."""
        return self._banks.get(layer)

    def add(self, expert: ExpertId, weight: ExpertWeight) -> None:
        """Make an expert resident, in place of the one of that id if there is one."""
        if expert.layer not in self._banks:
            self._banks[expert.layer] = ExpertBank(*self._shape)
        self._banks[expert.layer].set(expert.index, weight)
        self._count(expert.layer)

    def drop(self, expert: ExpertId) -> None:
        """Release an expert."""
        bank = self._banks[expert.layer]
        bank.drop(expert.index)
        if bank.resident:
            self._count(expert.layer)
        else:
            del self._banks[expert.layer], self._absent[expert.layer]
            self._set_whole(expert.layer, False)

    def _count(self, layer: int) -> None:
        # A new mask each time: whoever computes in another thread keeps the one it has.
        absent = torch.ones(self._shape[0], dtype=torch.bool)
        absent[list(self._banks[layer].resident)] = False
        self._absent[layer] = absent
        self._set_whole(layer, not absent.any())

    def _set_whole(self, layer: int, is_whole: bool) -> None:
        if is_whole and self._whole.get(layer) is not self._banks[layer]:
            self._whole = MappingProxyType({**self._whole, layer: self._banks[layer]})
        elif not is_whole and layer in self._whole:
            kept = {other: bank for other, bank in self._whole.items() if other != layer}
            self._whole = MappingProxyType(kept)

    def absent(self, layer: int) -> Tensor | None:
        """[E] bool, which of a layer's experts are not here; None if there is no bank, so that none is."""
        return self._absent.get(layer)

    def holds_all(self, layer: int) -> bool:
        """Whether every expert of the layer is here."""
        return layer in self._whole

    @property
    def whole(self) -> Mapping[int, ExpertBank]:
        """By layer the experts of those that are all here: the same object until that changes."""
        return self._whole

    def __contains__(self, expert: ExpertId) -> bool:
        bank = self._banks.get(expert.layer)
        return bank is not None and expert.index in bank.resident

    def __iter__(self) -> Iterator[ExpertId]:
        """Every resident expert, by layer and index."""
        return (ExpertId(layer, i) for layer in sorted(self._banks) for i in self._banks[layer].resident)

    def __len__(self) -> int:
        return sum(len(bank.resident) for bank in self._banks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the resident experts."""
        return sum(bank.nbytes for bank in self._banks.values())


def run_pairs(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    bank: ExpertBank,
    slices: Slices | None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.grouped_ffn`, or the parts of the experts that `slices` names pair by pair. Indices may be the host's."""
    if not x.is_cpu:
        rows, expert_ids, slices = on_device(rows), on_device(expert_ids), on_device(slices)
    if slices is None:
        return ops.grouped_ffn(x, rows, expert_ids, bank, out=out)
    return sliced_ffn(x, rows, expert_ids, slices.masks.view(-1), slices.num_parts, bank, out=out)


class LocalExperts:
    """An ExpertPort that computes every slot here, in one call per layer.

    node   this node's name, for what is said about an expert that is not resident
    """

    def __init__(self, store: ExpertStore, node: str = "this node") -> None:
        self.host_names = [node]
        self._store = store
        self._rows: dict[tuple[int, int], Tensor] = {}  # (T, K) -> [T*K] int32, the row of each slot

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        """See ExpertPort."""
        if beside is not None:
            beside()
        flat = expert_ids.view(-1)
        bank = self._store.bank(layer)
        if bank is None:
            return self._missing(layer, on_host(flat), torch.arange(len(flat)))
        num_tokens, num_columns = expert_ids.shape
        rows = self._slot_rows(num_tokens, num_columns, flat.device)
        if self._store.holds_all(layer):
            run_pairs(x, rows, flat, bank, slices, out=out)
            return None
        absent = self._store.absent(layer)
        assert absent is not None, f"layer {layer} has a bank but no account of it"
        ids = on_host(flat)
        is_missing = absent[ids.long()]
        if not is_missing.any():
            run_pairs(x, rows, flat, bank, slices, out=out)
            return None
        here = (~is_missing).nonzero().view(-1)
        if slices is not None:
            slices = slices._replace(masks=slices.masks.view(-1)[here])
        out[here] = run_pairs(x, rows[here], flat[here], bank, slices)
        return self._missing(layer, ids, is_missing.nonzero().view(-1))

    def add_here(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        hidden: Tensor,
        out: Tensor,
        slices: Slices | None = None,
    ) -> bool | None:
        """See ExpertPort."""
        bank = self._store.bank(layer)
        if bank is None or not self._store.holds_all(layer):
            return None
        if slices is not None:
            masks, num_parts = slices
            return sliced_experts(x, expert_ids, gate_weights, masks, num_parts, bank, hidden, expert_out=out)
        return ops.experts(x, expert_ids, gate_weights, bank, hidden, expert_out=out)

    def banks_here(self) -> Mapping[int, ExpertBank]:
        """Banks of the layers whose experts are all computed here, so that nobody has to be asked between them.

        The same object until that changes.
        """
        return self._store.whole

    def ran_here(self, expert_ids: Tensor, seconds: float) -> None:
        """Somebody else ran those banks: expert_ids [layers, T, K] int32, in so many seconds."""

    def _slot_rows(self, num_tokens: int, num_columns: int, device: torch.device) -> Tensor:
        rows = self._rows.get((num_tokens, num_columns))
        if rows is None:
            rows = torch.arange(num_tokens, dtype=torch.int32).repeat_interleave(num_columns).to(device)
            self._rows[num_tokens, num_columns] = rows
        return rows

    def _missing(self, layer: int, flat_ids: Tensor, slots: Tensor) -> Missing:
        experts = ", ".join(map(str, flat_ids[slots].unique().tolist()))
        return Missing(slots, f"{self.host_names[0]} does not hold layer {layer} experts {experts}")
