"""The face of the kernels: checks arguments, makes missing outputs, calls the backend. Knows no model and no layout.

All tensors live where the backend that serves does, float32 unless said, indices int32; only `dispatch` also takes those of
the host. An `out` may be the first rows of a larger buffer.
A wrong shape or dtype is a ValueError that names argument, found and expected. What each operation means, with shapes,
stands once: in `kernels/reference/`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import backends
from kernels.activations import ACTIVATIONS, Activation
from kernels.backends import set_num_threads
from kernels.heads import HeadsWeight
from kernels.packing import KV_BLOCK_TOKENS, packed_expert_bytes, packed_linear_bytes
from kernels.reference.combine import experts_by
from kernels.reference.dispatch import Dispatched
from kernels.reference.formats import MXFP4, Weight, stored_format
from kernels.reference.gate_topk import SCORES, Counting, GateRule
from kernels.reference.rope import rope_table
from kernels.weights import ExpertBank, ExpertWeight, LinearWeight

__all__ = [
    "MXFP4",
    "Counting",
    "Dispatched",
    "ExpertBank",
    "ExpertWeight",
    "HeadsWeight",
    "LinearWeight",
    "biased_attention",
    "combine",
    "dispatch",
    "embed",
    "experts",
    "gate_topk",
    "grouped_ffn",
    "head_norm_rope",
    "kv_copy",
    "kv_write",
    "linear",
    "linear_heads",
    "pack_expert",
    "pack_linear",
    "pack_linear_heads",
    "pack_linear_rows",
    "packed_expert_bytes",
    "packed_linear_bytes",
    "paged_attention",
    "rms_norm",
    "rope_table",
    "set_num_threads",
    "soft_cap",
]

F32, I32 = torch.float32, torch.int32
AS_STORED = "as_stored"


def _wrong(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int | str]) -> ValueError:
    """The error for a tensor that is not dense [shape] of dtype where the backend is; words stand for sizes that are free."""
    found = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}, strides {list(tensor.stride())}"
    wanted = f"[{', '.join(str(size) for size in shape)}] {dtype} on {backends.device()}, dense within a row"
    return ValueError(f"{name}: found {found}, expected {wanted}".replace("torch.", ""))


def _rows(name: str, tensor: Tensor, columns: int, T: int = -1) -> None:
    """Check float32 [T, columns] whose rows may be strided; T -1 is any."""
    shape = tensor.shape
    if (
        len(shape) != 2
        or shape[1] != columns
        or (shape[0] != T and T >= 0)
        or tensor.dtype is not F32
        or tensor.is_cpu is not backends.is_on_host()
        or (columns > 1 and tensor.stride(1) != 1)
    ):
        raise _wrong(name, tensor, F32, ("rows" if T < 0 else T, columns))


def _dense(name: str, tensor: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Check a contiguous tensor of this shape."""
    if tensor.shape != shape or tensor.dtype is not dtype or not _is_whole(tensor):
        raise _wrong(name, tensor, dtype, shape)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_cpu is backends.is_on_host() and tensor.is_contiguous()


def _heads(name: str, tensor: Tensor, T: int, heads: int, P: int) -> None:
    """Check float32 [T, heads, P] whose rows and heads may be strided, each head dense."""
    if (
        tensor.shape != (T, heads, P)
        or tensor.dtype is not F32
        or tensor.is_cpu is not backends.is_on_host()
        or (P > 1 and tensor.stride(2) != 1)
    ):
        raise _wrong(name, tensor, F32, (T, heads, P))


def _vector(name: str, tensor: Tensor | None, length: int) -> None:
    """Check float32 [length], or None."""
    if tensor is not None:
        _dense(name, tensor, F32, (length,))


def _packed_format(name: str, weight: Weight, format: str, operations: Sequence[str]) -> str:
    """The format a weight is kept in: its own, or `format`. The operations it is for must have it."""
    try:
        stored = stored_format(weight)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    wanted = stored if format == AS_STORED else format
    backend = backends.active()
    lacking = [op for op in operations if wanted not in backend.FORMATS[op]]
    if lacking:
        raise ValueError(
            f"format: found {wanted!r}, which {', '.join(lacking)} of the {backend.NAME} kernels lack, "
            f"expected {AS_STORED} or one of {', '.join(backend.FORMATS[lacking[0]])}"
        )
    return wanted


def _check_weight(name: str, weight: Weight, like: Weight, shape: Sequence[int | str]) -> None:
    """Check that a weight has this shape and is stored as the others are."""
    fits = len(weight.shape) == 2 and all(
        found == wanted or isinstance(wanted, str) for found, wanted in zip(weight.shape, shape, strict=True)
    )
    if isinstance(weight, MXFP4):
        _check_mxfp4(name, weight)
    if not isinstance(weight, Tensor) or not isinstance(like, Tensor):
        if type(weight) is not type(like) or not fits:
            wanted = ", ".join(str(size) for size in shape)
            found = f"{type(weight).__name__} {list(weight.shape)}"
            raise ValueError(
                f"{name}: found {found}, expected [{wanted}] {type(like).__name__} as the others"
            )
    elif not fits or weight.dtype is not like.dtype:
        raise _wrong(name, weight, like.dtype, shape)


def _check_mxfp4(name: str, weight: MXFP4) -> None:
    blocks, scales = weight
    if (
        scales.dim() != 2
        or blocks.shape != (*scales.shape, 16)
        or blocks.dtype is not torch.uint8
        or scales.dtype is not torch.uint8
    ):
        found = f"blocks {list(blocks.shape)} {blocks.dtype}, scales {list(scales.shape)} {scales.dtype}"
        wanted = "expected uint8 [N, K / 32, 16] and [N, K / 32]"
        raise ValueError(f"{name}: found {found}, {wanted}".replace("torch.", ""))
    if (scales == 255).any():
        raise ValueError(f"{name}: found a scale of 255, which is no number, expected 0 to 254")


def pack_linear(weight: Weight, *, format: str = AS_STORED) -> LinearWeight:
    """Pack a weight [N, K] as checkpoints hold it. `weight` may be released afterwards."""
    return pack_linear_rows([weight], format=format)


def pack_linear_rows(weights: Sequence[Weight], *, format: str = AS_STORED) -> LinearWeight:
    """Pack several weights [Ni, K] as one, rows one after another (q, k, v)."""
    if not weights:
        raise ValueError("weights: found none, expected at least one")
    format = _packed_format("weights[0]", weights[0], format, ("linear", "embed"))
    K = weights[0].shape[-1]
    for i, weight in enumerate(weights):
        _check_weight(f"weights[{i}]", weight, weights[0], ("rows", K))
    backend = backends.active()
    N = sum(weight.shape[0] for weight in weights)
    return LinearWeight(N, K, format, backend.pack_rows(weights, format), backend)


def pack_linear_heads(weights: Tensor, *, format: str = AS_STORED) -> HeadsWeight:
    """Pack one matrix per head, weights [H, N, K] of any strides (the products of latent attention)."""
    if weights.dim() != 3 or not len(weights):
        raise _wrong("weights", weights, weights.dtype, ("heads", "N", "K"))
    heads = tuple(pack_linear(weight, format=format) for weight in weights)
    return HeadsWeight(heads, heads[0].backend.new_heads([head.handle for head in heads]))


def pack_expert(
    gate: Weight | None,
    up: Weight,
    down: Weight,
    *,
    format: str = AS_STORED,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> ExpertWeight:
    """Pack one expert: gate and up [F, D], down [D, F], any strides; biases [F], [F], [D], kept in float32.

    activation  "swiglu"          silu(gate) * up
                "geglu_tanh"      gelu(gate) * up, gelu by its tanh formula
                "clamped_swiglu"  (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-limit
                "relu"            max(up, 0): two matrices, `gate` is None
    """
    format = _packed_format("up", up, format, ("grouped_ffn",))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: found {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if (gate is None) != (activation == "relu"):
        found = "None" if gate is None else str(list(gate.shape))
        wanted = "None" if activation == "relu" else "[F, D]"
        raise ValueError(f"gate: found {found} with activation {activation!r}, expected {wanted}")
    _check_weight("up", up, up, ("F", "D"))
    F, D = up.shape
    if gate is not None:
        _check_weight("gate", gate, up, (F, D))
    _check_weight("down", down, up, (D, F))
    for name, bias, length in (
        ("gate_bias", gate_bias, F),
        ("up_bias", up_bias, F),
        ("down_bias", down_bias, D),
    ):
        if bias is not None and (bias.shape != (length,) or (name == "gate_bias" and gate is None)):
            raise ValueError(
                f"{name}: found {list(bias.shape)}, expected [{length}] of a matrix that is there"
            )
    backend = backends.active()
    biases = (gate_bias, up_bias, down_bias)
    rule = Activation(activation, alpha, float("inf") if limit is None else limit)
    handle = backend.pack_expert(gate, up, down, format, rule, biases)
    has_biases = any(bias is not None for bias in biases)
    return ExpertWeight(D, F, format, handle, backend, gate is not None, has_biases)


def _declined(op: str) -> AssertionError:
    return AssertionError(f"{op}: the compiled kernels declined arguments that passed the checks")


# Each operation below has its checks in a function of their own, which makes a missing output too. A backend that checks
# by itself (`CHECKS`) is called first, since a dozen attributes cost more than a small kernel; it gives False when
# something does not fit, and then the checks say what.


def linear(
    x: Tensor, w: LinearWeight, *, bias: Tensor | None = None, out: Tensor | None = None, add: bool = False
) -> Tensor:
    """x [T, K] times w transposed, plus bias [N]: [T, N]. With `add`, out += the finished sum (out is the residual)."""
    backend = w.backend
    if out is None or not backend.CHECKS:
        out = _check_linear(x, w, bias, out, add)
    if backend.linear(x, w.handle, bias, out, add) is False:
        _check_linear(x, w, bias, out, add)
        raise _declined("linear")
    return out


def _check_linear(x: Tensor, w: LinearWeight, bias: Tensor | None, out: Tensor | None, add: bool) -> Tensor:
    _rows("x", x, w.num_inputs)
    _vector("bias", bias, w.num_outputs)
    if out is None:
        if add:
            raise ValueError("out: found None, expected the residual to add to")
        return torch.empty(x.shape[0], w.num_outputs, device=x.device)
    _rows("out", out, w.num_outputs, x.shape[0])
    return out


def linear_heads(x: Tensor, w: HeadsWeight, *, out: Tensor | None = None) -> Tensor:
    """Head h of x [T, H, K] times matrix h transposed: [T, H, N]."""
    backend = w.backend
    if out is None or not backend.CHECKS:
        out = _check_linear_heads(x, w, out)
    if backend.linear_heads(x, w.handle, out) is False:
        _check_linear_heads(x, w, out)
        raise _declined("linear_heads")
    return out


def _check_linear_heads(x: Tensor, w: HeadsWeight, out: Tensor | None) -> Tensor:
    if x.dim() != 3:
        raise _wrong("x", x, F32, ("T", w.num_heads, w.num_inputs))
    T = x.shape[0]
    _heads("x", x, T, w.num_heads, w.num_inputs)
    if out is None:
        return torch.empty(T, w.num_heads, w.num_outputs, device=x.device)
    _heads("out", out, T, w.num_heads, w.num_outputs)
    return out


def embed(token_ids: Tensor, w: LinearWeight, *, out: Tensor | None = None) -> Tensor:
    """Rows token_ids [T] of a packed weight, widened: [T, K]."""
    backend = w.backend
    if out is None or not backend.CHECKS:
        out = _check_embed(token_ids, w, out)
    if backend.embed(token_ids, w.handle, out) is False:
        _check_embed(token_ids, w, out)
        raise _declined("embed")
    return out


def _check_embed(token_ids: Tensor, w: LinearWeight, out: Tensor | None) -> Tensor:
    if token_ids.dim() != 1:
        raise _wrong("token_ids", token_ids, I32, ("T",))
    T = token_ids.shape[0]
    _dense("token_ids", token_ids, I32, (T,))
    if out is None:
        return torch.empty(T, w.num_inputs, device=token_ids.device)
    _rows("out", out, w.num_inputs, T)
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Rows [T, D] scaled to a mean square of 1, times weight [D] if there is one. `out` may be x."""
    backend = backends.active()
    if out is None or not backend.CHECKS:
        out = _check_rms_norm(x, weight, out)
    if backend.rms_norm(x, weight, eps, out) is False:
        _check_rms_norm(x, weight, out)
        raise _declined("rms_norm")
    return out


def _check_rms_norm(x: Tensor, weight: Tensor | None, out: Tensor | None) -> Tensor:
    if weight is not None and weight.dim() != 1:
        raise _wrong("weight", weight, F32, ("D",))
    if weight is None and x.dim() != 2:
        raise _wrong("x", x, F32, ("rows", "D"))
    D = x.shape[1] if weight is None else weight.shape[0]
    _rows("x", x, D)
    _vector("weight", weight, D)
    if out is None:
        return torch.empty(x.shape[0], D, device=x.device)
    _rows("out", out, D, x.shape[0])
    return out


def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Norm the heads of x [T, H, P] (if weight [P] is given), then turn their first 2 * columns by position. In place.

    With C columns in cos and sin [S, C], pairs (p, p + C) turn, or (2p, 2p + 1) if `interleaved`; C may be 0.
    """
    backend = backends.active()
    if not backend.CHECKS:
        _check_head_norm_rope(x, weight, cos, sin, positions)
    if backend.head_norm_rope(x, weight, eps, cos, sin, positions, interleaved) is False:
        _check_head_norm_rope(x, weight, cos, sin, positions)
        raise _declined("head_norm_rope")


def _check_head_norm_rope(
    x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor
) -> None:
    if x.dim() != 3:
        raise _wrong("x", x, F32, ("T", "H", "P"))
    T, H, P = x.shape
    _heads("x", x, T, H, P)
    _vector("weight", weight, P)
    if cos.dim() != 2 or 2 * cos.shape[1] > P:
        raise _wrong("cos", cos, F32, ("S", f"at most {P // 2}"))
    _dense("cos", cos, F32, cos.shape)
    _dense("sin", sin, F32, cos.shape)
    _dense("positions", positions, I32, (T,))


def soft_cap(x: Tensor, cap: float) -> None:
    """x [T, N] = cap * tanh(x / cap), in place."""
    backend = backends.active()
    if not backend.CHECKS:
        _check_soft_cap(x, cap)
    if backend.soft_cap(x, cap) is False:
        _check_soft_cap(x, cap)
        raise _declined("soft_cap")


def _check_soft_cap(x: Tensor, cap: float) -> None:
    if not cap > 0:
        raise ValueError(f"cap: found {cap}, expected more than 0")
    _rows("x", x, x.shape[-1] if x.dim() else 0)


def _check_pages(k_pages: Tensor, v_pages: Tensor) -> tuple[int, int, int]:
    """Check the pages of one layer; their G, P and Pv."""
    if k_pages.dim() != 4:
        raise _wrong("k_pages", k_pages, F32, ("num_blocks", "G", "P", KV_BLOCK_TOKENS))
    num_blocks, G = k_pages.shape[:2]
    last = backends.keys_end_in_tokens()
    P = k_pages.shape[2 if last else 3]
    dtype = F32 if backends.is_on_host() else k_pages.dtype
    _dense(
        "k_pages", k_pages, dtype, (num_blocks, G, *((P, KV_BLOCK_TOKENS) if last else (KV_BLOCK_TOKENS, P)))
    )
    if v_pages.dim() != 4:
        raise _wrong("v_pages", v_pages, dtype, (num_blocks, G, KV_BLOCK_TOKENS, "Pv"))
    Pv = v_pages.shape[3]
    _dense("v_pages", v_pages, dtype, (num_blocks, G, KV_BLOCK_TOKENS, Pv))
    return G, P, Pv


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write keys [T, G, P] and values [T, G, Pv] to slots [T] (block * 16 + offset) of one layer's pages."""
    backend = backends.active()
    if not backend.CHECKS:
        _check_kv_write(k, v, k_pages, v_pages, slots)
    if backend.kv_write(k, v, k_pages, v_pages, slots) is False:
        _check_kv_write(k, v, k_pages, v_pages, slots)
        raise _declined("kv_write")


def _check_kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    G, P, Pv = _check_pages(k_pages, v_pages)
    if slots.dim() != 1:
        raise _wrong("slots", slots, I32, ("T",))
    T = slots.shape[0]
    _dense("slots", slots, I32, (T,))
    _heads("k", k, T, G, P)
    _heads("v", v, T, G, Pv)


def kv_copy(pages: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy blocks source [n] to destination [n] of pages [num_blocks, ...]; no block is in both lists."""
    if not _is_whole(pages) or pages.dim() < 2:
        raise _wrong("pages", pages, pages.dtype, ("num_blocks", "..."))
    if source.dim() != 1:
        raise _wrong("source", source, I32, ("n",))
    _dense("source", source, I32, source.shape)
    _dense("destination", destination, I32, source.shape)
    backends.active().kv_copy(pages, source, destination)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of rows q [T, H, P] over positions 0..row_position of their requests: [T, H, Pv].

    window    a row sees at most this many last positions, its own included
    sinks     [H], one more logit in each head's softmax, which takes weight and gives no value
    soft_cap  scores pass cap * tanh(score / cap)
    """
    backend = backends.active()
    extras = window, sinks, soft_cap
    if out is None or not backend.CHECKS:
        out = _check_paged_attention(
            q, k_pages, v_pages, block_tables, row_request, row_position, extras, out
        )
    rows = row_request, row_position, scale, window, sinks, soft_cap, out
    if backend.paged_attention(q, k_pages, v_pages, block_tables, *rows) is False:
        _check_paged_attention(q, k_pages, v_pages, block_tables, row_request, row_position, extras, out)
        raise _declined("paged_attention")
    return out


def _check_paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    extras: tuple[int | None, Tensor | None, float | None],
    out: Tensor | None,
) -> Tensor:
    G, P, Pv = _check_pages(k_pages, v_pages)
    if q.dim() != 3 or q.shape[1] % G:
        raise _wrong("q", q, F32, ("T", f"H a multiple of {G}", P))
    T, H, _ = q.shape
    _heads("q", q, T, H, P)
    if block_tables.dim() != 2:
        raise _wrong("block_tables", block_tables, I32, ("B", "M"))
    _dense("block_tables", block_tables, I32, block_tables.shape)
    _dense("row_request", row_request, I32, (T,))
    _dense("row_position", row_position, I32, (T,))
    window, sinks, soft_cap = extras
    if window is not None and window < 1:
        raise ValueError(f"window: found {window}, expected 1 or more, or None")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap: found {soft_cap}, expected more than 0, or None")
    _vector("sinks", sinks, H)
    if out is None:
        return torch.empty(T, H, Pv, device=q.device)
    _heads("out", out, T, H, Pv)
    return out


def biased_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    bias: Tensor,
    own_position: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_attention` with bias [H, 2 m + 1] added to the scores, by how far a position is from own_position [T].

    A row sees positions 0..row_position, which may be behind its own: all of an encoder's, say.
    """
    backend = backends.active()
    rows = q, k_pages, v_pages, block_tables, row_request, row_position
    if out is None or not backend.CHECKS:
        out = _check_biased_attention(rows, bias, own_position, out)
    if backend.biased_attention(*rows, scale, bias, own_position, out) is False:
        _check_biased_attention(rows, bias, own_position, out)
        raise _declined("biased_attention")
    return out


def _check_biased_attention(
    rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    bias: Tensor,
    own_position: Tensor,
    out: Tensor | None,
) -> Tensor:
    out = _check_paged_attention(*rows, (None, None, None), out)
    T, H, _ = rows[0].shape
    if bias.dim() != 2 or bias.shape[1] % 2 == 0:
        raise _wrong("bias", bias, F32, (H, "an odd number"))
    _dense("bias", bias, F32, (H, bias.shape[1]))
    _dense("own_position", own_position, I32, (T,))
    return out


def gate_topk(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    scores: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    selection_bias: Tensor | None = None,
    counting: Counting | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k best experts of each row of logits [T, E], ties to the lowest id: ids and weights [T, k].

    scores          "softmax" over all, "softmax_of_top_k", or "sigmoid"
    renormalise     weights divided by their sum
    num_groups      experts in equal groups, of which the `top_groups` best may be chosen from; a group counts by its best
                    expert, with a selection bias by the sum of its best two
    scale           times every weight, as is expert_scale [E] of the chosen
    selection_bias  [E] added to the scores to choose, not to weigh
    counting        where the choices of rows are counted by KV block; nowhere without it
    """
    backend = backends.active()
    rule = GateRule(renormalise, scores, num_groups, top_groups, scale, expert_scale, selection_bias)
    if out is None or not backend.CHECKS:
        out = _check_gate_topk(logits, k, rule, counting, out)
    ids, weights = out
    if backend.gate_topk(logits, k, rule, counting, ids, weights) is False:
        _check_gate_topk(logits, k, rule, counting, out)
        raise _declined("gate_topk")
    return out


def _check_gate_topk(
    logits: Tensor,
    k: int,
    rule: GateRule,
    counting: Counting | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2:
        raise _wrong("logits", logits, F32, ("T", "E"))
    T, E = logits.shape
    _rows("logits", logits, E)
    if rule.scores not in SCORES:
        raise ValueError(f"scores: found {rule.scores!r}, expected one of {', '.join(SCORES)}")
    if rule.num_groups < 1 or E % rule.num_groups or not 1 <= rule.top_groups <= rule.num_groups:
        raise ValueError(
            f"num_groups, top_groups: found {rule.num_groups}, {rule.top_groups}, expected a divisor of {E} and at most that"
        )
    choice = E // rule.num_groups * rule.top_groups
    if not 1 <= k <= choice:
        raise ValueError(f"k: found {k}, expected 1 to {choice}, the number of experts")
    _vector("expert_scale", rule.expert_scale, E)
    _vector("selection_bias", rule.selection_bias, E)
    if counting is not None:
        counts = counting.counts
        if (
            counts.dtype not in (torch.int8, I32)
            or counts.dim() != 2
            or counts.shape[1] != E
            or (E > 1 and counts.stride(1) != 1)
        ):
            raise _wrong("counting.counts", counts, torch.int8, ("num_blocks", E))
        _dense("counting.slots", counting.slots, I32, (T,))
        _dense("counting.counted", counting.counted, I32, (T,))
    if out is None:
        return torch.empty(T, k, dtype=I32, device=logits.device), torch.empty(T, k, device=logits.device)
    _dense("out[0]", out[0], I32, (T, k))
    _dense("out[1]", out[1], F32, (T, k))
    return out


def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    """Group the pairs of expert_ids [T, K] by host_of_expert [E]; pairs of host -1 appear in no group."""
    backend = backends.active()
    if not backend.CHECKS:
        _check_dispatch(expert_ids, host_of_expert)
    grouped = backend.dispatch(expert_ids, host_of_expert, num_hosts)
    if grouped is False:
        _check_dispatch(expert_ids, host_of_expert)
        raise _declined("dispatch")
    return grouped


def _check_dispatch(expert_ids: Tensor, host_of_expert: Tensor) -> None:
    for name, tensor, shape in (
        ("expert_ids", expert_ids, ("T", "K")),
        ("host_of_expert", host_of_expert, ("E",)),
    ):
        if tensor.dim() != len(shape) or tensor.dtype is not I32 or not tensor.is_contiguous():
            raise _wrong(name, tensor, I32, shape)
    if expert_ids.device != host_of_expert.device:
        raise _wrong("host_of_expert", host_of_expert, I32, ("E",))


def grouped_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    bank: ExpertBank,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Row rows[i] of x [T, D] through expert expert_ids[i] of the bank, unweighted: [R, D]."""
    backend = bank.backend
    if out is None or backend is None or not backend.CHECKS:
        out = _check_grouped_ffn(x, rows, expert_ids, bank, out)
        if rows.shape[0] == 0:
            return out
        if backend is None:
            raise IndexError(
                f"expert_ids: asks for expert {int(expert_ids[0])}, but none is resident in this bank"
            )
    if backend.grouped_ffn(x, rows, expert_ids, bank.handle, out) is False:
        _check_grouped_ffn(x, rows, expert_ids, bank, out)
        raise _declined("grouped_ffn")
    return out


def _check_grouped_ffn(
    x: Tensor, rows: Tensor, expert_ids: Tensor, bank: ExpertBank, out: Tensor | None
) -> Tensor:
    if rows.dim() != 1:
        raise _wrong("rows", rows, I32, ("R",))
    R, D = rows.shape[0], bank.D
    _rows("x", x, D)
    _dense("rows", rows, I32, (R,))
    _dense("expert_ids", expert_ids, I32, (R,))
    if out is None:
        return torch.empty(R, D, device=x.device)
    _rows("out", out, D, R)
    return out


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    """hidden [T, D] += each token's expert rows, weighted and summed in slot order; slot -1 is skipped."""
    backend = backends.active()
    if not backend.CHECKS:
        _check_combine(expert_out, slots, gate_weights, hidden)
    if backend.combine(expert_out, slots, gate_weights, hidden) is False:
        _check_combine(expert_out, slots, gate_weights, hidden)
        raise _declined("combine")


def _check_combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> None:
    if slots.dim() != 2:
        raise _wrong("slots", slots, I32, ("T", "K"))
    if hidden.dim() != 2:
        raise _wrong("hidden", hidden, F32, ("T", "D"))
    T, K = slots.shape
    D = hidden.shape[1]
    _dense("slots", slots, I32, (T, K))
    _dense("gate_weights", gate_weights, F32, (T, K))
    _rows("hidden", hidden, D, T)
    _rows("expert_out", expert_out, D)


def experts(
    x: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    bank: ExpertBank,
    hidden: Tensor,
    *,
    expert_out: Tensor,
) -> bool:
    """hidden [T, D] += the weighted sum of experts expert_ids [T, K] of x [T, D]: grouped_ffn and combine as one.

    expert_out [T*K, D] is overwritten with the unweighted outputs. Returns whether `hidden` is finite afterwards.
    """
    backend = bank.backend
    if backend is None or not backend.CHECKS:
        _check_experts(x, expert_ids, gate_weights, bank, hidden, expert_out)
    if backend is None:
        if expert_ids.numel():
            asked = int(expert_ids.view(-1)[0])
            raise IndexError(f"expert_ids: asks for expert {asked}, but none is resident in this bank")
        return True
    if not hasattr(backend, "experts"):
        return experts_by(backend, x, expert_ids, gate_weights, bank.handle, hidden, expert_out)
    finite = backend.experts(x, expert_ids, gate_weights, bank.handle, hidden, expert_out)
    if finite is None:
        _check_experts(x, expert_ids, gate_weights, bank, hidden, expert_out)
        raise _declined("experts")
    return finite


def _check_experts(
    x: Tensor, expert_ids: Tensor, gate_weights: Tensor, bank: ExpertBank, hidden: Tensor, expert_out: Tensor
) -> None:
    if expert_ids.dim() != 2:
        raise _wrong("expert_ids", expert_ids, I32, ("T", "K"))
    T, K = expert_ids.shape
    _dense("expert_ids", expert_ids, I32, (T, K))
    _dense("gate_weights", gate_weights, F32, (T, K))
    _rows("x", x, bank.D, T)
    _rows("hidden", hidden, bank.D, T)
    _rows("expert_out", expert_out, bank.D, T * K)
