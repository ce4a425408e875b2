"""Measures what a wrong expert costs in the end, layer by layer: the model's answer with one slot of a layer replaced.

In one layer at a time every decoding row has its lowest-ranked expert replaced by a random other, then a middle one, then
its highest-ranked one. The loss is the divergence of the next token's distribution from the exact one, which is the rise in
perplexity that a text from the model itself would have, and far steadier than the rise over some text.

One unit is one step of whole requests: an exact run, then for each layer the layers from it on again. Knows the mismatch
table, so that losses are per relative deviation of a layer's output.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calibration.exact_model import ExactModel, Routed, Step
from calibration.mismatch import Mismatch
from calibration.passes import generator
from calibration.requests import CalibrationRequest

LOGIT_BYTES = 64 << 20
DECODE_ROWS = 10_000


def steps_of(
    model: ExactModel, requests: Sequence[CalibrationRequest], decode_rows: int
) -> list[list[CalibrationRequest]]:
    """The first requests, as many as give so many decoding rows, by step."""
    rows, taken = 0, 0
    while taken < len(requests) and rows < decode_rows:
        rows += len(requests[taken].decode_ids)
        taken += 1
    return model.batches(requests[:taken])


def rows_that_answer(model: ExactModel, step: Step, draw: torch.Generator) -> Tensor:
    """Decoding rows whose logits are compared: all, or as many as fit in memory."""
    rows = step.is_decode.nonzero().view(-1)
    most = max(1, LOGIT_BYTES // (4 * model.spec.vocab_size))
    return rows[torch.randperm(len(rows), generator=draw)[:most].sort().values]


class Sensitivity:
    """A Pass over the first requests, as many as give `decode_rows` decoding rows.

    ranks      the slots that are replaced, from the lowest-ranked (K - 1) to the highest (0); R of them
    response   [L, R, 5] float64, sums over rows of: one, relative deviation of the layer's output, its square, loss in
               nats, rise of the text's own loss in nats

    Rows of an encoder's layer are replaced all, since none of them decodes.
    """

    name = "sensitivity"

    def __init__(
        self,
        model: ExactModel,
        requests: Sequence[CalibrationRequest],
        mismatch: Mismatch,
        *,
        seed: int,
        decode_rows: int = DECODE_ROWS,
    ) -> None:
        self._model, self._mismatch, self._seed = model, mismatch, seed
        self._steps = steps_of(model, requests, decode_rows)
        self.ranks = tuple(
            sorted({model.top_k - 1, model.top_k // 2, 0} & set(range(model.top_k)), reverse=True)
        )
        self.response = torch.zeros(len(model.moe_layers), len(self.ranks), 5, dtype=torch.float64)

    @property
    def num_units(self) -> int:
        return len(self._steps)

    @property
    def mean_response(self) -> Tensor:
        """[L, R, 4] float32: means of the columns behind the first."""
        return (self.response[..., 1:] / self.response[..., :1].clamp_min(1)).float()

    @property
    def loss_per_deviation(self) -> Tensor:
        """[L] float32: nats for each relative deviation, where the deviation is small (the lowest-ranked slot)."""
        deviation, _, loss, _ = self.mean_response[:, 0].T
        return loss / deviation.clamp_min(1e-12)

    @property
    def loss_per_square(self) -> Tensor:
        """[L, R] float32: nats for each squared relative deviation, rank by rank."""
        _, square, loss, _ = self.mean_response.unbind(-1)
        return loss / square.clamp_min(1e-12)

    def run(self, unit: int) -> None:
        """See Pass: one step of whole requests."""
        model, draw = self._model, generator(self._seed, unit, 7)
        step = model.place(self._steps[unit])
        before = dict.fromkeys(model.moe_layers)  # the residual in front of each routed layer
        hidden = model.run(step, lambda routed: None, saved=before)
        rows = rows_that_answer(model, step, draw)
        exact = model.logits(hidden, rows).log_softmax(1)
        for index, layer in enumerate(model.moe_layers):
            for kind, rank in enumerate(self.ranks):
                swap = _Swap(
                    layer, rank, step.is_decode, model.num_experts, self._mismatch.deviation[index], draw
                )
                start = before[layer]
                assert start is not None, "the exact run passes every layer"
                hidden = model.run(step, swap.choose, first_layer=layer, hidden=start.clone())
                found = model.logits(hidden, rows).log_softmax(1)
                loss = (exact.exp() * (exact - found)).sum(1).mean()
                follows = step.next_ids[rows]
                said = follows >= 0
                text = (exact - found)[said].gather(1, follows[said, None]).mean()
                self.response[index, kind] += swap.rows * torch.tensor(
                    [1.0, swap.deviation, swap.square, float(loss), float(text)], dtype=torch.float64
                )

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {"response": self.response}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.response = state["response"]


class _Swap:
    """Replaces the expert of one rank in one layer by a random other that the row has not chosen."""

    def __init__(
        self,
        layer: int,
        rank: int,
        is_decode: Tensor,
        num_experts: int,
        deviation: Tensor,
        draw: torch.Generator,
    ) -> None:
        self._layer, self._rank, self._is_decode = layer, rank, is_decode
        self._num_experts, self._deviation, self._draw = num_experts, deviation, draw
        self.rows = 0
        self.deviation = self.square = 0.0

    def choose(self, routed: Routed) -> tuple[Tensor, Tensor] | None:
        ids = routed.expert_ids.long()
        if routed.layer != self._layer or ids.shape[1] == self._num_experts or not len(ids):
            return None
        is_mine = self._is_decode if routed.rows is None else self._is_decode[routed.rows]
        mine = (is_mine if is_mine.any() else torch.ones_like(is_mine)).nonzero().view(-1)
        score = torch.rand(len(mine), self._num_experts, generator=self._draw).scatter_(1, ids[mine], -1.0)
        other = score.argmax(1)
        own, weight = ids[mine, self._rank], routed.gate_weights[mine, self._rank]
        self.rows = len(mine)
        deviation = weight * self._deviation[own, other]
        self.deviation, self.square = float(deviation.mean()), float(deviation.square().mean())
        changed = routed.expert_ids.clone()
        changed[mine, self._rank] = other.int()
        return changed, routed.gate_weights
