"""sliced_ffn and expert_inner in plain torch. Defined by kernels.reference.sliced_ffn."""

import torch
from torch import Tensor

from kernels.cpu.fallback.grouped_ffn import by_expert, grouped_ffn
from kernels.cpu.fallback.tiles import product
from kernels.reference.grouped_ffn import PlainBank, inner_rows
from kernels.reference.sliced_ffn import run_whole, slice_product


def sliced_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: PlainBank,
    out: Tensor,
) -> None:
    partial = run_whole(x, rows, expert_ids, masks, num_parts, bank, out, grouped_ffn)
    out[partial] = 0.0
    for expert, mine in by_expert(expert_ids, partial, bank):
        taken, mask = x[rows[mine].long()], masks[mine]
        inner = inner_rows(taken, expert, product)
        width = inner.shape[1] // num_parts
        for s in range(num_parts):
            has = (mask >> s & 1).bool()
            if bool(has.any()):
                out[mine[has]] += slice_product(inner[has], expert.down, s * width, (s + 1) * width, product)
        bias = expert.biases[2]
        if bias is not None:
            share = (mask[:, None] >> torch.arange(num_parts) & 1).sum(1) / num_parts
            out[mine] += share[:, None] * bias


def expert_inner(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    bank.check(expert_ids, rows, len(x))
    for expert, mine in by_expert(expert_ids, torch.arange(len(rows)), bank):
        out[mine] = inner_rows(x[rows[mine].long()], expert, product)
