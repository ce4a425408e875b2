"""The CPU kernels in plain torch, for machines without a compiler.

A row's result never depends on the rows beside it: matrix products always see the same shape (tiles of 16 rows, padded
with zeros), sums are explicit trees, everything else is elementwise. Not bit-equal to the compiled kernels.
"""

from torch import get_num_threads as num_threads
from torch import set_num_threads

from kernels.cpu.fallback.combine import combine
from kernels.cpu.fallback.dispatch import dispatch
from kernels.cpu.fallback.gate_topk import gate_topk
from kernels.cpu.fallback.grouped_ffn import grouped_ffn
from kernels.cpu.fallback.kv_blocks import kv_copy, kv_write
from kernels.cpu.fallback.linear import embed, linear, linear_heads
from kernels.cpu.fallback.paged_attention import biased_attention, paged_attention
from kernels.cpu.fallback.rms_norm import rms_norm, soft_cap
from kernels.cpu.fallback.rope import head_norm_rope
from kernels.cpu.fallback.sliced_ffn import expert_inner, sliced_ffn
from kernels.packing import FORMATS as ALL_FORMATS
from kernels.reference.choose_slices import choose_slices
from kernels.reference.grouped_ffn import new_bank, pack_expert
from kernels.reference.linear import new_heads, pack_rows

CHECKS = False
NAME = "torch"
FORMATS = dict.fromkeys(("linear", "embed", "grouped_ffn"), ALL_FORMATS)

__all__ = [
    "CHECKS",
    "FORMATS",
    "NAME",
    "biased_attention",
    "choose_slices",
    "combine",
    "dispatch",
    "embed",
    "expert_inner",
    "gate_topk",
    "grouped_ffn",
    "head_norm_rope",
    "kv_copy",
    "kv_write",
    "linear",
    "linear_heads",
    "new_bank",
    "new_heads",
    "num_threads",
    "pack_expert",
    "pack_rows",
    "paged_attention",
    "rms_norm",
    "set_num_threads",
    "sliced_ffn",
    "soft_cap",
]
