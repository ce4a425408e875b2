"""grouped_ffn: routed rows through the experts they were sent to."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.reference.chain import chain


class PlainExpert(NamedTuple):
    gate: Tensor
    up: Tensor
    down: Tensor


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


def pack_expert(gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> PlainExpert:
    return PlainExpert(*(weight.detach().to(dtype).clone() for weight in (gate, up, down)))


def new_bank(num_experts: int, D: int) -> PlainBank:
    return PlainBank(num_experts)


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: PlainBank, out: Tensor) -> None:
    """Put each routed row through its expert: down(silu(gate x) * (up x)), unweighted.

    x           [T, D]  float32
    rows        [R]     int32, the row of x each routed row takes; outside [0, T): ValueError
    expert_ids  [R]     int32; not resident: IndexError naming the id
    out         [R, D]  float32, in the order of `rows`

    Gate, up and down [F, D], [F, D], [D, F] are widened to float32; every product is one chain over k.
    """
    bank.check(expert_ids, rows, len(x))
    for i, (row, expert_id) in enumerate(zip(rows.tolist(), expert_ids.tolist(), strict=True)):
        expert = bank[expert_id]
        gate, up = (chain(x[row][None], weight.float()) for weight in (expert.gate, expert.up))
        inner = gate / (1.0 + torch.exp(-gate)) * up
        out[i] = chain(inner, expert.down.float())[0]
