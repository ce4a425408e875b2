"""The locality band: of the homes whose experts suit a request about equally well, the one with the least to do. Pure.

With `tau` 0 the best match alone decides; with `tau` 1 load alone, since cosines of signatures lie in [0, 1].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.routing.base import HomeLoad, Question, pressure

TAU = 0.1
TRANSFER_UNIT_S = 0.1
"""Waiting so long for KV weighs as much as one more running request."""


@dataclass(frozen=True)
class BandRule:
    """What a decision weighs. `PAPER` leaves out all that the paper does not have.

    tau             how far below the best match a home may lie, in units of cosine
    min_candidates  a band of fewer homes takes in the next best ones
    uses_speed      pressure is divided by a home's speed, and waiting requests count fourfold; else requests are counted
    uses_transfer   the time to move KV there counts as pressure
    """

    tau: float = TAU
    min_candidates: int = 1
    uses_speed: bool = True
    uses_transfer: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau is {self.tau}; allowed is 0 (best match alone) to 1 (load alone)")
        if self.min_candidates < 1:
            raise ValueError(f"min_candidates is {self.min_candidates}; allowed is at least 1")


PAPER = BandRule(uses_speed=False, uses_transfer=False)


def band(scores: np.ndarray, rule: BandRule) -> NDArray[np.intp]:
    """Places of the homes near enough to the best, ascending. scores [H], not empty."""
    inside = scores >= scores.max() - rule.tau
    if inside.sum() < rule.min_candidates:
        inside[np.argsort(-scores, kind="stable")[: rule.min_candidates]] = True
    return np.flatnonzero(inside)


def cost(load: HomeLoad, rule: BandRule) -> float:
    """What sending one more request there costs, in running requests."""
    weighed = pressure(load) if rule.uses_speed else float(load.in_flight)
    return weighed + (load.transfer_s / TRANSFER_UNIT_S if rule.uses_transfer else 0.0)


def choose_in_band(scores: np.ndarray, loads: Sequence[HomeLoad], rule: BandRule) -> int:
    """The place of the cheapest home in the band; the first of equals."""
    return int(min(band(scores, rule), key=lambda place: cost(loads[place], rule)))


class LocalityBand:
    """A router over fitted centroids. centroids [C, dim] float32; `home_of` names the home of each.

    A home without a centroid of its own (it came after the fit) scores 0, as does every home for a signature of zeros:
    then the band is everybody, and load decides.
    """

    needs_signature = True

    def __init__(self, centroids: np.ndarray, home_of: Sequence[str], rule: BandRule | None = None) -> None:
        if len(centroids) != len(home_of):
            raise ValueError(f"{len(centroids)} centroids for {len(home_of)} homes")
        self.centroids = np.ascontiguousarray(centroids, dtype=np.float32)
        self.home_of = tuple(home_of)
        self.rule = rule or BandRule()
        self._row_of = {node: row for row, node in enumerate(self.home_of)}

    def scores(self, signature: np.ndarray | None, loads: Sequence[HomeLoad]) -> np.ndarray:
        """Cosine of the signature with each home's centroid, [H] float32."""
        found = np.zeros(len(loads), dtype=np.float32)
        if signature is None or not len(self.centroids):
            return found
        by_row = self.centroids @ signature
        for place, load in enumerate(loads):
            row = self._row_of.get(load.node)
            if row is not None:
                found[place] = by_row[row]
        return found

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        return choose_in_band(self.scores(question.signature, loads), loads, self.rule)
