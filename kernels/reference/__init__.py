"""The plain definition of every operation: what the fast versions must equal. Slow, loops included.

Arguments are what `kernels.ops` checked; results go into `out`. The docstrings with shapes stand here once.
"""

from kernels.packing import FORMATS as ALL_FORMATS
from kernels.reference.choose_slices import choose_slices
from kernels.reference.combine import combine
from kernels.reference.dispatch import dispatch
from kernels.reference.gate_topk import gate_topk
from kernels.reference.grouped_ffn import grouped_ffn, new_bank, pack_expert
from kernels.reference.kv_blocks import kv_copy, kv_write
from kernels.reference.linear import embed, linear, linear_heads, new_heads, pack_rows
from kernels.reference.paged_attention import biased_attention, paged_attention
from kernels.reference.rms_norm import rms_norm, soft_cap
from kernels.reference.rope import head_norm_rope
from kernels.reference.sliced_ffn import expert_inner, sliced_ffn

CHECKS = False
NAME = "reference"
FORMATS = dict.fromkeys(("linear", "embed", "grouped_ffn"), ALL_FORMATS)


def set_num_threads(threads: int) -> None:
    """Nothing: the reference does one thing at a time."""


def num_threads() -> int:
    return 1


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
