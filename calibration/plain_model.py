"""A decoder-only model as plain differentiable torch: whole prompts, no cache, float32, any family by its ModelSpec.

It exists to be looked into and trained on: experts split into slices, every choice of a gate in the caller's hands. The
runtime's `Decoder` is the definition; this must agree with it. Slow, and all weights are in memory as float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from edge_runtime.errors import UserError
from edge_runtime.model.architectures.table import Part
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.quantised import mxfp4_to_bfloat16
from edge_runtime.model.rope import rope_table
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec
from kernels.ops import MXFP4
from topology.ids import ExpertId

LEAST_SUM = 1e-20


class Routed(NamedTuple):
    """What a layer's rows were sent to. T rows, K columns, N slices.

    expert_ids  [T, K] int64
    weights     [T, K, N] float32, how much each slice of the expert counts; 0 skips it
    """

    expert_ids: Tensor
    weights: Tensor


Route = Callable[[int, Tensor, Tensor], Routed]
"""(layer, x [T, D] that the experts read, gate logits [T, E]) -> where the rows go."""


class Experts(NamedTuple):
    """One layer's routed experts; gate is None where the activation has none, biases where there are none."""

    gate: Tensor | None  # [E, F, D]
    up: Tensor  # [E, F, D]
    down: Tensor  # [E, D, F]
    gate_bias: Tensor | None = None  # [E, F]
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None  # [E, D]

    def permuted(self, order: Tensor) -> "Experts":
        """The same experts with their neurons in another order: order [E, F] int64, new place -> old neuron."""

        def rows(weight: Tensor | None) -> Tensor | None:
            if weight is None:
                return None
            index = order if weight.dim() == 2 else order[..., None].expand_as(weight)
            return weight.gather(1, index)

        down = self.down.gather(2, order[:, None].expand_as(self.down))
        up = rows(self.up)
        assert up is not None, "every expert has an up matrix"
        return Experts(rows(self.gate), up, down, rows(self.gate_bias), rows(self.up_bias), self.down_bias)


class PlainModel:
    """All layers of one model. Gates are in `gates` by layer and may be replaced; nothing else is meant to change.

    experts   by MoE layer
    gates     by MoE layer: weight [E, D] and bias [E] or None
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.spec = checkpoint.spec
        if self.spec.encoder is not None:
            raise UserError(
                f"model {checkpoint.folder} is an encoder-decoder ({self.spec.family}), expected a decoder; "
                "sub-experts are calibrated for decoders only"
            )
        self._checkpoint = checkpoint
        part = checkpoint.table.part
        self.embed = self._read([part("embed")])[0]
        self.final_norm = self._read([part("final_norm")])[0] * self.spec.head_scale
        self.head = self.embed if self.spec.tied_head else self._read([part("head")])[0]
        self.layers = [self._layer(index) for index in range(self.spec.num_layers)]
        self.experts = {index: self._experts(index) for index in self.spec.moe_layers}
        self.gates = {
            index: (self.layers[index]["gate"], self.layers[index].get("gate_bias"))
            for index in self.spec.moe_layers
        }
        self._ropes: dict[tuple[object, int, int], tuple[Tensor, Tensor]] = {}

    def _read(self, parts: Sequence[Part]) -> list[Tensor]:
        return _read(self._checkpoint, parts)

    def _layer(self, index: int) -> dict[str, Tensor]:
        roles = self._checkpoint.table.trunk_roles(index)
        return dict(
            zip(roles, self._read([self._checkpoint.table.part(r, index) for r in roles]), strict=True)
        )

    def _experts(self, index: int) -> Experts:
        gate = self.spec.layers[index].gate
        assert gate is not None, f"layer {index} has no gate"
        each = [read_expert(self._checkpoint, ExpertId(index, e)) for e in range(gate.num_experts)]
        parts = zip(*each, strict=True)
        return Experts(*(None if part[0] is None else torch.stack(part) for part in parts))

    def logits(self, hidden: Tensor) -> Tensor:
        """The head. hidden [.., D], as `run` returns it -> [.., V]."""
        found = functional.linear(_norm(hidden, self.final_norm, self.spec.norm_eps), self.head)
        cap = self.spec.logit_soft_cap
        return found if cap is None else cap * torch.tanh(found / cap)

    def run(self, token_ids: Tensor, route: Route | None = None) -> Tensor:
        """All layers. token_ids [B, S] int64 -> the residual behind the last layer [B, S, D].

        route  who chooses the experts; the model's own gates if None
        """
        route = self.native if route is None else route
        hidden = functional.embedding(token_ids, self.embed) * self.spec.embed_scale
        keys: dict[int, tuple[Tensor, Tensor]] = {}
        for index, spec in enumerate(self.spec.layers):
            hidden = self._run_layer(index, spec, hidden, keys, route)
        return hidden

    def native(self, layer: int, x: Tensor, logits: Tensor) -> Routed:
        """The model's own choice, experts whole."""
        spec = self.spec.layers[layer].gate
        assert spec is not None, f"layer {layer} has no gate"
        ids, weights = choose_experts(spec, logits, **self.gate_extras(layer))
        return Routed(ids, weights[..., None])

    def gate_extras(self, layer: int) -> dict[str, Tensor | None]:
        """What a layer's gate has beside its matrix."""
        weights = self.layers[layer]
        return {
            "expert_scale": weights.get("gate_expert_scale"),
            "selection_bias": weights.get("gate_selection_bias"),
        }

    def activations(self, layer: int, expert: int, x: Tensor) -> Tensor:
        """What an expert's neurons give for x [n, D]: [n, F], what `down` reads."""
        one = Experts(*(None if part is None else part[expert] for part in self.experts[layer]))
        return inner_of(self.spec.layers[layer].ffn, one, x)

    def experts_sum(self, layer: int, x: Tensor, routed: Routed) -> Tensor:
        """The weighted sum of what the routed slices give: x [T, D] -> [T, D]."""
        weights = self.experts[layer]
        out = torch.zeros_like(x)
        num_slices = routed.weights.shape[-1]
        width = weights.up.shape[1] // num_slices
        used = (routed.weights != 0).any(-1)
        for expert in routed.expert_ids[used].unique().tolist():
            rows, columns = ((routed.expert_ids == expert) & used).nonzero(as_tuple=True)
            share = routed.weights[rows, columns]  # [n, N]
            inner = self.activations(layer, expert, x[rows]) * share.repeat_interleave(width, dim=1)
            found = inner @ weights.down[expert].T
            if weights.down_bias is not None:  # each slice carries an equal part of it
                found = found + weights.down_bias[expert] * share.mean(-1, keepdim=True)
            out = out.index_add(0, rows, found)
        return out

    def _run_layer(
        self,
        index: int,
        spec: LayerSpec,
        hidden: Tensor,
        keys: dict[int, tuple[Tensor, Tensor]],
        route: Route,
    ) -> Tensor:
        weights, eps = self.layers[index], self.spec.norm_eps
        attended = self._attend(index, spec.attention, _norm(hidden, weights["input_norm"], eps), keys)
        if spec.output_norms:
            attended = _norm(attended, weights["attention_out_norm"], eps)
        hidden = hidden + attended
        x = _norm(hidden, weights["post_norm"], eps)
        if spec.gate is None:
            found = _mlp(spec.ffn, weights, "dense", x)
        else:
            found = self._moe(index, spec, hidden, x, route)
        if spec.output_norms:
            found = _norm(found, weights["ffn_out_norm"], eps)
        hidden = hidden + found
        return hidden * weights["output_scale"] if spec.output_scale else hidden

    def _moe(self, index: int, spec: LayerSpec, hidden: Tensor, x: Tensor, route: Route) -> Tensor:
        weights, eps = self.layers[index], self.spec.norm_eps
        gate = spec.gate
        assert gate is not None, "only a layer with a gate has routed experts"
        read = x
        if gate.reads_residual:
            read = _norm(hidden, weights["gate_norm"] * self.spec.width**-0.5, eps)
        flat = x.flatten(0, -2)
        gate_logits = functional.linear(read.flatten(0, -2), *self.gates[index])
        found = self.experts_sum(index, flat, route(index, flat, gate_logits)).view_as(x)
        if spec.parallel_dense is not None:
            dense = _mlp(spec.parallel_dense, weights, "dense", _norm(hidden, weights["dense_norm"], eps))
            found = _norm(dense, weights["dense_out_norm"], eps) + _norm(
                found, weights["routed_out_norm"], eps
            )
        elif spec.shared is not None:
            shared = _mlp(spec.shared, weights, "shared", x)
            if spec.shared_gate:
                shared = shared * torch.sigmoid(functional.linear(x, weights["shared_expert_gate"]))
            found = found + shared
        return found

    def _attend(
        self, index: int, spec: AttentionSpec, x: Tensor, keys: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        weights = self.layers[index]
        cos, sin = self._rope(spec, x.shape[1])
        if spec.latent is not None:
            q, k, v = _latent_heads(spec, weights, x, cos, sin)
        else:
            q, own = _heads(spec, weights, x, cos, sin, self.spec.norm_eps)
            if own is not None:
                keys[index] = own
            k, v = keys[index if spec.kv_shared_with is None else spec.kv_shared_with]
        mixed = _causal(spec, q, k, v, weights.get("sinks"))
        return functional.linear(mixed.flatten(2), weights["o"], weights.get("o_bias"))

    def _rope(self, spec: AttentionSpec, num_positions: int) -> tuple[Tensor, Tensor]:
        key = (spec.rope, spec.rotary_width, num_positions)
        if key not in self._ropes:
            self._ropes[key] = rope_table(spec.rope, spec.rotary_width, num_positions)
        return self._ropes[key]


def choose_experts(
    spec: GateSpec,
    logits: Tensor,
    *,
    top_k: int | None = None,
    expert_scale: Tensor | None = None,
    selection_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A gate's choice as `ops.gate_topk` defines it, differentiable: ids [T, K] int64, best first, and weights [T, K].

    top_k  experts of a row, if not as trained
    """
    K = spec.top_k if top_k is None else top_k
    if spec.scores == "sigmoid":
        score = torch.sigmoid(logits)
    elif spec.scores == "softmax":
        score = torch.softmax(logits, dim=-1)
    else:
        score = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    pick = (logits if selection_bias is None else score + selection_bias).detach()
    if spec.num_groups > 1:
        groups = pick.unflatten(-1, (spec.num_groups, -1))
        best = groups.topk(2 if selection_bias is not None else 1, dim=-1).values.sum(-1)
        closed = torch.ones_like(best, dtype=torch.bool).scatter(
            -1, best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups], False
        )
        pick = pick.masked_fill(closed.repeat_interleave(groups.shape[-1], dim=-1), -math.inf)
    ids = pick.sort(dim=-1, descending=True, stable=True).indices[:, :K]
    weights = score.gather(-1, ids)
    if spec.renormalise or spec.scores == "softmax_of_top_k":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
    weights = weights * spec.scale
    return ids, weights if expert_scale is None else weights * expert_scale[ids]


def activate(spec: ExpertSpec, gate: Tensor | None, up: Tensor) -> Tensor:
    """What is between an expert's matrices."""
    if gate is None:
        return functional.relu(up)
    if spec.activation == "swiglu":
        return functional.silu(gate) * up
    if spec.activation == "geglu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    limit = math.inf if spec.clamp is None else spec.clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(spec.alpha * gate)


def read_expert(checkpoint: Checkpoint, expert: ExpertId) -> Experts:
    """One expert's matrices and biases as float32, without the first axis."""
    roles = [role.removeprefix("expert_") for role in checkpoint.table.expert_roles(expert.layer)]
    found = dict(zip(roles, _read(checkpoint, checkpoint.expert_parts(expert)), strict=True))
    return Experts(**{"gate": None} | found)


def inner_of(spec: ExpertSpec, expert: Experts, x: Tensor) -> Tensor:
    """What one expert's neurons give for x [n, D]: [n, F]."""
    gate = None if expert.gate is None else functional.linear(x, expert.gate, expert.gate_bias)
    return activate(spec, gate, functional.linear(x, expert.up, expert.up_bias))


def _read(checkpoint: Checkpoint, parts: Sequence[Part]) -> list[Tensor]:
    with checkpoint.read(parts) as tensors:
        return [_float(tensor) for tensor in tensors]


def _float(tensor: Tensor | MXFP4) -> Tensor:
    plain = mxfp4_to_bfloat16(*tensor) if isinstance(tensor, MXFP4) else tensor
    return plain.to(torch.float32, copy=True).contiguous()


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def _mlp(spec: ExpertSpec, weights: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    def product(name: str, of: Tensor) -> Tensor:
        return functional.linear(of, weights[f"{prefix}_{name}"], weights.get(f"{prefix}_{name}_bias"))

    gate = None if spec.activation == "relu" else product("gate", x)
    return product("down", activate(spec, gate, product("up", x)))


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rope of x [B, S, heads, P]; columns beyond the table's stay."""
    C = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., : 2 * C], x[..., 2 * C :]
    if interleaved:
        low, high = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([low * cos - high * sin, high * cos + low * sin], dim=-1).flatten(-2)
    else:
        low, high = turned[..., :C], turned[..., C:]
        turned = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def _heads(
    spec: AttentionSpec, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Queries [B, S, H, P], and keys and values [B, S, G, P] unless they are another layer's."""

    def project(role: str, norm: Tensor | None) -> Tensor:
        found = functional.linear(x, weights[role], weights.get(f"{role}_bias"))
        if spec.qk_norm == "projection" and norm is not None:
            found = _norm(found, norm, eps)
        if spec.clip is not None:
            found = found.clamp(-spec.clip, spec.clip)
        found = found.unflatten(-1, (-1, spec.head_width))
        if spec.qk_norm == "head" and norm is not None:
            found = _norm(found, norm, eps)
        return found

    q = _turn(project("q", weights.get("q_norm")), cos, sin, spec.interleaved)
    if spec.kv_shared_with is not None:
        return q, None
    k = _turn(project("k", weights.get("k_norm")), cos, sin, spec.interleaved)
    v = project("k" if spec.values_are_keys else "v", None)
    return q, (k, _norm(v, None, eps) if spec.value_norm else v)


def _latent_heads(
    spec: AttentionSpec, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    latent = spec.latent
    assert latent is not None, "only latent attention has these"
    if latent.query_rank is None:
        q = functional.linear(x, weights["q"])
    else:
        down = functional.linear(x, weights["q_down"], weights.get("q_down_bias"))
        q = functional.linear(_norm(down, weights["q_latent_norm"], latent.norm_eps), weights["q_up"])
    q = q.unflatten(-1, (spec.num_heads, spec.head_width))
    kv = functional.linear(x, weights["kv_down"], weights.get("kv_down_bias"))
    compressed = _norm(kv[..., : latent.width], weights["kv_latent_norm"], latent.norm_eps)
    heads = functional.linear(compressed, weights["kv_up"]).unflatten(-1, (spec.num_heads, -1))
    plain, v = heads.split([latent.plain_width, latent.value_width], dim=-1)
    k_turned = _turn(kv[..., None, latent.width :], cos, sin, spec.interleaved).expand(
        -1, -1, spec.num_heads, -1
    )
    q_turned = _turn(q[..., latent.plain_width :], cos, sin, spec.interleaved)
    q = torch.cat([q[..., : latent.plain_width], q_turned], dim=-1)
    return q, torch.cat([plain, k_turned], dim=-1), v


def _causal(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention of whole prompts: q [B, S, H, P], k and v [B, S, G, ..] -> [B, S, H, ..]."""
    S, H, G = q.shape[1], q.shape[2], k.shape[2]
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(H // G, dim=1) for part in (k, v))
    distance = torch.arange(S)[:, None] - torch.arange(S)
    hidden = distance < 0
    if spec.window is not None:
        hidden = hidden | (distance >= spec.window)
    scores = q @ k.transpose(-1, -2) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(q.shape[0], H, S, 1)
        scores = torch.cat([scores, column], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., :S]
    return (shares @ v).transpose(1, 2)
