"""Fit how prompts are told apart by their experts: weights, layers that count, clusters. For ELDR's routing.

Works on the counts that one pass over the calibration requests recorded; knows no model. The clusters themselves are
made by `edge_runtime.routing.clusters`, which a coordinator runs again when its homes change.
N requests, L MoE layers, E experts.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.errors import ArtifactError
from edge_runtime.routing.clusters import fit_clusters, refuse_useless
from edge_runtime.routing.fit import SECTION
from edge_runtime.routing.signature import LEAST_NORM, Floats, SignatureRule, idf_weights, unit_rows

NUM_PAIRS = 30_000
SEED = 1
MAX_AT_ONCE = 4096  # requests whose products with each other are all made: 64 MB
VARIANTS = ("count_idf", "count", "sqrt", "binary", "probability")
"""What of a prompt's choices a signature can be made of; the first is the one in use."""

Doubles = NDArray[np.float64]


class LayerMask(NamedTuple):
    """Which layers count, in the order of the model, and how well signatures tell answers apart.

    curve      rho of the first 1, 2, ... layers that the search took
    all_layers rho with every layer
    """

    layers: tuple[int, ...]
    curve: tuple[float, ...]

    @property
    def rho(self) -> float:
        return max(self.curve)

    @property
    def all_layers(self) -> float:
        return self.curve[-1]


def fit_section(
    prefill_counts: np.ndarray, decode_counts: np.ndarray, num_homes: int, *, equal_sizes: bool = True
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and meta of section `signature_fit`, see `edge_runtime.routing.fit.read_fit`.

    prefill_counts, decode_counts  [N, L, E] of the calibration requests
    """
    refuse_counts(prefill_counts, decode_counts)
    weights = idf_weights(prefill_counts)
    mask = select_layers(prefill_counts * weights, decode_counts)
    rule = SignatureRule(mask.layers, weights)
    signatures = rule.signatures(prefill_counts)
    told = signatures.any(axis=1)  # a request of common choices alone says nothing about clusters
    refuse_useless(signatures[told], num_homes)
    clusters = fit_clusters(signatures[told], num_homes, equal_sizes=equal_sizes)
    tensors: dict[str, np.ndarray] = {
        "idf": weights,
        "layer_mask": np.array(mask.layers, dtype=np.int32),
        "signatures": signatures[told].astype(np.float16),
        "centroids": clusters.centroids,
        "labels": clusters.labels.astype(np.int32),
        "requests": np.flatnonzero(told).astype(np.int32),
    }
    meta: dict[str, Any] = {
        "num_clusters": num_homes,
        "rounds": clusters.rounds,
        "rho": mask.rho,
        "rho_all_layers": mask.all_layers,
        "rho_curve": list(mask.curve),
        "requests": int(told.sum()),
        "requests_without_signature": int((~told).sum()),
    }
    return tensors, meta


def write_fit(folder: str | Path, num_homes: int) -> dict[str, Any]:
    """Fit an artifact's recorded requests and write section `signature_fit` beside them; its meta."""
    artifact = Artifact.open(folder)
    recorded = artifact.tensors("requests")
    counts = [recorded[name].numpy() for name in ("prefill_counts", "decode_counts") if name in recorded]
    if len(counts) != 2:
        raise ArtifactError(
            f"calibration artifact {folder}: section requests lacks prefill_counts or decode_counts; "
            "run `edge-runtime calibrate` again"
        )
    tensors, meta = fit_section(counts[0], counts[1], num_homes)
    held = {name: torch.from_numpy(np.ascontiguousarray(tensor)) for name, tensor in tensors.items()}
    write_section(folder, SECTION, held, meta, model_hash=artifact.model_hash)
    return meta


def refuse_counts(prefill_counts: np.ndarray, decode_counts: np.ndarray) -> None:
    """Raise ArtifactError for counts that no signature can be fitted to."""
    if prefill_counts.shape != decode_counts.shape or prefill_counts.ndim != 3:
        raise ArtifactError(
            f"prefill counts {list(prefill_counts.shape)} and decode counts {list(decode_counts.shape)} are not of the "
            "same requests, layers and experts; calibrate again"
        )
    N, L, E = prefill_counts.shape
    if N < 2 or L < 1 or E < 2:
        raise ArtifactError(
            f"{N} requests of {L} layers with {E} experts tell nothing apart; calibrate with more"
        )
    silent = ~decode_counts.any(axis=(1, 2))
    if silent.all():
        raise ArtifactError(
            "no calibration request has an answer: decode counts are all 0; decode some tokens each"
        )


# Quality of signatures.


def draw_pairs(num_requests: int, *, num_pairs: int = NUM_PAIRS, seed: int = SEED) -> NDArray[np.int64]:
    """[P, 2] pairs of different requests, drawn with replacement; P is a little below `num_pairs`."""
    pairs = np.random.default_rng(seed).integers(0, num_requests, (num_pairs, 2))
    return pairs[pairs[:, 0] != pairs[:, 1]]


def select_layers(weighted: np.ndarray, decode_counts: np.ndarray, *, seed: int = SEED) -> LayerMask:
    """Greedy: always add the layer with which prompts that look alike have answers most alike; stop at the best of all.

    weighted  [N, L, E], what signatures are made of, before the norm

    Answers are compared by all their counts. Dot products and norms of each layer are computed once, so that a trial costs
    a sum and a sort over the pairs.
    """
    N, L, _ = weighted.shape
    pairs = draw_pairs(N, seed=seed)
    if len(pairs) < 3:
        raise ArtifactError(
            f"{N} calibration requests give {len(pairs)} pairs to compare; calibrate with more"
        )
    target = _centred_ranks(answer_distances(decode_counts, pairs))
    dots = np.empty((L, len(pairs)), dtype=np.float32)
    norms = np.empty((L, N), dtype=np.float32)
    for layer in range(L):
        x = np.ascontiguousarray(weighted[:, layer], dtype=np.float32)
        dots[layer] = _pair_dots(x, pairs)
        norms[layer] = np.einsum("ne,ne->n", x, x)
    taken: list[int] = []
    curve: list[float] = []
    dot, norm = np.zeros(len(pairs), dtype=np.float32), np.zeros(N, dtype=np.float32)
    while len(taken) < L:
        best, best_rho = -1, -np.inf
        for layer in sorted(set(range(L)) - set(taken)):
            length = np.maximum(np.sqrt(norm + norms[layer]), LEAST_NORM)
            distance = 1.0 - (dot + dots[layer]) / (length[pairs[:, 0]] * length[pairs[:, 1]])
            rho = _correlation(_centred_ranks(distance), target)
            if rho > best_rho:
                best, best_rho = layer, rho
        taken.append(best)
        curve.append(best_rho)
        dot += dots[best]
        norm += norms[best]
    kept = int(np.argmax(curve)) + 1
    return LayerMask(tuple(sorted(taken[:kept])), tuple(curve))


def rank_quality(signatures: np.ndarray, decode_counts: np.ndarray, *, seed: int = SEED) -> float:
    """Spearman's rho between how far apart prompts' signatures are and how far apart their answers are."""
    pairs = draw_pairs(len(signatures), seed=seed)
    x = unit_rows(signatures)
    distance = 1.0 - _pair_dots(x, pairs)
    return _correlation(_centred_ranks(distance), _centred_ranks(answer_distances(decode_counts, pairs)))


def answer_distances(decode_counts: np.ndarray, pairs: np.ndarray) -> Floats:
    """1 - cosine of the answers' counts over all layers and experts, for each pair."""
    answers = unit_rows(decode_counts.reshape(len(decode_counts), -1))
    return 1.0 - _pair_dots(answers, pairs)


def _pair_dots(x: Floats, pairs: np.ndarray) -> Floats:
    """Dot product of the rows of each pair. All products at once are quicker than the rows of each pair, up to a size."""
    if len(x) <= MAX_AT_ONCE:
        return (x @ x.T)[pairs[:, 0], pairs[:, 1]]
    parts = np.array_split(pairs, len(pairs) // 256 + 1)
    return np.concatenate([np.einsum("pd,pd->p", x[part[:, 0]], x[part[:, 1]]) for part in parts])


def variant_values(
    variant: str,
    counts: np.ndarray,
    *,
    probabilities: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> Floats:
    """[N, L, E] that signatures of this variant are made of.

    counts         [N, L, E] prefill
    probabilities  [N, L, E] sums of gate probabilities over all experts, for `probability`
    weights        [L, E] for `count_idf`; None: those of these requests
    """
    match variant:
        case "count_idf":
            return (counts * (idf_weights(counts) if weights is None else weights)).astype(np.float32)
        case "count":
            return counts.astype(np.float32)
        case "sqrt":
            return np.sqrt(counts.astype(np.float32))
        case "binary":
            return (counts > 0).astype(np.float32)
        case "probability" if probabilities is not None:
            return probabilities.astype(np.float32)
    raise ValueError(f"no values for a signature of {variant!r}; the variants are {', '.join(VARIANTS)}")


def _centred_ranks(values: np.ndarray) -> Doubles:
    """Ranks less their mean, at unit length; equal values share the average of their ranks."""
    order = np.argsort(values)  # not a stable sort, which takes ten times as long: equal values share a rank
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ends = np.append(starts[1:], len(values))
    ranks = np.empty(len(values), dtype=np.float64)
    ranks[order] = np.repeat((starts + ends - 1) / 2.0, ends - starts)
    ranks -= (len(values) - 1) / 2.0
    length = float(np.sqrt(ranks @ ranks))
    return ranks / length if length > 0 else ranks


def _correlation(first: Doubles, second: Doubles) -> float:
    return float(first @ second)
