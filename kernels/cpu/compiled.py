"""The compiled kernels as a backend. They check their arguments themselves; kernels.ops says what was wrong."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import _native  # type: ignore[attr-defined]
from kernels.packing import LANES
from kernels.reference.dispatch import Dispatched

NAME = "native"
CHECKS = True
FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

new_bank = _native.Bank
_native.find_torch(torch, True)


def _fill(panels: _native.PackedPanels, first: int, weight: Tensor, dtype: torch.dtype) -> None:
    rows = weight.detach().to(dtype).contiguous()
    panels.fill(first, rows.data_ptr(), len(rows))  # an address: bfloat16 is all the same to it


def pack_rows(weights: Sequence[Tensor], dtype: torch.dtype) -> _native.PackedPanels:
    N = sum(len(weight) for weight in weights)
    panels = _native.PackedPanels(N, weights[0].shape[1], FORMATS[dtype])
    first = 0
    for weight in weights:
        _fill(panels, first, weight, dtype)
        first += len(weight)
    return panels


def pack_expert(gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> _native.PackedExpert:
    F, D = gate.shape
    padded = -(-F // LANES) * LANES
    gate_up = _native.PackedPanels(2 * padded, D, FORMATS[dtype])
    _fill(gate_up, 0, gate, dtype)
    _fill(gate_up, padded, up, dtype)
    return _native.PackedExpert(gate_up, pack_rows([down], dtype))


# Each of these does its work and gives True, or does nothing and gives False when an argument does not fit.
linear = _native.linear
embed = _native.embed
rms_norm = _native.rms_norm
head_norm_rope = _native.head_norm_rope
kv_write = _native.kv_write
paged_attention = _native.paged_attention
gate_topk = _native.gate_topk
grouped_ffn = _native.grouped_ffn
combine = _native.combine

set_num_threads = _native.set_num_threads
num_threads = _native.num_threads


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched | Literal[False]:
    buffer = torch.empty(3 * expert_ids.numel(), dtype=torch.int32)
    grouped = _native.dispatch(expert_ids, host_of_expert, num_hosts, buffer)
    if grouped is None:
        return False
    num_pairs, num_rows, offsets, row_offsets = grouped
    end = num_pairs + num_rows
    return Dispatched(
        buffer[:num_pairs], offsets, buffer[num_pairs:end], row_offsets, buffer[end : end + num_pairs]
    )
