"""A layer's experts for few rows by plain torch whose shapes depend on rows and budget alone, so that it can be compiled.

The plain path loops over the experts that rows chose; here each routed pair, or each slice of one, takes its matrices by
index, and a compiler makes loops of that which read each weight once. Sums are taken in another order than there. For
experts of one width that are kept as bfloat16, float16 or float32.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activations import Activation
from kernels.reference.grouped_ffn import PlainBank, PlainExpert, activate
from kernels.weights import ExpertBank


class StackedExperts(NamedTuple):
    """E experts as one tensor for each matrix and bias.

    gate, up [E, F, D], gate None in experts of two matrices; down [E, D, F]; biases [E, F], [E, F], [E, D] float32 or None
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    activation: Activation


def stack_experts(bank: ExpertBank) -> StackedExperts | None:
    """The experts of a bank stacked, and the bank on views of that: no weight is kept twice. None where that cannot be."""
    plain = bank.handle
    if not isinstance(plain, PlainBank) or len(bank.resident) != bank.num_experts:
        return None
    experts = [plain[index] for index in range(bank.num_experts)]
    kept = [[expert.gate, expert.up, expert.down] for expert in experts]
    parts: list[Tensor | None] = []
    for each in (*zip(*kept, strict=True), *zip(*(expert.biases for expert in experts), strict=True)):
        found = [one for one in each if isinstance(one, Tensor)]
        if found and (len(found) < len(each) or len({one.dtype for one in found}) > 1):
            return None
        if not found and any(one is not None for one in each):  # codes
            return None
        parts.append(torch.stack(found) if found else None)
    gate, up, down, *biases = parts
    if up is None or down is None or len({expert.activation for expert in experts}) > 1:
        return None
    for index, expert in enumerate(experts):
        weight = bank.get(index)
        assert weight is not None, "every expert is resident"
        view = PlainExpert(
            None if gate is None else gate[index], up[index], down[index], expert.activation, expert.biases
        )
        bank.set(index, replace(weight, handle=view))
    return StackedExperts(gate, up, down, (biases[0], biases[1], biases[2]), experts[0].activation)


def add_experts(
    experts: StackedExperts, x: Tensor, expert_ids: Tensor, gate_weights: Tensor, hidden: Tensor
) -> None:
    """hidden [T, D] += the weighted sum of the experts [T, K] of rows x [T, D]."""
    T, K = expert_ids.shape
    ids = expert_ids.reshape(-1).long()
    rows = torch.arange(T * K) // K
    inner = _inner(experts, x[rows], ids, experts.gate, experts.up, (ids,))
    found = (experts.down[ids].float() * inner[:, None, :]).sum(-1)
    if experts.biases[2] is not None:
        found = found + experts.biases[2][ids]
    hidden.add_((gate_weights[..., None] * found.view(T, K, -1)).sum(1))


def add_slices(
    experts: StackedExperts,
    x: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    masks: Tensor,
    num_parts: int,
    room: int,
    hidden: Tensor,
) -> None:
    """`add_experts` with only the slices of masks [T, K] int32, at most `room` of them in all."""
    T, K = expert_ids.shape
    N, D = num_parts, x.shape[1]
    kept = (masks.reshape(-1, 1) >> torch.arange(N) & 1).bool().reshape(-1)
    order = torch.argsort(~kept, stable=True)[:room]
    pair, part = order // N, order % N
    rows, ids = pair // K, expert_ids.reshape(-1).long()[pair]
    share = torch.where(kept[order], gate_weights.reshape(-1)[pair], 0.0)
    E, F = experts.up.shape[:2]
    at = (ids * N + part,)
    cut = [None if w is None else w.view(E * N, F // N, D) for w in (experts.gate, experts.up)]
    assert cut[1] is not None, "every expert has an up matrix"
    inner = _inner(experts, x[rows], ids, cut[0], cut[1], at, part, N)
    down = experts.down.view(E, D, N, F // N)[ids, :, part].float()
    found = share[:, None] * (down * inner[:, None, :]).sum(-1)
    of_row = (rows[None] == torch.arange(T)[:, None]).float()
    hidden.add_(of_row @ found)
    bias = experts.biases[2]
    if bias is not None:
        part_of = gate_weights * kept.view(T, K, N).sum(-1) / N
        hidden.add_((part_of[..., None] * bias[expert_ids.long()]).sum(1))


def _inner(
    experts: StackedExperts,
    taken: Tensor,
    ids: Tensor,
    gate: Tensor | None,
    up: Tensor,
    at: tuple[Tensor],
    part: Tensor | None = None,
    num_parts: int = 1,
) -> Tensor:
    """[P, F or F / N]: what neurons give for pairs' rows taken [P, D]."""

    def product(weight: Tensor, bias: Tensor | None) -> Tensor:
        found = (weight[at].float() * taken[:, None, :]).sum(-1)
        if bias is None:
            return found
        if part is None:
            return found + bias[ids]
        return found + bias.view(len(bias) * num_parts, -1)[ids * num_parts + part]

    first = None if gate is None else product(gate, experts.biases[0])
    return activate(first, product(up, experts.biases[1]), experts.activation)
