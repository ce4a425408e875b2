"""Relative position bias: what the distance of two tokens adds to their score, per head. Knows no layer and no row.

Learned numbers belong to buckets of distances. Since all distances from `max_distance` on share a bucket, a table of
2 * max_distance + 1 columns holds every distance, the far ones at its ends.
"""

import math

import torch
from torch import Tensor

from edge_runtime.model.spec import RelativeBias


def bias_columns(spec: RelativeBias) -> int:
    """Columns of a table: one per distance from -max_distance to max_distance."""
    return 2 * spec.max_distance + 1


def bias_table(spec: RelativeBias, weight: Tensor) -> Tensor:
    """[H, 2 * max_distance + 1] float32 from weight [buckets, H]: column max_distance + d is for a token d behind the row."""
    return weight[buckets(spec)].T.contiguous()


def buckets(spec: RelativeBias) -> Tensor:
    """[2 * max_distance + 1] int64, the bucket of each distance (seen token minus row).

    In float32 and in the order of operations that transformers uses, so that borders fall on the same distances.
    """
    distance = torch.arange(-spec.max_distance, spec.max_distance + 1)
    num_buckets = spec.num_buckets // 2 if spec.both_ways else spec.num_buckets
    steps = distance.abs() if spec.both_ways else (-distance).clamp(min=0)
    exact = num_buckets // 2  # so many distances have a bucket each; the bins of the others widen
    share = torch.log(steps.clamp(min=1).float() / exact) / math.log(spec.max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    found = torch.where(steps < exact, steps, far)
    return found + num_buckets * (distance > 0) if spec.both_ways else found
