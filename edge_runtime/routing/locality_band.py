"""Send a request where its like are, unless that home has too much to do. Pure but for what a router remembers.

Two rules. The paper's is a band: of the homes that suit a request about equally well, the one with the least to do; with
`tau` 0 the best match alone decides, with `tau` 1 load alone, since cosines of signatures lie in [0, 1]. The other one weighs
both: a match that is better by 1 makes up for half as much pressure again as homes have on average. A band knows no limit to
how unequal loads become, so the slowest answers pay for it. Replayed on the demo model's gates (8 homes, 8 and 12 requests in
each, mixes of tasks and of languages, against shortest queue): band p50 +15 to -2 %, p99 +55 to +73 %; weighed -2.7 to -4.2 %
and -1.7 to +0.8 %.

Homes also move with what they are sent: what a home is compared by is the cluster that calibration gave it and the latest
requests that it got. So when other things are asked than calibration saw, homes find new clusters without a fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.routing.base import HomeLoad, Question, pressure
from edge_runtime.routing.signature import unit_rows

TAU = 0.1  # the paper's
AFFINITY = 0.5
MEMORY = 8.0  # requests after which a home has forgotten all but a third of what it was like
LEANING = 2.0  # for how many requests the fitted cluster counts
TRANSFER_UNIT_S = 0.1
"""Waiting so long for KV weighs as much as one more running request."""


@dataclass(frozen=True)
class BandRule:
    """What a decision weighs. `PAPER` leaves out all that the paper does not have.

    tau             how far below the best match a home may lie, in units of cosine; None: there is no band, all is weighed
    affinity        without a band: what a cosine of 1 makes up for, in mean pressures
    memory          without a band: requests after which a home is known by those and not by the ones before; 0: it stays
                    what calibration said
    min_candidates  a band of fewer homes takes in the next best ones
    uses_speed      pressure is divided by a home's speed, and waiting requests count fourfold; else requests are counted
    uses_transfer   the time to move KV there counts as pressure
    """

    tau: float | None = None
    affinity: float = AFFINITY
    memory: float = MEMORY
    min_candidates: int = 1
    uses_speed: bool = True
    uses_transfer: bool = True

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 <= self.tau <= 1:
            raise ValueError(f"tau is {self.tau}; allowed is 0 (best match alone) to 1 (load alone)")
        if self.affinity < 0 or 0 < self.memory < 1 or self.memory < 0:
            raise ValueError(
                f"affinity is {self.affinity} and memory {self.memory}; allowed are 0 and more, and 0 or at least 1"
            )
        if self.min_candidates < 1:
            raise ValueError(f"min_candidates is {self.min_candidates}; allowed is at least 1")


PAPER = BandRule(tau=TAU, uses_speed=False, uses_transfer=False)


def band(scores: np.ndarray, rule: BandRule) -> NDArray[np.intp]:
    """Places of the homes near enough to the best, ascending. scores [H], not empty."""
    assert rule.tau is not None, "a band is as wide as tau"
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


def choose_weighed(scores: np.ndarray, loads: Sequence[HomeLoad], rule: BandRule) -> int:
    """The place of the home whose cost against the mean one, less what its match is worth, is least; the first of equals.

    A mean below one request counts as one: homes that have nothing to do are not told apart by a fraction of it.
    """
    costs = np.array([cost(load, rule) for load in loads])
    return int((costs / max(float(costs.mean()), 1.0) - rule.affinity * scores).argmin())


class LocalityBand:
    """A router over centroids [C, dim] float32, `fitted` at first; `home_of` names the home of each.

    A home without a centroid of its own (it came after the fit) scores 0, as does every home for a signature of zeros:
    then the band is everybody, and load decides.
    """

    needs_signature = True

    def __init__(self, centroids: np.ndarray, home_of: Sequence[str], rule: BandRule | None = None) -> None:
        if len(centroids) != len(home_of):
            raise ValueError(f"{len(centroids)} centroids for {len(home_of)} homes")
        self.rule = rule or BandRule()
        self.fitted = np.ascontiguousarray(centroids, dtype=np.float32)
        self.centroids = self.fitted.copy()
        self.home_of = tuple(home_of)
        self._sums = LEANING * self.fitted
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
        choose = choose_weighed if self.rule.tau is None else choose_in_band
        return choose(self.scores(question.signature, loads), loads, self.rule)

    def took(self, node: str, signature: np.ndarray | None) -> None:
        """See Router: that home is a little more like this request from now on, and like its fitted cluster again."""
        row = self._row_of.get(node)
        if row is None or signature is None or self.rule.tau is not None or not self.rule.memory:
            return
        fades = 1.0 / self.rule.memory
        self._sums[row] += fades * (LEANING * self.fitted[row] - self._sums[row]) + signature
        self.centroids[row] = unit_rows(self._sums[row : row + 1])[0]
