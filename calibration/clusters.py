"""Puts requests that use the same experts together. Knows counts only."""

import warnings

import torch
from scipy.cluster.vq import kmeans2
from torch import Tensor


def cluster_requests(counts: Tensor, num_clusters: int, seed: int) -> Tensor:
    """K-means of the requests' expert counts [N, L, E], each as a unit vector.

    returns   [N] int64, numbered from 0 without gaps by falling size; fewer clusters where fewer can be told apart
    """
    vectors = torch.nn.functional.normalize(counts.flatten(1).double(), dim=1).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster is no harm: it gets no number
        _, label = kmeans2(vectors, min(num_clusters, len(vectors)), iter=50, minit="++", seed=seed)
    found, place, sizes = torch.from_numpy(label).long().unique(return_inverse=True, return_counts=True)
    rank = torch.empty_like(found)
    rank[sizes.argsort(descending=True, stable=True)] = torch.arange(len(found))
    return rank[place]
