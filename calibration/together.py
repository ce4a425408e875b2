"""Measures what several stand-ins cost at once, and what outputs cost that are added one layer late: the model's answer as a
home without half of the experts has it.

A loss grows with the square of an output's deviation. Slots of one layer deviate the same way, so their deviations are
added up before they are squared; those of different layers do so in part. A row that deviates by a_l in layer l loses

    alone * sum of a_l * a_l  +  together * ((sum of a_l) ** 2 - sum of a_l * a_l)

with a_l * a_l as section sensitivity foretells it, and this finds the two factors out. They stand for all that one slot
alone does not show: that heavy slots cost more than squares say, and that rows before have left wrong keys and values.
What is late costs a row squares of each layer's, and layers add up (measured: sum and whole agree within 5 %).

One unit is one step of whole requests. Knows the selector's rule for who stands in, and the tables that it reads.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from calibration.exact_model import Choice, ExactModel, Look, Routed, Step
from calibration.mismatch import HALF_MAX, Mismatch
from calibration.passes import generator
from calibration.requests import CalibrationRequest
from calibration.sensitivity import Sensitivity, rows_that_answer, steps_of
from edge_runtime.selector.candidates import HERE, LayerView, layer_view
from edge_runtime.selector.choose import live_stand_ins
from edge_runtime.selector.learned import nearest

SHARES = (0.03, 0.1, 0.3, 1.0)
"""Of the rows and layers that could use stand-ins, how many do."""
DECODE_ROWS = 10_000


class Together:
    """A Pass over the first requests, as many as give `decode_rows` decoding rows.

    response   [P, 4] float64, for each of `SHARES` sums over rows of: one, sum of a_l * a_l, what is beyond that if all
               layers deviate the same way, loss in nats
    late       [L, 3] float64, sums over rows of: one, squared relative deviation of a layer's output without what is late,
               loss in nats
    """

    name = "together"

    def __init__(
        self,
        model: ExactModel,
        requests: Sequence[CalibrationRequest],
        mismatch: Mismatch,
        sensitivity: Sensitivity,
        *,
        seed: int,
        decode_rows: int = DECODE_ROWS,
    ) -> None:
        self._model, self._seed = model, seed
        self._steps = steps_of(model, requests, decode_rows)
        per_square = sensitivity.loss_per_square[:, 0].clamp_min(0.0).numpy()
        deviation, norm = (  # as the artifact keeps them, and a selector reads them
            each.clamp_max(HALF_MAX).half().float().numpy() for each in (mismatch.deviation, mismatch.norm)
        )
        self._loss = per_square[:, None, None] * np.maximum(deviation, 0.0) ** 2
        self._near, self._norm = nearest(self._loss), norm
        self.response = torch.zeros(len(SHARES), 4, dtype=torch.float64)
        self.late = torch.zeros(len(model.moe_layers), 3, dtype=torch.float64)

    @property
    def num_units(self) -> int:
        return len(self._steps)

    @property
    def factors(self) -> tuple[float, float]:
        """`alone` and `together` of the formula above: none below 0, least squared relative error over the shares."""
        return fit(self.response[:, 1:] / self.response[:, :1].clamp_min(1))

    @property
    def loss_per_late_square(self) -> Tensor:
        """[L] float32: nats for each squared relative deviation of what comes late; 0 where nothing may."""
        return (self.late[:, 2] / self.late[:, 1].clamp_min(1e-12)).float()

    def run(self, unit: int) -> None:
        """See Pass: one step of whole requests."""
        model, draw = self._model, generator(self._seed, unit, 11)
        step = model.place(self._steps[unit])
        hidden = model.run(step, lambda routed: None)
        rows = rows_that_answer(model, step, draw)
        exact = model.logits(hidden, rows).log_softmax(1)
        is_here = [
            torch.rand(model.num_experts, generator=draw).argsort().argsort() for _ in model.moe_layers
        ]
        away = [(order >= len(order) // 2).numpy() for order in is_here]

        def loss(look: Look) -> float:
            found = model.logits(model.run(step, look), rows).log_softmax(1)
            return float((exact.exp() * (exact - found)).sum(1).mean())

        def book(table: Tensor, *means: float) -> None:
            table += len(rows) * torch.tensor([1.0, *means], dtype=torch.float64)

        for at, share in enumerate(SHARES):
            views = [self._view(index, each) for index, each in enumerate(away)]
            work = _StandIns(views, model.moe_layers, step, share, draw)
            cost = loss(work.choose)
            of_row = work.deviation[rows.numpy()]
            alone = (of_row**2).sum(axis=1)
            book(self.response[at], alone.mean(), (of_row.sum(axis=1) ** 2 - alone).mean(), cost)
        for index, layer in enumerate(model.moe_layers):
            if model.may_be_late(layer):
                late = _Late(layer, away[index], self._norm[index], step)
                cost = loss(late.choose)
                book(self.late[index], (late.deviation[rows.numpy()] ** 2).mean(), cost)

    def _view(self, index: int, is_away: np.ndarray) -> LayerView:
        hosts = is_away.astype(np.int32)  # whoever has them
        return layer_view(hosts, self._near[index], self._loss[index], power=2.0)

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {"response": self.response, "late": self.late}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.response, self.late = state["response"], state["late"]


class _StandIns:
    """Serves all that is elsewhere of a share of rows and layers by stand-ins.

    deviation  [T, L] of each row in each layer
    """

    def __init__(
        self,
        views: Sequence[LayerView],
        layers: Sequence[int],
        step: Step,
        share: float,
        draw: torch.Generator,
    ) -> None:
        self._views = {layer: (index, views[index]) for index, layer in enumerate(layers)}
        self._step, self._share, self._draw = step, share, draw
        self.deviation = np.zeros((len(step.token_ids), len(layers)))

    def choose(self, routed: Routed) -> Choice:
        index, view = self._views[routed.layer]
        at, ids = _rows_of(routed), routed.expert_ids.numpy()
        is_away = (view.host_of[ids] != HERE) & self._step.is_decode.numpy()[at][:, None]
        is_away &= (torch.rand(len(ids), generator=self._draw) < self._share).numpy()[:, None]
        rows, columns = np.nonzero(is_away)
        if not len(rows):
            return None
        experts = ids[rows, columns]
        stand_in = live_stand_ins(view, ids, routed.logits.numpy(), rows, experts)
        has = stand_in >= 0
        all_have = np.bincount(rows, weights=~has, minlength=len(ids)) == 0
        done = all_have[rows]
        rows, columns, experts, stand_in = rows[done], columns[done], experts[done], stand_in[done]
        weights = routed.gate_weights.numpy()[rows, columns]
        np.add.at(self.deviation[:, index], at[rows], view.root[experts, stand_in] * weights)
        changed = routed.expert_ids.clone()
        changed[torch.from_numpy(rows), torch.from_numpy(columns)] = torch.from_numpy(stand_in).int()
        return changed, routed.gate_weights


class _Late:
    """Lets all that is elsewhere in one layer come late. norm [E]; deviation [T] relative, of each row."""

    def __init__(self, layer: int, is_away: np.ndarray, norm: np.ndarray, step: Step) -> None:
        self._layer, self._is_away, self._norm, self._step = layer, is_away, norm, step
        self.deviation = np.zeros(len(step.token_ids))

    def choose(self, routed: Routed) -> Choice:
        if routed.layer != self._layer:
            return None
        at, ids = _rows_of(routed), routed.expert_ids.numpy()
        late = self._is_away[ids] & self._step.is_decode.numpy()[at][:, None]
        self.deviation[at] = np.where(late, routed.gate_weights.numpy() * self._norm[ids], 0.0).sum(axis=1)
        return routed.expert_ids, routed.gate_weights, torch.from_numpy(late)


def _rows_of(routed: Routed) -> np.ndarray:
    return np.arange(len(routed.expert_ids)) if routed.rows is None else routed.rows.numpy()


def fit(means: Tensor) -> tuple[float, float]:
    """The two factors, from means [P, 3] of: sums of squares, what is beyond them, loss."""
    known = means[(means[:, 2] > 0) & (means[:, 0] > 0)].double()
    if not len(known):
        return 1.0, 1.0
    table = known[:, :2] / known[:, 2:]
    square, sums = table.T @ table, table.sum(0)
    if float(torch.linalg.det(square)) > 1e-9 * float(square.diagonal().prod()):
        alone, together = torch.linalg.solve(square, sums).tolist()
        if alone > 0 and together >= 0:
            return alone, together
    return float(1 / table[:, 0].min()), 0.0  # never too little, where the formula does not fit
