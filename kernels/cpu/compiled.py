"""The compiled kernels as a backend. They check their arguments themselves; kernels.ops says what was wrong."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.activations import ACTIVATIONS, Activation
from kernels.cpu import _native  # type: ignore[attr-defined]
from kernels.interface import check_interface
from kernels.packing import FORMATS as ALL_FORMATS
from kernels.packing import LANES
from kernels.reference.dispatch import Dispatched
from kernels.reference.formats import Weight, encode
from kernels.reference.grouped_ffn import Biases

NAME = "native"
CHECKS = True
FORMATS = dict.fromkeys(("linear", "embed", "grouped_ffn"), ALL_FORMATS)
CODES = {
    "bfloat16": 0,
    "float16": 1,
    "float32": 2,
    "int8": 3,
    "int4": 4,
    "mxfp4": 5,
    "bfloat16x2": 6,
}  # table.h

CODED = ("int8", "int4", "mxfp4")  # quantise.h

check_interface(getattr(_native, "INTERFACE", 1))

new_bank = _native.Bank
_native.find_torch(torch, True)


def _fill(panels: _native.PackedPanels, first: int, weight: Weight, format: str) -> None:
    """Encode and pack one weight; addresses go over: bfloat16 is all the same to them."""
    if format in CODED and isinstance(weight, Tensor) and _quantise(panels, first, weight):
        return
    encoded = encode(weight, format)
    if isinstance(encoded, Tensor):
        panels.fill(first, encoded.data_ptr(), len(encoded))
    elif encoded.format == "bfloat16x2":
        panels.fill(first, encoded.values.data_ptr(), len(encoded.values))
    else:
        panels.fill_codes(first, encoded.values.data_ptr(), encoded.scales.data_ptr(), encoded.shape[0])


def _quantise(panels: _native.PackedPanels, first: int, weight: Tensor) -> bool:
    """Make codes of a float weight where they belong; False where only `encode` says what they are (nan, inf, too large)."""
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    stored = CODES[str(weight.dtype).removeprefix("torch.")]
    return panels.quantise(first, weight.data_ptr(), stored, weight.stride(0), len(weight))


def pack_rows(weights: Sequence[Weight], format: str) -> _native.PackedPanels:
    N = sum(weight.shape[0] for weight in weights)
    panels = _native.PackedPanels(N, weights[0].shape[1], CODES[format])
    first = 0
    for weight in weights:
        _fill(panels, first, weight, format)
        first += weight.shape[0]
    return panels


def pack_expert(
    gate: Weight | None, up: Weight, down: Weight, format: str, activation: Activation, biases: Biases
) -> _native.PackedExpert:
    F, D = up.shape
    padded = -(-F // LANES) * LANES
    inner = [up] if gate is None else [gate, up]
    gate_up = _native.PackedPanels(len(inner) * padded, D, CODES[format])
    for i, weight in enumerate(inner):
        _fill(gate_up, i * padded, weight, format)
    kind, alpha, limit = activation
    has_biases = any(bias is not None for bias in biases)
    expert = _native.PackedExpert(
        gate_up, pack_rows([down], format), ACTIVATIONS.index(kind), alpha, limit, has_biases
    )
    for i, bias in enumerate((*biases[-1 - len(inner) : -1], biases[-1])):
        if bias is not None:
            values = bias.detach().float().contiguous()
            expert.fill_bias(i * padded, values.data_ptr(), len(values))
    return expert


new_heads = _native.PackedHeads

# Each of these does its work and gives True, or does nothing and gives False when an argument does not fit.
linear = _native.linear
linear_heads = _native.linear_heads
embed = _native.embed
rms_norm = _native.rms_norm
head_norm_rope = _native.head_norm_rope
soft_cap = _native.soft_cap
kv_write = _native.kv_write
paged_attention = _native.paged_attention
biased_attention = _native.biased_attention
gate_topk = _native.gate_topk
grouped_ffn = _native.grouped_ffn
combine = _native.combine
experts = _native.experts

# Only this backend has segments; see kernels.segments.
AttentionSegment = _native.AttentionSegment
attention_segment = _native.attention_segment
LayerRun = _native.LayerRun  # and runs of layers; see kernels.layer_runs
run_layers = _native.run_layers

swap_search = _native.swap_search  # for kernels.swap_search
sliced_ffn = _native.sliced_ffn  # these five for kernels.slices
sliced_experts = _native.sliced_experts
expert_inner = _native.expert_inner
choose_slices = _native.choose_slices
choose_by_neurons = _native.choose_by_neurons

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


def kv_copy(pages: Tensor, source: Tensor, destination: Tensor) -> bool:
    block_bytes = pages.nbytes // max(len(pages), 1)
    return _native.kv_copy(pages.data_ptr(), len(pages), block_bytes, source, destination)
