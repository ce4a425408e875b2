"""The rows that every layer's experts read in calibration text, and what an expert's neurons give for them.

Rows are kept once per layer; an expert's activations are computed when they are asked for, since all of them together
would be as large as the rows times F. Knows no solver.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calibration.exact_model import ExactModel, Routed, Step
from calibration.passes import generator
from calibration.plain_model import Experts, inner_of
from calibration.requests import CalibrationRequest
from edge_runtime.model.spec import ExpertSpec

ROWS_PER_EXPERT = 2048
FEW_ROWS = (
    256  # an expert with fewer rows of its own is profiled on all rows, weighted by its gate probability
)


class LayerRows(NamedTuple):
    """One layer's calibration rows. T rows."""

    x: Tensor  # [T, D] bfloat16
    expert_ids: Tensor  # [T, k0] int32
    logits: Tensor  # [T, E] float16


class CollectRows:
    """A Pass over the requests that keeps every row of every routed layer.

    rows  by layer, so far
    """

    name = "rows"

    def __init__(self, model: ExactModel, requests: Sequence[CalibrationRequest]) -> None:
        self._model = model
        self._steps = model.batches(requests)
        self._kept: dict[int, list[LayerRows]] = {layer: [] for layer in model.moe_layers}

    @property
    def num_units(self) -> int:
        return len(self._steps)

    def run(self, unit: int) -> None:
        """See Pass."""
        step: Step = self._model.place(self._steps[unit])
        self._model.run(step, self._look)

    def _look(self, routed: Routed) -> None:
        rows = LayerRows(routed.x.bfloat16(), routed.expert_ids.clone(), routed.logits.half())
        self._kept[routed.layer].append(rows)

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {
            f"{layer}.{name}": part
            for layer in self._kept
            for name, part in self.rows(layer)._asdict().items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        for layer in self._kept:
            self._kept[layer] = [LayerRows(*(state[f"{layer}.{name}"] for name in LayerRows._fields))]

    def rows(self, layer: int) -> LayerRows:
        """Everything one layer saw."""
        kept = self._kept[layer]
        if len(kept) > 1:
            self._kept[layer] = kept = [LayerRows(*map(torch.cat, zip(*kept, strict=True)))]
        return kept[0]


def expert_activations(
    spec: ExpertSpec,
    weights: Experts,
    expert: int,
    rows: LayerRows,
    *,
    most: int = ROWS_PER_EXPERT,
    seed: int = 1,
) -> Tensor:
    """[B, F]: activations of the rows that went to an expert, at most `most` of them, drawn at random.

    An expert that hardly any row went to is shown all rows, each counting by the gate's probability of it.
    """
    own = (rows.expert_ids == expert).any(1).nonzero().view(-1)
    is_rare = len(own) < min(FEW_ROWS, len(rows.x))
    drawn = torch.arange(len(rows.x)) if is_rare else own
    if len(drawn) > most:
        drawn = drawn[torch.randperm(len(drawn), generator=generator(seed, expert))[:most]]
    found = inner_of(spec, weights, rows.x[drawn].float())
    if is_rare:
        probability = torch.softmax(rows.logits[drawn].float(), dim=-1)[:, expert]
        found = found * (probability / probability.mean().clamp(min=1e-20))[:, None]
    return found
