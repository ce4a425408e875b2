"""What calibration learned for routing, and the locality band that follows from it for the homes there are. Pure.

A fit holds the signatures it was made from, so that another number of homes gets clusters of its own in seconds,
without a model. N requests, L MoE layers, E experts, H homes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.errors import ArtifactError
from edge_runtime.routing.clusters import (
    Clusters,
    Labels,
    assign_to_homes,
    demand_by_cluster,
    fit_clusters,
    refuse_useless,
)
from edge_runtime.routing.locality_band import BandRule, LocalityBand
from edge_runtime.routing.signature import Floats, SignatureRule, unit_rows

SECTION = "signature_fit"


@dataclass(frozen=True)
class SignatureFit:
    """One calibrated model.

    rule           how counts become signatures
    signatures     [N, dim] float32 of the calibration requests
    decode_counts  [N, L, E] what their answers used; None if it was not kept
    fitted         clusters of these signatures
    """

    rule: SignatureRule
    signatures: Floats
    decode_counts: np.ndarray | None
    fitted: Clusters

    @property
    def num_clusters(self) -> int:
        return len(self.fitted.centroids)

    def clusters_for(self, num_homes: int) -> Clusters:
        """One cluster per home: those that were fitted if their number is right, else new ones."""
        if num_homes == self.num_clusters:
            return self.fitted
        return fit_clusters(self.signatures, num_homes)

    def demand(self, clusters: Clusters) -> Floats | None:
        """[C, L, E], each expert's share of a layer's choices in the answers of each cluster; None if not kept."""
        if self.decode_counts is None:
            return None
        return demand_by_cluster(self.decode_counts, clusters.labels, len(clusters.centroids))

    def assign(self, centroids: Floats, resident: np.ndarray | None) -> Labels | None:
        """The cluster of each home for centroids [H, dim] that were found since, by what their like used in calibration.

        resident  [H, L, E] whether each home holds each expert. None where it is not known, all hold all, or no use was kept
        """
        if resident is None or self.decode_counts is None or resident.all():
            return None
        labels = (self.signatures @ centroids.T).argmax(axis=1)
        return assign_to_homes(demand_by_cluster(self.decode_counts, labels, len(centroids)), resident)


def band_for(
    fit: SignatureFit,
    homes: Sequence[str],
    rule: BandRule,
    *,
    clusters: Clusters | None = None,
    resident: np.ndarray | None = None,
) -> LocalityBand:
    """The router over these homes.

    clusters  one for each home; None: those that `fit` has or makes for so many
    resident  [H, L, E] whether each home holds each expert: home k gets the cluster whose experts it holds most of. None:
              cluster k
    """
    clusters = clusters or fit.clusters_for(len(homes))
    demand = fit.demand(clusters)
    order: Labels = np.arange(len(homes))
    if resident is not None and demand is not None and not resident.all():
        order = assign_to_homes(demand, resident)
    return LocalityBand(clusters.centroids[order], homes, rule)


def read_fit(
    tensors: Mapping[str, np.ndarray],
    meta: Mapping[str, Any],
    *,
    layers: int,
    experts: int,
    decode_counts: np.ndarray | None = None,
) -> SignatureFit:
    """A fit from its section's tensors; ArtifactError if they are not those of a model of so many layers and experts.

    idf            [L, E] float32
    layer_mask     [S] int32, places among the MoE layers
    signatures     [N, dim] float16 or float32
    centroids      [C, dim] float32
    labels         [N] whole numbers
    requests       [N], which of the calibration requests these are

    decode_counts  [M, L, E] of all calibration requests, where they were kept
    """
    missing = {"idf", "layer_mask", "signatures", "centroids", "labels", "requests"} - set(tensors)
    if missing:
        raise ArtifactError(
            f"section {SECTION} lacks {', '.join(sorted(missing))}; run `edge-runtime calibrate` again"
        )
    for name in ("layer_mask", "labels", "requests"):
        if tensors[name].dtype.kind not in "iu" or tensors[name].ndim != 1:
            raise _unfit(f"{name} is {_shape_of(tensors[name])}, expected a row of whole numbers")
    for name in ("idf", "signatures", "centroids"):
        if tensors[name].dtype.kind != "f" or tensors[name].ndim != 2:
            raise _unfit(f"{name} is {_shape_of(tensors[name])}, expected a table of floating-point numbers")
        if not np.isfinite(tensors[name]).all():
            raise _unfit(f"{name} has numbers that are not finite")
    idf = np.asarray(tensors["idf"], dtype=np.float32)
    if idf.shape != (layers, experts):
        raise ArtifactError(
            f"section {SECTION} was fitted for {list(idf.shape)} MoE layers and experts, this model has "
            f"[{layers}, {experts}]; run `edge-runtime calibrate` on this model"
        )
    if idf.min() < 0:
        raise _unfit(f"idf has a {idf.min():g}, expected at least 0")
    try:
        rule = SignatureRule(tuple(int(layer) for layer in tensors["layer_mask"]), idf)
    except ValueError as error:
        raise _unfit(str(error)) from error
    if not idf[list(rule.layers)].any():
        raise _unfit("idf is 0 in every layer that counts, so no choice of an expert says anything")
    signatures = unit_rows(tensors["signatures"])
    centroids = np.asarray(tensors["centroids"], dtype=np.float32)
    labels = np.asarray(tensors["labels"], dtype=np.intp)
    requests = np.asarray(tensors["requests"], dtype=np.intp)
    counts = None
    if decode_counts is not None:
        if len(requests) and not 0 <= requests.min() <= requests.max() < len(decode_counts):
            raise _unfit(f"requests {requests.min()} to {requests.max()} are named of {len(decode_counts)}")
        counts = decode_counts[requests]
    shapes = {
        "signatures": (signatures.shape, (len(labels), rule.dim)),
        "requests": (requests.shape, (len(labels),)),
        "centroids": (centroids.shape, (len(centroids), rule.dim)),
        "decode_counts": (counts.shape if counts is not None else (), (len(labels), layers, experts)),
    }
    for name, (found, expected) in shapes.items():
        if found != expected and not (name == "decode_counts" and counts is None):
            raise _unfit(f"{name} is {list(found)}, expected {list(expected)}")
    if counts is not None and (counts.dtype.kind not in "iu" or counts.min(initial=0) < 0):
        raise _unfit(f"decode_counts has a {counts.min():g}, expected whole numbers of at least 0")
    if not len(centroids) or not (0 <= labels.min(initial=0) <= labels.max(initial=0) < len(centroids)):
        raise _unfit(f"labels outside its {len(centroids)} clusters")
    if not centroids.any(axis=1).all():
        raise _unfit(f"centroids is 0 in row {int(centroids.any(axis=1).argmin())}")
    refuse_useless(signatures, len(centroids))
    rounds = meta.get("rounds", 0)
    fitted = Clusters(unit_rows(centroids), labels, rounds if type(rounds) is int else 0)
    return SignatureFit(rule, signatures, counts, fitted)


def _unfit(why: str) -> ArtifactError:
    return ArtifactError(f"section {SECTION}: {why}; run `edge-runtime calibrate` again")


def _shape_of(found: np.ndarray) -> str:
    return f"{found.dtype} {list(found.shape)}"
