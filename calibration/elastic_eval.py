"""Perplexity against K: whole experts left out, the proxy gate, and the linear gate, at equal active parameters.

Runs the plain model over windows of validation text with each gate in turn. Knows no file but the artifact's sections.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from calibration.linear_gate import Rows, expanded, linear_route
from calibration.plain_model import PlainModel, Route, Routed, choose_experts
from edge_runtime.elastic.proxy_gate import choose_slices, slice_scores
from edge_runtime.elastic.sub_experts import SubExperts

Progress = Callable[[str, int, int], None]


def split_experts(model: PlainModel, parts: SubExperts) -> None:
    """Put the neurons of all experts where the partition wants them."""
    for layer, each in parts.layers.items():
        model.experts[layer] = model.experts[layer].permuted(each.permutation)


def whole_route(model: PlainModel, top_k: int, *, renormalise: bool) -> Route:
    """The gate's best `top_k` experts alone; their weights as trained, or again with a sum of what it was."""

    def route(layer: int, x: Tensor, logits: Tensor) -> Routed:
        spec = model.spec.layers[layer].gate
        assert spec is not None, f"layer {layer} has no gate"
        ids, weights = choose_experts(spec, logits, **model.gate_extras(layer))
        kept = weights[:, :top_k]
        if renormalise:
            kept = kept * (weights.sum(-1, keepdim=True) / kept.sum(-1, keepdim=True))
        return Routed(ids[:, :top_k], kept[..., None])

    return route


def proxy_route(model: PlainModel, parts: SubExperts, tier: int | Mapping[int, int]) -> Route:
    """The proxy gate at tier K, or at a K for each layer; experts must be split."""

    def route(layer: int, x: Tensor, logits: Tensor) -> Routed:
        spec = model.spec.layers[layer].gate
        assert spec is not None, f"layer {layer} has no gate"
        ids, weights = choose_experts(spec, logits, **model.gate_extras(layer))
        each, activations = parts.layers[layer], slice_activations(model, parts, layer, x, ids)
        scores = slice_scores(weights, activations, each.slopes[ids], each.offsets[ids])
        own = tier if isinstance(tier, int) else tier[layer]
        kept = choose_slices(scores, torch.full((len(x),), own))
        return Routed(ids, weights[..., None] * kept)

    return route


def slice_activations(model: PlainModel, parts: SubExperts, layer: int, x: Tensor, ids: Tensor) -> Tensor:
    """What the gate neurons of each row's experts give: x [T, D], ids [T, k0] -> [T, k0, N, r]; experts must be split."""
    N, r = parts.num_parts, parts.gate_neurons
    activations = torch.zeros(*ids.shape, N, r)
    for expert in ids.unique().tolist():
        rows, columns = (ids == expert).nonzero(as_tuple=True)
        found = model.activations(layer, expert, x[rows]).unflatten(1, (N, -1))
        activations[rows, columns] = found[..., :r]
    return activations


def perplexity(model: PlainModel, windows: Tensor, route: Route | None) -> float:
    """Of every token of windows [n, S] but the first ones."""
    total = 0.0
    with torch.no_grad():
        for window in windows:
            logits = model.logits(model.run(window[None], route))[0, :-1]
            total += float(functional.cross_entropy(logits, window[1:], reduction="sum"))
    return math.exp(total / (windows.numel() - len(windows)))


def perplexity_table(
    model: PlainModel,
    parts: SubExperts,
    windows: Tensor,
    tiers: Iterable[int],
    *,
    tuned: dict[int, Rows] | None = None,
    progress: Progress = lambda name, done, total: None,
) -> list[dict[str, float | int | None]]:
    """One row per tier. `whole` is the better of both ways to weigh whole experts, where K is a number of them.

    tuned  rows of the linear gate by layer; None leaves its column empty
    """
    split_experts(model, parts)
    N, native = parts.num_parts, dict(model.gates)
    untrained = {layer: expanded(gate, N) for layer, gate in native.items()}
    rows: list[dict[str, float | int | None]] = []
    tiers = list(tiers)
    for done, tier in enumerate(tiers):
        progress("perplexity", done, len(tiers))
        row: dict[str, float | int | None] = {"K": tier, "whole": None, "whole_renormalised": None}
        if tier % N == 0:
            row["whole"] = perplexity(model, windows, whole_route(model, tier // N, renormalise=False))
            row["whole_renormalised"] = perplexity(
                model, windows, whole_route(model, tier // N, renormalise=True)
            )
        row["proxy"] = perplexity(model, windows, proxy_route(model, parts, tier))
        if parts.tier_losses is not None:
            row["proxy_split"] = perplexity(model, windows, proxy_route(model, parts, parts.split_of(tier)))
        for name, gates in (("linear", untrained), ("linear_tuned", tuned)):
            row[name] = None
            if gates is not None:
                model.gates = dict(gates)
                row[name] = perplexity(model, windows, linear_route(model, N, tier))
                model.gates = dict(native)
        rows.append(row)
    progress("perplexity", len(tiers), len(tiers))
    return rows
