"""combine: expert order back to token order, weighted. experts: grouped_ffn and combine as one."""

import math
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.reference.rounding import fma

HOST = torch.device("cpu")


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    """Add up each token's expert outputs in slot order, from 0, and add the finished sum to the residual.

    expert_out    [R, D]  float32, one row per (token, expert) pair that was computed
    slots         [T, K]  int32, the pair's row in expert_out; -1 if it did not come: never read. Else: ValueError
    gate_weights  [T, K]  float32
    hidden        [T, D]  float32, the residual, added to in place
    """
    R = len(expert_out)
    for i, slot in enumerate(slots.flatten().tolist()):
        if not -1 <= slot < R:
            raise ValueError(f"slots: entry {i} is {slot}, expected -1 to {R - 1}")
    for t, row_slots in enumerate(slots.tolist()):
        total = torch.zeros(hidden.shape[1])
        for j, slot in enumerate(row_slots):
            if slot >= 0:
                total = fma(gate_weights[t, j], expert_out[slot], total)
        hidden[t] += total


def experts_by(
    backend: ModuleType,
    x: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    bank: Any,
    hidden: Tensor,
    expert_out: Tensor,
) -> bool:
    """grouped_ffn of a backend over all slots, then its combine. Whether `hidden` is finite afterwards.

    x             [T, D]    float32
    expert_ids    [T, K]    int32; not resident: IndexError naming the id, and nothing is written
    gate_weights  [T, K]    float32
    hidden        [T, D]    float32, the residual, added to in place
    expert_out    [T*K, D]  float32, overwritten: row t*K + j is expert expert_ids[t, j] applied to x[t]
    """
    T, K = expert_ids.shape
    rows, slots = slot_rows(T, K, x.device)
    backend.grouped_ffn(x, rows, expert_ids.view(-1), bank, expert_out)
    backend.combine(expert_out, slots, gate_weights, hidden)
    return math.isfinite(float(hidden.sum()))


@lru_cache(maxsize=256)
def slot_rows(T: int, K: int, device: torch.device = HOST) -> tuple[Tensor, Tensor]:
    """The row of each routed slot [T*K] int32, and the slots themselves [T, K] int32. Not to be changed."""
    slots = torch.arange(T * K, dtype=torch.int32, device=device)
    return slots // K, slots.view(T, K)
