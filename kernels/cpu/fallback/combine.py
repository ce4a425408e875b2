"""combine in plain torch. Defined by kernels.reference.combine."""

import torch
from torch import Tensor


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    R, D = expert_out.shape
    if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < R:
        raise ValueError(f"slots: found {slots.tolist()}, expected -1 to {R - 1}")
    total = torch.zeros(len(slots), D)
    if R > 0:
        for column in range(slots.shape[1]):
            slot = slots[:, column].long()
            came = (slot >= 0)[:, None]
            # Mask the rows, not the weights: a row that did not come may hold inf, and inf * 0 is nan.
            row = torch.where(came, expert_out[slot.clamp(min=0)], 0.0)
            total = torch.where(came, total + gate_weights[:, column, None] * row, total)
    hidden.add_(total)
