"""Lets the model itself write what the prompts go on with, so that calibration sees what a server would decode.

One unit is one step's requests: their prompts at once, then a token of each at a time, drawn at temperature 1. Ends of
answers are passed over. Knows no text.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from calibration.exact_model import ExactModel, Step
from calibration.passes import generator
from calibration.requests import CalibrationRequest


class Generation:
    """A Pass over the requests. ids [N, n] int32: the tokens that each was given."""

    name = "generate"

    def __init__(
        self, model: ExactModel, requests: Sequence[CalibrationRequest], num_tokens: int, *, seed: int
    ) -> None:
        self._model, self._requests, self._seed = model, requests, seed
        self._steps = model.batches([each._replace(decode_ids=(0,) * num_tokens) for each in requests])
        self.ids = torch.zeros(len(requests), num_tokens, dtype=torch.int32)

    @property
    def num_units(self) -> int:
        return len(self._steps)

    @property
    def requests(self) -> list[CalibrationRequest]:
        """The requests with what was generated in place of the text."""
        return [
            request._replace(decode_ids=tuple(ids))
            for request, ids in zip(self._requests, self.ids.tolist(), strict=True)
        ]

    def run(self, unit: int) -> None:
        """See Pass: one step of whole requests."""
        first = sum(map(len, self._steps[:unit]))
        step, draw = self._model.place(self._steps[unit]), generator(self._seed, unit, 3)
        prompts, *turns = step.turns()
        of = step.request[prompts]
        last = torch.cat([of[1:] != of[:-1], torch.tensor([True])]).nonzero().view(-1)
        following = self._following(step.rows(prompts), last, draw)
        for turn, rows in enumerate(turns):
            self.ids[first : first + len(rows), turn] = following
            if turn + 1 < len(turns):
                part = step.rows(rows)._replace(token_ids=following)
                following = self._following(part, torch.arange(len(rows)), draw)

    def _following(self, step: Step, rows: Tensor, draw: torch.Generator) -> Tensor:
        """[n] int32, a token drawn behind each of some rows of a step."""
        hidden = self._model.run(step, lambda routed: None)
        shares = self._model.logits(hidden, rows).softmax(1)
        return torch.multinomial(shares, 1, generator=draw)[:, 0].int()

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {"ids": self.ids}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.ids = state["ids"]
