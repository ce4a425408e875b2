"""Routed experts: the seam between a layer and whoever computes its experts, and the computer on this node.

An `ExpertPort` may be this node's own experts or those of many; the layer does not know. Knows no socket.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels import ops
from kernels.ops import ExpertBank, ExpertWeight
from topology.ids import ExpertId


class Missing(NamedTuple):
    """Routed slots whose output did not come.

    slots   [n] int64, flat t * K + j
    why     for people: names the node and the experts
    """

    slots: Tensor
    why: str


class ExpertPort(Protocol):
    """Whoever computes the routed experts of a layer."""

    def run(self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor) -> Missing | None:
        """Fill `out` with each slot's unweighted expert output; say which slots stay unfilled.

        x            [T, D] float32
        expert_ids   [T, K] int32
        out          [T*K, D] float32; out[t*K + j] is expert expert_ids[t, j] applied to x[t]
        """


class ExpertStore:
    """The experts resident on this node, by layer."""

    def __init__(self, num_experts: int, width: int, expert_width: int) -> None:
        self._shape = (num_experts, width, expert_width)
        self._banks: dict[int, ExpertBank] = {}
        self._absent: dict[int, Tensor] = {}  # layer -> [E] bool

    def bank(self, layer: int) -> ExpertBank | None:
        """The layer's resident experts, None if there are none."""
        return self._banks.get(layer)

    def add(self, expert: ExpertId, weight: ExpertWeight) -> None:
        """Make an expert resident, in place of the one of that id if there is one."""
        if expert.layer not in self._banks:
            self._banks[expert.layer] = ExpertBank(*self._shape)
            self._absent[expert.layer] = torch.ones(self._shape[0], dtype=torch.bool)
        self._banks[expert.layer].set(expert.index, weight)
        self._absent[expert.layer][expert.index] = False

    def drop(self, expert: ExpertId) -> None:
        """Release an expert."""
        self._banks[expert.layer].drop(expert.index)
        self._absent[expert.layer][expert.index] = True
        if not self._banks[expert.layer].resident:
            del self._banks[expert.layer], self._absent[expert.layer]

    def absent(self, layer: int) -> Tensor | None:
        """[E] bool, which of the layer's experts are not here; None if none is."""
        return self._absent.get(layer)

    def __contains__(self, expert: ExpertId) -> bool:
        absent = self._absent.get(expert.layer)
        return absent is not None and not bool(absent[expert.index])

    def __iter__(self) -> Iterator[ExpertId]:
        """Every resident expert, by layer and index."""
        return (ExpertId(layer, i) for layer in sorted(self._banks) for i in self._banks[layer].resident)

    def __len__(self) -> int:
        return sum(len(bank.resident) for bank in self._banks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the resident experts."""
        return sum(bank.nbytes for bank in self._banks.values())


class LocalExperts:
    """An ExpertPort that computes every slot here, in one call per layer.

    node   this node's name, for what is said about an expert that is not resident
    """

    def __init__(self, store: ExpertStore, node: str = "this node") -> None:
        self._store = store
        self._node = node
        self._rows: dict[tuple[int, int], Tensor] = {}  # (T, K) -> [T*K] int32, the row of each slot
        self._whole: dict[int, ExpertBank] = {}

    def run(self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor) -> Missing | None:
        """See ExpertPort."""
        rows = self._slot_rows(*expert_ids.shape)
        bank = self._store.bank(layer)
        absent = self._store.absent(layer)
        flat = expert_ids.view(-1)
        if bank is None or absent is None:
            return self._missing(layer, flat, torch.arange(len(flat)))
        is_missing = absent[flat.long()] if len(bank.resident) < len(absent) else None
        if is_missing is None or not is_missing.any():
            ops.grouped_ffn(x, rows, flat, bank, out=out)
            return None
        here = (~is_missing).nonzero().view(-1)
        if len(here):
            out[here] = ops.grouped_ffn(x, rows[here], flat[here], bank)
        return self._missing(layer, flat, is_missing.nonzero().view(-1))

    def _slot_rows(self, num_tokens: int, num_columns: int) -> Tensor:
        rows = self._rows.get((num_tokens, num_columns))
        if rows is None:
            rows = torch.arange(num_tokens, dtype=torch.int32).repeat_interleave(num_columns)
            self._rows[num_tokens, num_columns] = rows
        return rows

    def _missing(self, layer: int, flat_ids: Tensor, slots: Tensor) -> Missing:
        experts = ", ".join(map(str, flat_ids[slots].unique().tolist()))
        return Missing(slots, f"{self._node} does not hold layer {layer} experts {experts}")
