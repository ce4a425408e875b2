"""grouped_ffn in plain torch. Defined by kernels.reference.grouped_ffn.

The loop is over the experts that have rows: gathering one weight per tile instead would copy gigabytes in a prefill.
"""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import product
from kernels.reference.grouped_ffn import PlainBank


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    bank.check(expert_ids, rows, len(x))
    order = torch.sort(expert_ids, stable=True).indices
    present, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    for expert_id, mine in zip(present.tolist(), order.split(counts.tolist()), strict=True):
        gate, up, down = (weight.float() for weight in bank[expert_id])
        taken = x[rows[mine].long()]
        g = product(taken, gate)
        inner = g / (1.0 + torch.exp(-g)) * product(taken, up)
        out[mine] = product(inner, down)
