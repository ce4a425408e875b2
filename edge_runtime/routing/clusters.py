"""Group signatures into as many clusters as there are homes, of nearly equal size, and give each home one. Pure.

Here and not in calibration, since a coordinator fits anew, from stored signatures, when its homes change.
N signatures, C clusters, H homes.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import ArtifactError
from edge_runtime.routing.signature import Floats, unit_rows

ROUNDS = 50
SEED = 1

Labels = NDArray[np.intp]


class Clusters(NamedTuple):
    """centroids [C, dim] float32 of unit length; labels [N], the cluster of each signature; rounds until it stood still."""

    centroids: Floats
    labels: Labels
    rounds: int


def fit_clusters(
    signatures: np.ndarray,
    num_clusters: int,
    *,
    seed: int = SEED,
    equal_sizes: bool = True,
    start: Floats | None = None,
) -> Clusters:
    """Spherical k-means. Equal sizes: no cluster has more than ceil(N / C) members, by an optimal assignment each round.

    signatures  [N, dim], each of unit length
    start       [C, dim] centroids to begin with; None draws them

    Raises ArtifactError for signatures that tell nothing: too few, all 0, or all alike.
    """
    X = np.ascontiguousarray(signatures, dtype=np.float32)
    refuse_useless(X, num_clusters)
    centroids = _spread_seeds(X, num_clusters, np.random.default_rng(seed)) if start is None else start
    labels = np.zeros(len(X), dtype=np.intp)
    rounds, stands = 0, False
    while rounds < ROUNDS and not stands:
        rounds += 1
        labels = _assign_equally(X, centroids) if equal_sizes else (X @ centroids.T).argmax(axis=1)
        moved = _means(X, labels, centroids)
        stands = np.allclose(moved, centroids)
        centroids = moved
    return Clusters(centroids, labels, rounds)


def refuse_useless(signatures: np.ndarray, num_clusters: int) -> None:
    """Raise ArtifactError unless these signatures can be grouped into so many clusters."""
    N = len(signatures)
    if num_clusters < 1 or N < num_clusters:
        raise ArtifactError(
            f"{N} calibration signatures cannot make {num_clusters} clusters; calibrate with at least {num_clusters} requests"
        )
    if not np.isfinite(signatures).all():
        raise ArtifactError("a calibration signature is not finite; calibrate again")
    empty = np.flatnonzero(~signatures.any(axis=1))
    if len(empty):
        raise ArtifactError(
            f"{len(empty)} of {N} calibration signatures are empty (the first is number {empty[0]}): these requests "
            "used only experts that all requests use; calibrate with longer or more varied prompts"
        )
    if num_clusters > 1 and np.allclose(signatures, signatures[0], atol=1e-6):
        raise ArtifactError(
            f"all {N} calibration signatures are the same, so they tell no homes apart; calibrate with more varied prompts"
        )


def demand_by_cluster(decode_counts: np.ndarray, labels: Labels, num_clusters: int) -> Floats:
    """How often a decoded token of each cluster uses each expert: counts [N, L, E] -> [C, L, E], each layer's sum 1."""
    demand = np.zeros((num_clusters, *decode_counts.shape[1:]), dtype=np.float64)
    np.add.at(demand, labels, decode_counts)
    return (demand / np.maximum(demand.sum(axis=2, keepdims=True), 1.0)).astype(np.float32)


def assign_to_homes(demand: np.ndarray, resident: np.ndarray) -> Labels:
    """The cluster of each home, so that homes hold as much as can be of what their clusters use.

    demand    [C, L, E] share of a layer's choices; C = H
    resident  [H, L, E] whether the home holds the expert
    """
    from scipy.optimize import linear_sum_assignment

    C, H = len(demand), len(resident)
    if C != H:
        raise ValueError(f"{C} clusters for {H} homes")
    local = resident.reshape(H, -1).astype(np.float64) @ demand.reshape(C, -1).T
    _, clusters = linear_sum_assignment(-np.round(local, 9))
    return clusters


def _assign_equally(X: Floats, centroids: Floats) -> Labels:
    """The assignment of least total distance in which no cluster has more than ceil(N / C) members."""
    from scipy.optimize import linear_sum_assignment  # here: it costs a coordinator 30 MB until it fits

    N, C = len(X), len(centroids)
    room = -(-N // C)
    distance = 1.0 - X @ centroids.T
    rows, seats = linear_sum_assignment(np.repeat(distance, room, axis=1))
    labels = np.empty(N, dtype=np.intp)
    labels[rows] = seats // room
    return labels


def _means(X: Floats, labels: Labels, centroids: Floats) -> Floats:
    """Unit means of the members; a cluster without members keeps its centroid."""
    sums = np.zeros_like(centroids)
    np.add.at(sums, labels, X)
    found = unit_rows(sums)
    empty = ~sums.any(axis=1)
    found[empty] = centroids[empty]
    return found


def _spread_seeds(X: Floats, num_clusters: int, rng: np.random.Generator) -> Floats:
    """k-means++: each seed is drawn in proportion to its squared distance to the nearest one so far."""
    chosen = [int(rng.integers(len(X)))]
    nearest = np.full(len(X), np.inf)
    while len(chosen) < num_clusters:
        last = X[chosen[-1]]
        nearest = np.minimum(nearest, np.maximum(2.0 - 2.0 * (X @ last).astype(np.float64), 0.0))
        total = nearest.sum()
        if total > 0:
            chosen.append(int(rng.choice(len(X), p=nearest / total)))
        else:  # only copies of the seeds are left
            chosen.append(int(rng.integers(len(X))))
    return X[chosen].copy()
