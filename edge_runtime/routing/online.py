"""Follow what is asked: clusters made anew from the latest signatures, beginning with those in use. Pure; off by default.

Homes that do not hold all experts get the clusters whose experts they hold; where that makes no difference they keep what they
have become as far as can be, and each gets the new cluster that is nearest to its own.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from edge_runtime.routing.clusters import Labels, fit_clusters
from edge_runtime.routing.locality_band import LocalityBand
from edge_runtime.routing.signature import Floats

WINDOW_S = 5.0
EVERY_S = 2.5
MAX_SIGNATURES = 2048


class SignatureWindow:
    """The signatures of the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Floats]] = deque(maxlen=MAX_SIGNATURES)
        self._began_s: float | None = None
        self._fitted_s = -np.inf

    def see(self, signature: Floats, now: float) -> None:
        """A prompt was computed."""
        if self._began_s is None:
            self._began_s = now
        if signature.any():
            self._seen.append((now, signature))

    def take(self, num_homes: int, now: float) -> Floats | None:
        """Signatures [N, dim] to make clusters of, if it is time: a whole window has passed, and there are enough."""
        while self._seen and self._seen[0][0] < now - WINDOW_S:
            self._seen.popleft()
        is_time = (
            self._began_s is not None and now - self._began_s >= WINDOW_S and now - self._fitted_s >= EVERY_S
        )
        if not is_time or len(self._seen) < num_homes:
            return None
        self._fitted_s = now
        return np.stack([signature for _, signature in self._seen])


def follow(
    band: LocalityBand, signatures: Floats, assign: Callable[[Floats], Labels | None] = lambda centroids: None
) -> LocalityBand:
    """A band over clusters of these signatures.

    assign  the cluster of each home for these centroids by what homes hold; None where that tells nothing: then each home
            gets the one most like its own
    """
    from scipy.optimize import linear_sum_assignment

    found = fit_clusters(signatures, len(band.centroids), start=band.centroids)
    clusters = assign(found.centroids)
    if clusters is None:
        _, clusters = linear_sum_assignment(-(band.centroids @ found.centroids.T))
    return LocalityBand(found.centroids[clusters], band.home_of, band.rule)
