"""Made-up findings of a calibration: seeded tables of the shapes that the real one writes."""

import numpy as np

from topology.grouping import Groups, group_experts, quantile_thresholds
from topology.traits import ExpertTraits, shares


def similarity_of(num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """[M, E, E] cosines of random vectors around a few centres: some experts are alike, most are not."""
    generator = np.random.default_rng(seed)
    width = 24
    vectors = generator.normal(size=(num_layers, num_experts, width))
    centres = generator.normal(size=(num_layers, max(1, num_experts // 3), width))
    nearest = generator.integers(0, centres.shape[1], size=(num_layers, num_experts))
    vectors += 1.5 * np.take_along_axis(centres, nearest[:, :, None], axis=1)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    return vectors @ vectors.transpose(0, 2, 1)


def frequency_of(num_layers: int, num_experts: int, seed: int = 0) -> np.ndarray:
    """[M, E] shares of choices, some experts ten times as often as others."""
    generator = np.random.default_rng(seed + 1)
    return shares(np.exp(generator.normal(size=(num_layers, num_experts))))


def groups_of(similarity: np.ndarray, frequency: np.ndarray, **options: object) -> Groups:
    """Groups by quantile, so that there are groups of several whatever the similarity."""
    return group_experts(similarity, frequency, thresholds=quantile_thresholds(similarity), **options)


def traits_of(
    layers: tuple[int, ...], num_experts: int, seed: int = 0, *, num_clusters: int = 0
) -> ExpertTraits:
    """Traits of a model with experts in these layers."""
    similarity = similarity_of(len(layers), num_experts, seed)
    frequency = frequency_of(len(layers), num_experts, seed)
    by_cluster = None
    if num_clusters:
        by_cluster = np.stack(
            [frequency_of(len(layers), num_experts, seed + 10 + at) for at in range(num_clusters)]
        )
        frequency = shares(by_cluster.sum(axis=0))
    return ExpertTraits(layers, frequency, similarity, groups_of(similarity, frequency), by_cluster)
