"""The compiled kernels as a backend. They check their arguments themselves; kernels.ops says what was wrong."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, Activation
from kernels.cpu import (
    _native,  # type: ignore[attr-defined]
    fallback,
)
from kernels.packing import LANES
from kernels.reference.dispatch import Dispatched
from kernels.reference.grouped_ffn import Biases

NAME = "native"
CHECKS = False  # until all of them check
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


def pack_expert(
    gate: Tensor | None, up: Tensor, down: Tensor, dtype: torch.dtype, activation: Activation, biases: Biases
) -> _native.PackedExpert:
    F, D = up.shape
    padded = -(-F // LANES) * LANES
    inner = [up] if gate is None else [gate, up]
    gate_up = _native.PackedPanels(len(inner) * padded, D, FORMATS[dtype])
    for i, weight in enumerate(inner):
        _fill(gate_up, i * padded, weight, dtype)
    kind, alpha, limit = activation
    has_biases = any(bias is not None for bias in biases)
    expert = _native.PackedExpert(
        gate_up, pack_rows([down], dtype), ACTIVATIONS.index(kind), alpha, limit, has_biases
    )
    for i, bias in enumerate((*biases[-1 - len(inner) : -1], biases[-1])):
        if bias is not None:
            values = bias.detach().float().contiguous()
            expert.fill_bias(i * padded, values.data_ptr(), len(values))
    return expert


new_heads = fallback.new_heads

# Each of these does its work and gives True, or does nothing and gives False when an argument does not fit.
embed = _native.embed
grouped_ffn = _native.grouped_ffn
combine = _native.combine


def kv_write(k, v, k_pages, v_pages, slots):
    if _native.kv_write(k, v, k_pages, v_pages, slots) is False:
        fallback.kv_write(k, v, k_pages, v_pages, slots)


def linear(x, w, bias, out, add):
    if bias is None:
        return _native.linear(x, w, out, add)
    product = torch.empty(out.shape)
    if _native.linear(x, w, product, False) is False:
        return False
    product += bias
    out.add_(product) if add else out.copy_(product)


def linear_heads(x, heads, out):
    for h, weight in enumerate(heads):
        product = torch.empty(out.shape[0], out.shape[2])
        _native.linear(x[:, h], weight, product, False)
        out[:, h] = product


def rms_norm(x, weight, eps, out):
    return _native.rms_norm(x, torch.ones(x.shape[1]) if weight is None else weight, eps, out)


def head_norm_rope(x, weight, eps, cos, sin, positions, interleaved):
    if interleaved or cos.shape[1] * 2 != x.shape[2]:
        return fallback.head_norm_rope(x, weight, eps, cos, sin, positions, interleaved)
    return _native.head_norm_rope(x, weight, eps, cos, sin, positions)


def paged_attention(q, k_pages, v_pages, tables, request, position, scale, window, sinks, soft_cap, out):
    plain = window is None and sinks is None and soft_cap is None and k_pages.shape[2] == v_pages.shape[3]
    if plain and _native.paged_attention(q, k_pages, v_pages, tables, request, position, scale, out):
        return
    fallback.paged_attention(
        q, k_pages, v_pages, tables, request, position, scale, window, sinks, soft_cap, out
    )


def gate_topk(logits, k, rule, counts, count_rows, ids, weights):
    if counts is None and rule[1:] == ("softmax", 1, 1, 1.0, None, None):
        return _native.gate_topk(logits, k, rule.renormalise, ids, weights)
    fallback.gate_topk(logits, k, rule, counts, count_rows, ids, weights)


soft_cap = fallback.soft_cap
kv_copy = fallback.kv_copy

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
