"""grouped_ffn: routed rows through the experts they were sent to."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.activations import Activation
from kernels.reference.chain import product
from kernels.reference.formats import Codes, Weight, encode, stacked

Product = Callable[[Tensor, Tensor | Codes], Tensor]
Biases = tuple[Tensor | None, Tensor | None, Tensor | None]


class PlainExpert(NamedTuple):
    gate: Tensor | Codes | None
    up: Tensor | Codes
    down: Tensor | Codes
    activation: Activation
    biases: Biases
    """Of gate, up and down, float32."""


class PlainBank(dict[int, PlainExpert]):
    """Experts by id."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def set(self, expert_id: int, expert: PlainExpert) -> None:
        self[expert_id] = expert

    def drop(self, expert_id: int) -> None:
        del self[expert_id]

    def check(self, expert_ids: Tensor, rows: Tensor, T: int) -> None:
        """IndexError for an expert that is not resident, ValueError for a row that does not exist."""
        for i, expert in enumerate(expert_ids.tolist()):
            if expert not in self:
                raise IndexError(
                    f"expert_ids: entry {i} asks for expert {expert}, "
                    f"which is not resident in this bank of {self.num_experts}"
                )
        for i, row in enumerate(rows.tolist()):
            if not 0 <= row < T:
                raise ValueError(f"rows: entry {i} is {row}, expected 0 to {T - 1}")


def pack_expert(
    gate: Weight | None, up: Weight, down: Weight, format: str, activation: Activation, biases: Biases
) -> PlainExpert:
    plain_gate = None if gate is None else stacked([encode(gate, format)])
    plain_up, plain_down = (stacked([encode(weight, format)]) for weight in (up, down))
    gate_bias, up_bias, down_bias = (b if b is None else b.detach().float().clone() for b in biases)
    return PlainExpert(plain_gate, plain_up, plain_down, activation, (gate_bias, up_bias, down_bias))


def new_bank(num_experts: int, D: int) -> PlainBank:
    return PlainBank(num_experts)


def activate(gate: Tensor | None, up: Tensor, activation: Activation) -> Tensor:
    """What goes into `down`, elementwise. gelu by its tanh formula is x * sigmoid(2 u)."""
    kind, alpha, limit = activation
    if gate is None:
        return up.clamp(min=0.0)
    if kind == "swiglu":
        return gate / (1.0 + torch.exp(-gate)) * up
    if kind == "geglu_tanh":
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + torch.exp(-2.0 * u)) * up
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1.0) * (gate / (1.0 + torch.exp(-alpha * gate)))


def add_bias(finished: Tensor, bias: Tensor | None) -> Tensor:
    return finished if bias is None else finished + bias


def inner_rows(taken: Tensor, expert: PlainExpert, multiply: Product = product) -> Tensor:
    """[R, F]: what an expert's neurons give for rows [R, D], before `down`."""
    gate_bias, up_bias, _ = expert.biases
    gate = None if expert.gate is None else add_bias(multiply(taken, expert.gate), gate_bias)
    return activate(gate, add_bias(multiply(taken, expert.up), up_bias), expert.activation)


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    """Put each routed row through its expert, unweighted: down(activation(gate x, up x)), biases where there are any.

    x           [T, D]  float32
    rows        [R]     int32, the row of x each routed row takes; outside [0, T): ValueError
    expert_ids  [R]     int32; not resident: IndexError naming the id
    out         [R, D]  float32, in the order of `rows`

    Gate, up and down are [F, D], [F, D], [D, F]; every product is summed as `chain.product` says, then the bias is added.
    The activations: see `ops.pack_expert`.
    """
    bank.check(expert_ids, rows, len(x))
    for i, (row, expert_id) in enumerate(zip(rows.tolist(), expert_ids.tolist(), strict=True)):
        expert = bank[expert_id]
        inner = inner_rows(x[row][None], expert)
        out[i] = add_bias(product(inner, expert.down), expert.biases[2])[0]
