"""Watches the exact model over all requests and counts: who is chosen, how alike the gates' answers are, what follows what.

One unit is one step of whole requests, every count is a product or a histogram over its rows. What is kept does not grow
with the number of rows: counts, sums, and samples of fixed size. L counts routed layers, in order.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calibration.exact_model import ExactModel, Routed, Step
from calibration.passes import generator, joined
from calibration.requests import CalibrationRequest

LOGIT_ROWS = 512
ROWS_PER_EXPERT = 64
SAMPLE_BYTES = 1 << 30  # rows of all layers that are kept for measuring outputs


class LayerSample(NamedTuple):
    """Rows that one layer's experts read, few of each expert; S rows."""

    x: Tensor  # [S, D] bfloat16
    expert_ids: Tensor  # [S, K] int32
    gate_weights: Tensor  # [S, K] float32


class Observation:
    """A Pass over the requests.

    prefill_counts, decode_counts  [N, L, E] int32, tokens of each request that chose the expert
    weight_sum                     [L, E] float64, gate weight given to it
    raw, centred                   [L, E, E] float64, sums over tokens of products of two experts' logits, the second
                                   after each token's mean over experts is taken away
    followed                       [L - 1, E, E] int64, tokens that chose the column one layer behind the row
    logits                         [L, S, E] float16, of some decoding rows; NaN in a layer that does not see the row
    """

    name = "observe"

    def __init__(
        self,
        model: ExactModel,
        requests: Sequence[CalibrationRequest],
        *,
        seed: int,
        logit_rows: int = LOGIT_ROWS,
        rows_per_expert: int = ROWS_PER_EXPERT,
    ) -> None:
        self._model, self._seed = model, seed
        self._steps = model.batches(requests)
        self.top_k = model.top_k
        N, L, E = len(requests), len(model.moe_layers), model.num_experts
        self._index = {layer: i for i, layer in enumerate(model.moe_layers)}
        self._logit_rows = logit_rows
        most = SAMPLE_BYTES // (max(L, 1) * max(E, 1) * model.spec.width * 2)
        self.rows_per_expert = max(1, min(rows_per_expert, most))
        self.counts = torch.zeros(2, N, L, E, dtype=torch.int32)
        self.weight_sum = torch.zeros(L, E, dtype=torch.float64)
        self.raw = torch.zeros(L, E, E, dtype=torch.float64)
        self.centred = torch.zeros(L, E, E, dtype=torch.float64)
        self.followed = torch.zeros(max(L - 1, 0), E, E, dtype=torch.int64)
        self._logits: list[Tensor] = []
        self._taken = torch.zeros(L, E, dtype=torch.int64)  # rows of each expert in the samples
        self._samples: list[list[LayerSample]] = [[] for _ in range(L)]

    @property
    def num_units(self) -> int:
        return len(self._steps)

    @property
    def prefill_counts(self) -> Tensor:
        return self.counts[0]

    @property
    def decode_counts(self) -> Tensor:
        return self.counts[1]

    @property
    def logits(self) -> Tensor:
        L, _, E = self.raw.shape
        return joined([part.transpose(0, 1) for part in self._logits], torch.empty(1, L, E).half()).transpose(
            0, 1
        )

    def sample(self, index: int) -> LayerSample:
        """The rows kept of routed layer `index`."""
        parts = self._samples[index]
        D, K = self._model.spec.width, self._model.top_k
        return LayerSample(
            joined([part.x for part in parts], torch.empty(1, D, dtype=torch.bfloat16)),
            joined([part.expert_ids for part in parts], torch.empty(1, K, dtype=torch.int32)),
            joined([part.gate_weights for part in parts], torch.empty(1, K)),
        )

    def run(self, unit: int) -> None:
        """See Pass: one step of whole requests."""
        requests = self._steps[unit]
        first = sum(map(len, self._steps[:unit]))
        step = self._model.place(requests)
        draw = generator(self._seed, unit)
        watched = self._rows_to_keep(step, unit, draw)
        L, _, E = self.raw.shape
        kept = torch.full((L, len(watched), E), torch.nan, dtype=torch.float16)
        before: Tensor | None = None
        before_index = -1

        def look(routed: Routed) -> None:
            nonlocal before, before_index
            index = self._index[routed.layer]
            chosen = self._count(index, routed, step, first)
            if before is not None and before_index == index - 1:
                self.followed[index - 1] += (before.T @ chosen).long()
            before, before_index = chosen, index
            self._keep_logits(kept[index], routed, watched)
            self._keep_rows(index, routed, draw)

        self._model.run(step, look)
        self._logits.append(kept)

    def _count(self, index: int, routed: Routed, step: Step, first: int) -> Tensor:
        """Count one layer's choices. Returns [T, E] float32, 1 where a row of the step chose the expert."""
        E = self._model.num_experts
        ids = routed.expert_ids.long()
        here = torch.zeros(len(ids), E).scatter_(1, ids, 1.0)
        self.weight_sum[index] += (
            torch.zeros(len(ids), E).scatter_(1, ids, routed.gate_weights).sum(0).double()
        )
        request, is_decode = step.request, step.is_decode
        if routed.rows is not None:
            request, is_decode = request[routed.rows], is_decode[routed.rows]
        num_requests = int(step.request[-1]) + 1
        key = (is_decode.long() * num_requests + request)[:, None] * E + ids
        found = torch.bincount(key.view(-1), minlength=2 * num_requests * E).view(2, num_requests, E)
        self.counts[:, first : first + num_requests, index] += found.int()
        logits = routed.logits.double()
        self.raw[index] += logits.T @ logits
        logits -= logits.mean(1, keepdim=True)
        self.centred[index] += logits.T @ logits
        if routed.rows is None:
            return here
        return torch.zeros(len(step.token_ids), E).index_copy_(0, routed.rows, here)

    def _rows_to_keep(self, step: Step, unit: int, draw: torch.Generator) -> Tensor:
        """Which rows of a step give their logits: as many of each step, decoding ones if there are."""
        units = self.num_units
        wanted = self._logit_rows * (unit + 1) // units - self._logit_rows * unit // units
        rows = step.is_decode.nonzero().view(-1)
        return rows[torch.randperm(len(rows), generator=draw)[:wanted]]

    def _keep_logits(self, kept: Tensor, routed: Routed, watched: Tensor) -> None:
        if routed.rows is None:
            kept.copy_(routed.logits[watched])
            return
        place = {row: i for i, row in enumerate(routed.rows.tolist())}
        pairs = [(i, place[row]) for i, row in enumerate(watched.tolist()) if row in place]
        if pairs:
            into, of = torch.tensor(pairs).T
            kept[into] = routed.logits[of].half()

    def _keep_rows(self, index: int, routed: Routed, draw: torch.Generator) -> None:
        """Keep rows of experts that have fewer than `rows_per_expert` so far."""
        lacking = self.rows_per_expert - self._taken[index]
        if not (lacking > 0).any() or not len(routed.x):
            return
        order = torch.randperm(len(routed.x), generator=draw)
        ids = routed.expert_ids[order].long()
        flat = ids.view(-1)
        by_expert = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=len(lacking))
        starts = counts.cumsum(0) - counts
        rank = torch.empty_like(flat)
        rank[by_expert] = torch.arange(len(flat)) - starts.repeat_interleave(counts)
        wanted = (rank < lacking[flat]).view(ids.shape).any(1)
        rows = order[wanted]
        self._taken[index] += torch.bincount(ids[wanted].view(-1), minlength=len(lacking))
        self._samples[index].append(
            LayerSample(
                routed.x[rows].bfloat16(), routed.expert_ids[rows].clone(), routed.gate_weights[rows].clone()
            )
        )

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        found = {
            "counts": self.counts,
            "weight_sum": self.weight_sum,
            "raw": self.raw,
            "centred": self.centred,
            "followed": self.followed,
            "taken": self._taken,
            "logits": self.logits.contiguous(),
        }
        for index in range(len(self._samples)):
            found |= {f"{name}.{index}": each for name, each in self.sample(index)._asdict().items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.counts, self.weight_sum = state["counts"], state["weight_sum"]
        self.raw, self.centred = state["raw"], state["centred"]
        self.followed, self._taken = state["followed"], state["taken"]
        self._logits = [state["logits"]]
        self._samples = [
            [LayerSample(*(state[f"{name}.{index}"] for name in LayerSample._fields))]
            for index in range(len(self._samples))
        ]


def cosines(gram: Tensor) -> Tensor:
    """Cosine of every pair from sums of products: [L, E, E]; an expert without any answer is like nobody but itself."""
    norms = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    scale = norms[:, :, None] * norms[:, None, :]
    found = torch.where(scale > 0, gram / scale.clamp_min(1e-300), 0.0).clamp(-1, 1)
    found.diagonal(dim1=1, dim2=2).fill_(1.0)
    return found
