"""What the neurons of every expert give for the rows that were routed to it. Knows the plain model; no solver.

Rows are kept once per layer as the experts read them, and an expert's activations are computed when they are asked for:
all of them together would be as large as the rows times F.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from calibration.plain_model import PlainModel, Routed

ROWS_PER_EXPERT = 2048
FEW_ROWS = 256  # an expert with fewer rows of its own is profiled on all rows, weighted by its gate probability


class LayerRows(NamedTuple):
    """One layer's calibration rows. T rows."""

    x: Tensor  # [T, D] bfloat16
    expert_ids: Tensor  # [T, k0] int16
    weights: Tensor  # [T, k0] float32, as the gate gave them
    logits: Tensor  # [T, E] float32


def collect_rows(
    model: PlainModel, windows: Tensor, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[int, LayerRows]:
    """Run all windows [n, S] and keep what every MoE layer saw."""
    kept: dict[int, list[LayerRows]] = {layer: [] for layer in model.spec.moe_layers}

    def look(layer: int, x: Tensor, logits: Tensor) -> Routed:
        routed = model.native(layer, x, logits)
        rows = LayerRows(
            x.bfloat16(), routed.expert_ids.short(), routed.weights[..., 0].clone(), logits.clone()
        )
        kept[layer].append(rows)
        return routed

    with torch.no_grad():
        for index, window in enumerate(windows):
            model.run(window[None], look)
            progress(index + 1, len(windows))
    return {
        layer: LayerRows(*map(torch.cat, zip(*rows, strict=True)))
        for layer, rows in kept.items()  # type: ignore[arg-type]
    }


def expert_activations(
    model: PlainModel, layer: int, expert: int, rows: LayerRows, *, most: int = ROWS_PER_EXPERT, seed: int = 1
) -> Tensor:
    """[B, F]: activations of the rows that went to an expert, at most `most` of them, drawn at random.

    An expert that hardly any row went to: all rows, each times its gate probability by the mean.
    """
    own = (rows.expert_ids == expert).any(1).nonzero().view(-1)
    is_rare = len(own) < FEW_ROWS
    drawn = torch.arange(len(rows.x)) if is_rare else own
    if len(drawn) > most:
        generator = torch.Generator().manual_seed(seed + expert)
        drawn = drawn[torch.randperm(len(drawn), generator=generator)[:most]]
    with torch.no_grad():
        found = model.activations(layer, expert, rows.x[drawn].float())
        if is_rare:
            probability = torch.softmax(rows.logits[drawn], dim=-1)[:, expert]
            found = found * (probability / probability.mean().clamp(min=1e-20))[:, None]
    return found
