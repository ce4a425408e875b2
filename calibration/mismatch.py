"""Measures how far off an expert's stand-in is: the outputs of all experts for rows that were routed to one.

Being wanted by the same tokens does not make two experts give the same; this is what they give. One unit is one routed
layer. Knows the rows that the observation kept, and the model's experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from calibration.exact_model import ExactModel
from calibration.observe import Observation
from kernels import ops

CHUNK_BYTES = 64 << 20
HALF_MAX = 65504.0
"""The artifact keeps tables of deviations as float16."""


class Mismatch:
    """A Pass over the routed layers.

    scale      [L] float32, mean length of the weighted sum that a row gets from the layer's experts
    deviation  [L, E, E] float32, mean length of E_i(x) - E_j(x) over rows x routed to i, by scale; 0 where j is i
    norm       [L, E] float32, mean length of E_i(x) over those rows, by scale: the deviation of leaving i out
    rows       [L, E] int32, rows behind them

    An expert without rows gets the mean deviation of its layer, in its row.
    """

    name = "mismatch"

    def __init__(self, model: ExactModel, observation: Observation) -> None:
        self._model, self._observation = model, observation
        L, E = len(model.moe_layers), model.num_experts
        self.scale = torch.zeros(L)
        self.deviation = torch.zeros(L, E, E)
        self.norm = torch.zeros(L, E)
        self.rows = torch.zeros(L, E, dtype=torch.int32)

    @property
    def num_units(self) -> int:
        return len(self._model.moe_layers)

    def run(self, unit: int) -> None:
        """See Pass: one layer."""
        sample = self._observation.sample(unit)
        x, ids, weights = sample.x.float(), sample.expert_ids.long(), sample.gate_weights
        if not len(x):
            return
        E, K = self._model.num_experts, ids.shape[1]
        deviation, norm = torch.zeros(E, E, dtype=torch.float64), torch.zeros(E, dtype=torch.float64)
        length = 0.0
        chunk = max(1, CHUNK_BYTES // (4 * self._model.spec.width * E * K))
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            outputs = self._outputs(unit, x[part])
            own = outputs.gather(1, ids[part, :, None].expand(-1, -1, outputs.shape[2]))
            distance = torch.cdist(own, outputs, compute_mode="donot_use_mm_for_euclid_dist").double()
            deviation.index_add_(0, ids[part].reshape(-1), distance.view(-1, E))
            norm.index_add_(0, ids[part].reshape(-1), own.norm(dim=2).double().view(-1))
            length += float((weights[part, :, None] * own).sum(1).norm(dim=1).double().sum())
        rows = torch.bincount(ids.view(-1), minlength=E)
        scale = max(length / len(x), torch.finfo(torch.float32).tiny)
        found = deviation / rows.clamp_min(1)[:, None] / scale
        known = rows > 0
        others = found[known].sum() / max(int(known.sum()) * (E - 1), 1)
        found[~known] = others
        found.fill_diagonal_(0.0)
        norm = norm / rows.clamp_min(1) / scale
        norm[~known] = norm[known].mean()
        self.scale[unit] = scale
        self.deviation[unit], self.norm[unit], self.rows[unit] = found.float(), norm.float(), rows.int()

    def _outputs(self, unit: int, x: Tensor) -> Tensor:
        """What every expert of a routed layer gives for x [S, D]: [S, E, D]."""
        bank = self._model.store.bank(self._model.moe_layers[unit])
        assert bank is not None, "all experts are here"
        E = self._model.num_experts
        rows = torch.arange(len(x), dtype=torch.int32).repeat_interleave(E)
        ids = torch.arange(E, dtype=torch.int32).repeat(len(x))
        return ops.grouped_ffn(x.contiguous(), rows, ids, bank).view(len(x), E, -1)

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {"scale": self.scale, "deviation": self.deviation, "norm": self.norm, "rows": self.rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.scale, self.deviation = state["scale"], state["deviation"]
        self.norm, self.rows = state["norm"], state["rows"]
