"""sliced_ffn and expert_inner in plain torch. Defined by kernels.reference.sliced_ffn."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.cpu.fallback.grouped_ffn import grouped_ffn
from kernels.cpu.fallback.tiles import product
from kernels.reference.grouped_ffn import PlainBank, PlainExpert, activate, add_bias
from kernels.reference.sliced_ffn import check_masks, slice_product


def sliced_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: PlainBank,
    out: Tensor,
) -> None:
    check_masks(masks, num_parts)
    bank.check(expert_ids, rows, len(x))
    full = (1 << num_parts) - 1
    whole = (masks == full).nonzero().view(-1)
    if len(whole):
        outputs = torch.empty(len(whole), out.shape[1])
        grouped_ffn(x, rows[whole], expert_ids[whole], bank, outputs)
        out[whole] = outputs
    partial = (masks != full).nonzero().view(-1)
    out[partial] = 0.0
    for expert, mine in _by_expert(expert_ids, partial, bank):
        taken, mask = x[rows[mine].long()], masks[mine]
        inner = _inner(taken, expert)
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
    for expert, mine in _by_expert(expert_ids, torch.arange(len(rows)), bank):
        out[mine] = _inner(x[rows[mine].long()], expert)


def _by_expert(expert_ids: Tensor, slots: Tensor, bank: PlainBank) -> Iterator[tuple[PlainExpert, Tensor]]:
    order = slots[torch.sort(expert_ids[slots], stable=True).indices]
    present, counts = torch.unique_consecutive(expert_ids[order], return_counts=True)
    for expert_id, mine in zip(present.tolist(), order.split(counts.tolist()), strict=True):
        yield bank[expert_id], mine


def _inner(taken: Tensor, expert: PlainExpert) -> Tensor:
    gate_bias, up_bias, _ = expert.biases
    gate = None if expert.gate is None else add_bias(product(taken, expert.gate), gate_bias)
    return activate(gate, add_bias(product(taken, expert.up), up_bias), expert.activation)
