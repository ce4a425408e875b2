"""grouped_ffn in plain torch. Defined by kernels.reference.grouped_ffn.

The loop is over the experts that have rows: gathering one weight per tile instead would copy gigabytes in a prefill.
"""

import torch
from torch import Tensor

from kernels.cpu.fallback.tiles import product
from kernels.reference.grouped_ffn import PlainBank, activate, add_bias


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    bank.check(expert_ids, rows, len(x))
    order = torch.sort(expert_ids, stable=True).indices
    present, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    for expert_id, mine in zip(present.tolist(), order.split(counts.tolist()), strict=True):
        expert = bank[expert_id]
        gate_bias, up_bias, down_bias = expert.biases
        taken = x[rows[mine].long()]
        gate = None if expert.gate is None else add_bias(product(taken, expert.gate), gate_bias)
        inner = activate(gate, add_bias(product(taken, expert.up), up_bias), expert.activation)
        out[mine] = add_bias(product(inner, expert.down), down_bias)
