"""Attention and gate of a layer in one native call, with the bits of the operations of `kernels.ops` it is made of.

A decode step of a small model spends its time in calls, and these are twelve of them. Knows the order of a usual layer
but no family: whoever binds knows whether the layer is a usual one.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import backends
from kernels.ops import LinearWeight
from kernels.reference.gate_topk import GateRule


class AttentionParts(NamedTuple):
    """What does not change from step to step. Vectors are float32.

    hidden += out(attention(rope(norm(qkv(input_norm(hidden)))))), x = post_norm(hidden), ids and weights by gate(x).
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    norm_eps: float
    input_norm: Tensor  # [D]
    qkv: LinearWeight  # [(H + 2 G) P, D]
    rope: tuple[Tensor, Tensor]  # cos and sin [S, C]
    pages: tuple[Tensor, Tensor]  # k [num_blocks, G, P, 16], v [num_blocks, G, 16, P]
    scale: float
    out: LinearWeight  # [D, H P]
    post_norm: Tensor  # [D]
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [P] per head, or [H P] over all of them
    k_norm: Tensor | None = None  # [P] or [G P]
    interleaved: bool = False
    window: int | None = None
    sinks: Tensor | None = None  # [H]
    soft_cap: float | None = None
    out_bias: Tensor | None = None  # [D]
    gate: LinearWeight | None = None  # [E, D]; None in a dense layer
    gate_bias: Tensor | None = None  # [E]
    top_k: int = 0
    rule: GateRule = GateRule()


class AttentionSegment:
    """One layer's attention and gate. Made by `bind_attention_segment`; keeps its tensors alive."""

    def __init__(self, parts: AttentionParts, bound: Any, backend: Any) -> None:
        self.parts = parts
        self.bound = bound  # the backend's own, for `kernels.layer_runs`
        self.backend = backend
        self._run = backend.attention_segment

    @property
    def buffer_floats(self) -> int:
        """Float32 numbers per row that `run` needs as a buffer."""
        return 2 * (self.parts.num_heads + self.parts.num_kv_heads) * self.parts.head_width

    def run(
        self,
        hidden: Tensor,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        row_request: Tensor,
        block_tables: Tensor,
        buffer: Tensor,
        logits: Tensor | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        counts: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> None:
        """Run a step's rows.

        hidden        [T, D]  float32, rows may be strided: the residual, to which attention is added
        x             [T, D]  float32, rows may be strided: written, what the experts read
        positions     [T]     int32, and slots, row_request [T], block_tables [B, M] as in paged_attention and kv_write
        buffer        [at least T * buffer_floats]  float32, overwritten
        logits        [T, E]  float32, and ids [T, K] int32, weights [T, K] float32: written; None in a dense layer
        counts        [num_blocks, E] of the blocks that `slots` name, and counted [T], both or neither: see ops.Counting

        Positions, slots, requests and blocks that point nowhere: ValueError, and nothing is written.
        """
        rows = positions, slots, row_request, block_tables, buffer, logits, ids, weights, counts, counted
        if not self._run(self.bound, hidden, x, *rows):
            given = {
                "hidden": hidden,
                "x": x,
                "positions": positions,
                "slots": slots,
                "row_request": row_request,
            }
            given |= {"block_tables": block_tables, "buffer": buffer, "logits": logits, "ids": ids}
            given |= {"weights": weights, "counts": counts, "counted": counted}
            found = ", ".join(
                f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
                for name, tensor in given.items()
                if tensor is not None
            )
            raise ValueError(f"attention segment: found {found}, expected the shapes of AttentionSegment.run")


def bind_attention_segment(parts: AttentionParts) -> AttentionSegment | None:
    """Bind a layer, or None where the backend that serves has no segments or did not pack these weights."""
    serving = backends.active()
    if not hasattr(serving, "AttentionSegment"):
        return None
    packed = [w for w in (parts.qkv, parts.out, parts.gate) if w is not None]
    if any(w.backend is not serving for w in packed):
        return None
    norms_whole = _check(parts)
    cos, sin = parts.rope
    given = parts._asdict() | {
        "D": parts.qkv.num_inputs,
        "H": parts.num_heads,
        "G": parts.num_kv_heads,
        "P": parts.head_width,
        "eps": parts.norm_eps,
        "norms_whole": norms_whole,
        "qkv": parts.qkv.handle,
        "out": parts.out.handle,
        "gate": parts.gate.handle if parts.gate is not None else None,
        "cos": cos,
        "sin": sin,
        "S": cos.shape[0],
        "C": cos.shape[1],
        "k_pages": parts.pages[0],
        "v_pages": parts.pages[1],
        "rule": tuple(parts.rule),
    }
    return AttentionSegment(parts, serving.AttentionSegment(given), serving)


def _check(parts: AttentionParts) -> bool:
    """ValueError for a part of another shape; whether q and k are normed as whole rows."""
    H, G, P = parts.num_heads, parts.num_kv_heads, parts.head_width
    D, E = parts.qkv.num_inputs, parts.gate.num_outputs if parts.gate is not None else 0
    norms_whole = parts.q_norm is not None and len(parts.q_norm) != P
    normed = (H * P, G * P) if norms_whole else (P, P)
    num_blocks = len(parts.pages[0])
    shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "input_norm": (parts.input_norm, (D,)),
        "post_norm": (parts.post_norm, (D,)),
        "qkv_bias": (parts.qkv_bias, ((H + 2 * G) * P,)),
        "out_bias": (parts.out_bias, (D,)),
        "q_norm": (parts.q_norm, normed[:1]),
        "k_norm": (parts.k_norm, normed[1:]),
        "sinks": (parts.sinks, (H,)),
        "gate_bias": (parts.gate_bias, (E,)),
        "cos": (parts.rope[0], parts.rope[0].shape[:1] + (min(parts.rope[0].shape[1], P // 2),)),
        "sin": (parts.rope[1], tuple(parts.rope[0].shape)),
        "k_pages": (parts.pages[0], (num_blocks, G, P, 16)),
        "v_pages": (parts.pages[1], (num_blocks, G, 16, P)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            found = f"{list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
            raise ValueError(f"{name}: found {found}, expected dense {list(shape)} float32")
    sizes = {
        "qkv": (parts.qkv, (H + 2 * G) * P, D),
        "out": (parts.out, D, H * P),
        "gate": (parts.gate, E, D),
    }
    for name, (weight, N, K) in sizes.items():
        if weight is not None and (weight.num_outputs, weight.num_inputs) != (N, K):
            found = f"[{weight.num_outputs}, {weight.num_inputs}]"
            raise ValueError(f"{name}: found {found}, expected [{N}, {K}]")
    if H % G:
        raise ValueError(f"num_heads: found {H}, expected a multiple of {G}")
    return norms_whole
