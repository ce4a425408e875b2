"""Made-up findings of a calibration: seeded tables of the shapes that the real one writes."""

from pathlib import Path

import numpy as np
import torch

from edge_runtime.artifacts import write_section
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


def write_artifact(
    folder: Path, model_hash: str, layers: tuple[int, ...], num_experts: int, seed: int = 0
) -> Path:
    """A made-up calibration artifact with what placement and selector read, in the form of the real one."""
    similarity, frequency = (
        similarity_of(len(layers), num_experts, seed),
        frequency_of(len(layers), num_experts, seed),
    )
    generator = np.random.default_rng(seed + 2)
    mismatch = np.clip(1.4 - similarity + 0.05 * generator.normal(size=similarity.shape), 0.05, None)
    mismatch[:, range(num_experts), range(num_experts)] = 0.0
    transitions = generator.integers(0, 50, size=(len(layers) - 1, num_experts, num_experts))
    meta = {"layers": list(layers)}

    def write(section: str, **tensors: np.ndarray) -> None:
        of_section = {name: torch.from_numpy(np.ascontiguousarray(table)) for name, table in tensors.items()}
        write_section(folder, section, of_section, meta, model_hash=model_hash)

    write(
        "frequency",
        overall=frequency.astype(np.float32),
        by_domain=np.stack([frequency] * 2).astype(np.float32),
    )
    write("similarity", raw=similarity.astype(np.float16), centred=similarity.astype(np.float16))
    write("mismatch", mismatch=mismatch.astype(np.float16))
    write("sensitivity", sensitivity=np.linspace(0.3, 0.1, len(layers)).astype(np.float32))
    write("transitions", transitions=transitions.astype(np.float32))
    return folder
