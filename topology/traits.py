"""What a placement may know of a model's experts and of the requests: how often each is chosen, who may stand in for it,
and where requests live. Values and arithmetic; knows no file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topology.grouping import Groups
from topology.ids import ExpertId

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ExpertTraits:
    """M MoE layers with E experts each; C clusters of requests.

    layers      the model's layer of each row
    frequency   [M, E] share of a layer's choices; every row sums to 1
    similarity  [M, E, E], of experts of one layer
    groups      who may stand in for whom
    by_cluster  [C, M, E] frequency in each cluster of requests, or None
    """

    layers: tuple[int, ...]
    frequency: Floats
    similarity: Floats
    groups: Groups
    by_cluster: Floats | None = None

    def demand(self) -> dict[ExpertId, float]:
        """Expert -> its share of its layer's choices."""
        return {
            ExpertId(layer, index): float(share)
            for layer, shares in zip(self.layers, self.frequency, strict=True)
            for index, share in enumerate(shares)
        }

    def frequency_at(self, mix: Sequence[float] | None) -> Floats:
        """[M, E] frequency where the clusters share out as `mix`, C weights; overall where that is not known."""
        if mix is None or self.by_cluster is None:
            return self.frequency
        if len(mix) != len(self.by_cluster):
            raise ValueError(f"a mix of {len(mix)} clusters, expected {len(self.by_cluster)}")
        weights = np.asarray(mix, dtype=np.float64)
        return (
            shares(np.einsum("c,cme->me", weights, self.by_cluster)) if weights.sum() > 0 else self.frequency
        )


@dataclass(frozen=True)
class Traffic:
    """Where requests live.

    share  node -> how many of the requests have their home there, in any unit; 1 for those that are not named
    mix    node -> how its requests share out over the clusters, C weights; as all requests do where it is not named
    """

    share: Mapping[str, float] = field(default_factory=dict)
    mix: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def share_of(self, node: str) -> float:
        return self.share.get(node, 1.0)


def shares(counts: NDArray[np.floating] | NDArray[np.integer]) -> Floats:
    """Counts [..., E] as shares of their sum over E; equal ones where nothing was counted."""
    counts = np.asarray(counts, dtype=np.float64)
    total = counts.sum(axis=-1, keepdims=True)
    return np.where(total > 0, counts / np.where(total > 0, total, 1.0), 1.0 / counts.shape[-1])
