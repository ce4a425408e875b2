"""The kernels in Triton, for CUDA and HIP tensors: same names as `kernels.reference`, which defines what they compute.

Signatures are those of `kernels.ops`; tensors live on one device; see README.md beside this folder for layouts, tile
tables and what batch invariance rests on. Needs triton 3.6 to 3.9. With TRITON_INTERPRET=1, set before triton is
imported, the same code runs small shapes on CPU tensors.
"""

import os

# The one place that settles it: unset, triton warns, and its default flips in 3.10. Contracted multiply-adds are wanted.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from kernels.gpu import mxfp4
from kernels.gpu.combine import combine
from kernels.gpu.dispatch import dispatch, dispatch_on_device
from kernels.gpu.gate_topk import gate_topk
from kernels.gpu.grouped_ffn import expert_inner, grouped_ffn, sliced_ffn
from kernels.gpu.kv_blocks import kv_copy, kv_write, new_pages
from kernels.gpu.linear import embed, linear, linear_heads
from kernels.gpu.paged_attention import (
    AttentionPlan,
    attention_plan,
    biased_attention,
    paged_attention,
    prompt_rows,
)
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.rope import head_norm_rope
from kernels.gpu.soft_cap import soft_cap
from kernels.gpu.weights import (
    ExpertBank,
    ExpertWeight,
    HeadsWeight,
    LinearWeight,
    dequantised_expert,
    dequantised_linear,
    pack_expert,
    pack_linear,
    pack_linear_heads,
    pack_linear_rows,
    pack_mxfp4_expert,
)

__all__ = [
    "AttentionPlan",
    "ExpertBank",
    "ExpertWeight",
    "HeadsWeight",
    "LinearWeight",
    "attention_plan",
    "biased_attention",
    "combine",
    "dequantised_expert",
    "dequantised_linear",
    "dispatch",
    "dispatch_on_device",
    "embed",
    "expert_inner",
    "gate_topk",
    "grouped_ffn",
    "head_norm_rope",
    "kv_copy",
    "kv_write",
    "linear",
    "linear_heads",
    "mxfp4",
    "new_pages",
    "pack_expert",
    "pack_linear",
    "pack_linear_heads",
    "pack_linear_rows",
    "pack_mxfp4_expert",
    "paged_attention",
    "prompt_rows",
    "rms_norm",
    "sliced_ffn",
    "soft_cap",
]
