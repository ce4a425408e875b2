"""grouped_ffn in plain torch. Defined by kernels.reference.grouped_ffn.

The loop is over the experts that have rows: gathering one weight per tile instead would copy gigabytes in a prefill.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import product
from kernels.reference.grouped_ffn import PlainBank, PlainExpert, add_bias, inner_rows


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    bank.check(expert_ids, rows, len(x))
    for expert, mine in by_expert(expert_ids, torch.arange(len(rows)), bank):
        inner = inner_rows(x[rows[mine].long()], expert, product)
        out[mine] = add_bias(product(inner, expert.down), expert.biases[2])


def by_expert(expert_ids: Tensor, slots: Tensor, bank: PlainBank) -> Iterator[tuple[PlainExpert, Tensor]]:
    """Each expert that some of these slots ask for, with its slots in order."""
    order = slots[torch.sort(expert_ids[slots], stable=True).indices]
    present, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    for expert_id, mine in zip(present.tolist(), order.split(counts.tolist()), strict=True):
        yield bank[expert_id], mine
