"""Signatures into clusters, clusters to homes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import ArtifactError
from edge_runtime.routing.clusters import assign_to_homes, demand_by_cluster, fit_clusters
from edge_runtime.routing.signature import unit_rows


def domains(num_domains: int, each: int, dim: int = 24, spread: float = 0.3, seed: int = 0) -> np.ndarray:
    """Unit vectors around `num_domains` directions, domain after domain."""
    rng = np.random.default_rng(seed)
    middles = np.repeat(rng.random((num_domains, dim)) ** 4, each, axis=0)
    return unit_rows(middles + spread * rng.random((num_domains * each, dim)) * middles.mean())


@settings(max_examples=25)
@given(st.integers(1, 8), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_clusters_of_equal_sizes_differ_little_in_size(num_clusters, more, seed):
    N = num_clusters + more
    found = fit_clusters(unit_rows(np.random.default_rng(seed).random((N, 12))), num_clusters, seed=seed)
    sizes = np.bincount(found.labels, minlength=num_clusters)
    room = -(-N // num_clusters)
    assert sizes.max() <= room
    assert sizes.min() >= N - (num_clusters - 1) * room
    assert np.linalg.norm(found.centroids, axis=1) == pytest.approx(np.ones(num_clusters), abs=1e-5)


def test_domains_of_one_size_are_found():
    labels = fit_clusters(domains(4, 20), 4).labels.reshape(4, 20)
    assert (labels == labels[:, :1]).all() and len(set(labels[:, 0])) == 4


def test_without_balance_a_large_domain_stays_whole():
    signatures = np.concatenate([domains(1, 60, seed=3), domains(1, 6, seed=4)])
    loose = fit_clusters(signatures, 2, equal_sizes=False)
    assert sorted(np.bincount(loose.labels)) == [6, 60]
    assert sorted(np.bincount(fit_clusters(signatures, 2).labels)) == [33, 33]


def test_the_same_seed_gives_the_same_clusters():
    signatures = domains(3, 15)
    first, second = fit_clusters(signatures, 5, seed=9), fit_clusters(signatures, 5, seed=9)
    assert (first.centroids == second.centroids).all() and (first.labels == second.labels).all()


def test_copies_of_few_signatures_still_fill_every_cluster():
    signatures = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0)
    found = fit_clusters(signatures, 6)
    assert np.bincount(found.labels, minlength=6).tolist() == [2] * 6
    assert np.isfinite(found.centroids).all()


@pytest.mark.parametrize(
    ("signatures", "told"),
    [
        (np.eye(3), "3 calibration signatures cannot make 4 clusters"),
        (np.zeros((8, 3)), "8 of 8 calibration signatures are empty"),
        (np.concatenate([np.eye(7), np.zeros((1, 7))]), "1 of 8 .*the first is number 7"),
        (np.tile([0.6, 0.8], (8, 1)), "all 8 calibration signatures are the same"),
        (np.full((8, 3), np.nan), "not finite"),
    ],
)
def test_signatures_that_tell_nothing_are_refused(signatures, told):
    with pytest.raises(ArtifactError, match=told):
        fit_clusters(signatures, 4)


def test_demand_is_the_share_of_each_expert_in_what_a_cluster_decodes():
    counts = np.array([[[3, 1, 0]], [[1, 3, 0]], [[0, 0, 4]]])
    demand = demand_by_cluster(counts, np.array([0, 0, 1]), 3)
    assert demand[:, 0].tolist() == [[0.5, 0.5, 0], [0, 0, 1], [0, 0, 0]]


def test_each_home_gets_the_cluster_whose_experts_it_holds():
    demand = np.array([[[0.8, 0.2, 0.0, 0.0]], [[0.0, 0.0, 0.6, 0.4]], [[0.0, 0.5, 0.5, 0.0]]])
    resident = np.array([[[0, 0, 1, 1]], [[0, 1, 1, 0]], [[1, 1, 0, 0]]])
    assert assign_to_homes(demand, resident).tolist() == [1, 2, 0]
