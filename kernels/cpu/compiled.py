"""Calls into the compiled kernels: tensors in, addresses and strides out. Arguments are what kernels.ops checked."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu import _native  # type: ignore[attr-defined]
from kernels.packing import LANES
from kernels.reference.dispatch import Dispatched

NAME = "native"
FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

new_bank = _native.Bank


def _fill(panels: _native.PackedPanels, first: int, weight: Tensor, dtype: torch.dtype) -> None:
    rows = weight.detach().to(dtype).contiguous()
    panels.fill(first, rows.data_ptr(), len(rows))


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


def linear(x: Tensor, weight: _native.PackedPanels, out: Tensor, add: bool) -> None:
    _native.linear(weight, x.data_ptr(), x.stride(0), len(x), out.data_ptr(), out.stride(0), add)


def embed(token_ids: Tensor, weight: _native.PackedPanels, out: Tensor) -> None:
    _native.embed(weight, token_ids.data_ptr(), len(token_ids), out.data_ptr(), out.stride(0))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    T, D = x.shape
    _native.rms_norm(x.data_ptr(), x.stride(0), weight.data_ptr(), eps, T, D, out.data_ptr(), out.stride(0))


def head_norm_rope(
    x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, positions: Tensor
) -> None:
    T, H, P = x.shape
    by_token, by_head, _ = x.stride()
    weight_address = 0 if weight is None else weight.data_ptr()
    tables = cos.data_ptr(), sin.data_ptr(), len(cos)
    _native.head_norm_rope(
        x.data_ptr(), by_token, by_head, T, H, P, weight_address, eps, *tables, positions.data_ptr()
    )


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    num_blocks, G, P, _ = k_pages.shape
    _native.kv_write(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        len(slots),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        num_blocks,
        G,
        P,
        slots.data_ptr(),
    )


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    T, H, P = q.shape
    num_blocks, G, _, _ = k_pages.shape
    B, M = block_tables.shape
    _native.paged_attention(
        q.data_ptr(),
        q.stride(0),
        T,
        H,
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        num_blocks,
        G,
        P,
        block_tables.data_ptr(),
        B,
        M,
        row_request.data_ptr(),
        row_position.data_ptr(),
        scale,
        out.data_ptr(),
        out.stride(0),
    )


def gate_topk(logits: Tensor, k: int, renormalise: bool, ids: Tensor, weights: Tensor) -> None:
    T, E = logits.shape
    _native.gate_topk(
        logits.data_ptr(), logits.stride(0), T, E, k, renormalise, ids.data_ptr(), weights.data_ptr()
    )


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    T, K = expert_ids.shape
    pairs, rows, pair_rows = torch.empty(3, T * K, dtype=torch.int32).unbind()
    offsets, row_offsets = torch.empty(2, num_hosts + 1, dtype=torch.int32).unbind()
    num_pairs, num_rows = _native.dispatch(
        expert_ids.data_ptr(),
        T,
        K,
        host_of_expert.data_ptr(),
        len(host_of_expert),
        num_hosts,
        pairs.data_ptr(),
        rows.data_ptr(),
        pair_rows.data_ptr(),
        offsets.data_ptr(),
        row_offsets.data_ptr(),
    )
    return Dispatched(pairs[:num_pairs], offsets, rows[:num_rows], row_offsets, pair_rows[:num_pairs])


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: _native.Bank, out: Tensor) -> None:
    _native.grouped_ffn(
        bank,
        x.data_ptr(),
        x.stride(0),
        len(x),
        rows.data_ptr(),
        expert_ids.data_ptr(),
        len(rows),
        out.data_ptr(),
        out.stride(0),
    )


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    T, K = slots.shape
    R, D = expert_out.shape
    _native.combine(
        expert_out.data_ptr(),
        expert_out.stride(0),
        R,
        slots.data_ptr(),
        gate_weights.data_ptr(),
        T,
        K,
        D,
        hidden.data_ptr(),
        hidden.stride(0),
    )
