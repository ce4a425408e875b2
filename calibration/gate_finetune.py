"""Trains the rows of the linear gate, and nothing else: experts and trunk are frozen.

Cross-entropy of the text plus the divergence from the full model's own answer, at a K that rises from a quarter of the
full tier to the full one over the run. One unit is one optimiser step on a few windows.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from calibration.linear_gate import Rows, expanded, linear_route
from calibration.passes import generator
from calibration.plain_model import PlainModel

BETAS, WARM_UP = (0.9, 0.95), 0.03
FIRST_SHARE = 0.25  # of the full tier, where K begins


class TuneSettings(NamedTuple):
    """How the gate is trained."""

    steps: int = 200
    batch: int = 4
    """Windows of a step."""
    learning_rate: float = 1e-3
    """The published run takes 1e-5 over 3,000 steps of 64 sequences of a large model; a short run needs more."""
    divergence: float = 1.0
    """Weight of the divergence from the full model."""
    seed: int = 1


class TuneGate:
    """A Pass of optimiser steps. Changes `model.gates`, which it expands, and returns with `gates`.

    windows  [n, S] int64
    losses   of every step, so far: cross-entropy and divergence
    """

    name = "tune"

    def __init__(self, model: PlainModel, num_parts: int, windows: Tensor, settings: TuneSettings) -> None:
        self.model, self.num_parts = model, num_parts
        self.losses: list[tuple[float, float]] = []
        self._settings, self._windows = settings, windows
        self._native = dict(model.gates)
        self.gates: dict[int, Rows] = {
            layer: _trainable(expanded(gate, num_parts)) for layer, gate in self._native.items()
        }
        self._names = [
            (f"{layer}.{name}", part)
            for layer, gate in self.gates.items()
            for name, part in zip(("weight", "bias"), gate, strict=True)
            if part is not None
        ]
        self._optimiser = torch.optim.AdamW(
            [part for _, part in self._names], lr=settings.learning_rate, betas=BETAS, weight_decay=0.0
        )

    @property
    def num_units(self) -> int:
        return self._settings.steps

    @property
    def full_tier(self) -> int:
        """N * k0."""
        return self.num_parts * max(gate.top_k for layer in self.model.spec.layers if (gate := layer.gate))

    def tier(self, unit: int) -> int:
        """K of a step."""
        share = FIRST_SHARE + (1 - FIRST_SHARE) * unit / max(self._settings.steps - 1, 1)
        return max(1, round(share * self.full_tier))

    def run(self, unit: int) -> None:
        """See Pass."""
        settings = self._settings
        drawn = torch.randint(len(self._windows), (settings.batch,), generator=generator(settings.seed, unit))
        tokens = self._windows[drawn]
        model = self.model
        with torch.no_grad():
            model.gates = dict(self._native)
            teacher = functional.log_softmax(model.logits(model.run(tokens)), dim=-1)
        model.gates = dict(self.gates)
        found = model.logits(model.run(tokens, linear_route(model, self.num_parts, self.tier(unit))))
        entropy = functional.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        student = functional.log_softmax(found, dim=-1).flatten(0, 1)
        divergence = functional.kl_div(student, teacher.flatten(0, 1), log_target=True, reduction="batchmean")
        for group in self._optimiser.param_groups:
            group["lr"] = settings.learning_rate * self._schedule(unit)
        self._optimiser.zero_grad()
        (entropy + settings.divergence * divergence).backward()
        self._optimiser.step()
        self.losses.append((float(entropy.detach()), float(divergence.detach())))

    def _schedule(self, unit: int) -> float:
        """Up in a straight line, then down along half a cosine to a tenth."""
        steps = self._settings.steps
        warm = max(1, round(WARM_UP * steps))
        if unit < warm:
            return (unit + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * (unit - warm) / max(steps - warm, 1))

    def state(self) -> dict[str, Tensor]:
        """See Pass: rows, and the optimiser's means and squares."""
        found = {f"rows.{name}": part.detach().clone() for name, part in self._names}
        found["losses"] = torch.tensor(self.losses).view(-1, 2)
        for name, part in self._names:
            for key, value in self._optimiser.state.get(part, {}).items():
                found[f"{key}.{name}"] = torch.as_tensor(value).clone()
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.losses = [(float(a), float(b)) for a, b in state["losses"]]
        with torch.no_grad():
            for name, part in self._names:
                part.copy_(state[f"rows.{name}"])
                kept = {
                    key: state[f"{key}.{name}"].clone()
                    for key in ("step", "exp_avg", "exp_avg_sq")
                    if f"{key}.{name}" in state
                }
                if kept:
                    self._optimiser.state[part] = kept

    def tuned(self) -> dict[int, Rows]:
        """The rows as they are now, without their gradients."""
        return {
            layer: (weight.detach(), None if bias is None else bias.detach())
            for layer, (weight, bias) in self.gates.items()
        }


def _trainable(gate: Rows) -> Rows:
    weight, bias = (None if part is None else part.clone().requires_grad_() for part in gate)
    assert weight is not None, "a gate has a matrix"
    return weight, bias
