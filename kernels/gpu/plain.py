"""The operations in a few torch calls, float64 inside: what the kernels are held to at sizes where a loop would take hours.

Knows the packed layouts and pages of this folder only through their inverses. The tests hold it to `kernels.reference`.
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from kernels.gpu.weights import ExpertBank, LinearWeight, dequantised_expert, dequantised_linear
from kernels.reference.paged_attention import bias_columns


def linear(x: Tensor, w: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """[T, N] float64."""
    out = x.double() @ dequantised_linear(w).double().T
    return out if bias is None else out + bias.double()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """[..., D] float64."""
    wide = x.double()
    out = wide * (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return out if weight is None else out * weight.double()


def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> Tensor:
    """[T, H, P] float64: what x becomes."""
    out = x.double() if weight is None else rms_norm(x, weight, eps)
    turned = cos.shape[1]
    c, s = (table.double()[positions.long(), None] for table in (cos, sin))
    if interleaved:
        low, high = out[..., 0 : 2 * turned : 2].clone(), out[..., 1 : 2 * turned : 2].clone()
        out[..., 0 : 2 * turned : 2], out[..., 1 : 2 * turned : 2] = low * c - high * s, high * c + low * s
    else:
        low, high = out[..., :turned].clone(), out[..., turned : 2 * turned].clone()
        out[..., :turned], out[..., turned : 2 * turned] = low * c - high * s, high * c + low * s
    return out


def activate(gate: Tensor | None, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    if activation == "relu":
        return up.relu()
    assert gate is not None
    if activation == "swiglu":
        return silu(gate) * up
    if activation == "geglu_tanh":
        return gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)


def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: ExpertBank) -> Tensor:
    """[R, D] float64; experts one after another, slices too."""
    assert bank.layout is not None
    out = torch.zeros(len(rows), bank.D, dtype=torch.float64, device=x.device)
    for expert_id in expert_ids.unique().tolist():
        if expert_id < 0:
            continue
        mine = expert_ids == expert_id
        begin, count = bank.ranges[expert_id].tolist()
        part = slice(begin, begin + count)
        w = {name: value.double() for name, value in dequantised_expert(bank.expert(expert_id)).items()}
        mx = x[rows[mine].long()].double()
        up = mx @ w["up"][part].T + (w["up_bias"][part] if "up_bias" in w else 0)
        gate = None
        if "gate" in w:
            gate = mx @ w["gate"][part].T + (w["gate_bias"][part] if "gate_bias" in w else 0)
        inner = activate(gate, up, bank.layout.activation, bank.layout.alpha, bank.layout.limit)
        out[mine] = inner @ w["down"][:, part].T
        if "down_bias" in w and begin == 0:
            out[mine] += w["down_bias"]
    return out


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    own_position: Tensor | None = None,
) -> Tensor:
    """[T, H, Pv] float64; rows one after another. With `bias`, what biased_attention gives."""
    T, H, _ = q.shape
    G = k_pages.shape[1]
    out = torch.empty(T, H, v_pages.shape[3], dtype=torch.float64, device=q.device)
    for t, (request, position) in enumerate(zip(row_request.tolist(), row_position.tolist(), strict=True)):
        blocks = block_tables[request, : position // 16 + 1].long()
        first = 0 if window is None else max(0, position - window + 1)
        keys, values = (
            pages[blocks]
            .transpose(1, 2)
            .flatten(0, 1)[first : position + 1]
            .double()
            .repeat_interleave(H // G, dim=1)
            for pages in (k_pages, v_pages)
        )
        scores = torch.einsum("hp,nhp->hn", q[t].double(), keys) * scale
        if bias is not None and own_position is not None:
            seen = torch.arange(first, position + 1, device=q.device)
            scores += bias.double()[:, bias_columns(bias, own_position[t], seen)]
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        weights = scores.softmax(dim=1)[:, : position + 1 - first]
        out[t] = torch.einsum("hn,nhp->hp", weights, values)
    return out


def gate_topk(
    logits: Tensor,
    k: int,
    renormalise: bool,
    scores: str = "softmax",
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    expert_scale: Tensor | None = None,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """ids [T, k] int64 and weights [T, k] float64."""
    T, E = logits.shape
    wide = logits.double()
    score = wide.sigmoid() if scores == "sigmoid" else wide.softmax(dim=1)
    pick = logits if selection_bias is None else score.float() + selection_bias
    if num_groups > 1:
        best = pick.view(T, num_groups, -1).topk(1 if selection_bias is None else 2, dim=2).values.sum(dim=2)
        groups = best.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
        closed = torch.ones(T, num_groups, dtype=torch.bool, device=logits.device).scatter_(1, groups, False)
        pick = pick.masked_fill(closed.repeat_interleave(E // num_groups, dim=1), float("-inf"))
    ids = pick.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = score.gather(1, ids)
    if renormalise or scores == "softmax_of_top_k":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-20)
    weights = weights * scale
    return ids, weights if expert_scale is None else weights * expert_scale.double()[ids]


def combine(expert_out: Tensor, slots: Tensor, gate_weights: Tensor, hidden: Tensor) -> Tensor:
    """[T, D] float64: what hidden becomes."""
    came = (slots >= 0)[..., None]
    padded = torch.cat((expert_out, expert_out.new_zeros(1, expert_out.shape[1])))
    rows = torch.where(came, padded[slots.long()].double(), 0.0)
    return hidden.double() + (rows * gate_weights.double()[..., None]).sum(dim=1)
