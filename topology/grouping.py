"""Decide which experts of a layer may stand in for one another: similarity groups, each around a frequent expert.

Arithmetic on tables with a row per MoE layer. Knows no model and no node, and nothing of what a substitution costs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

FIRST_THRESHOLD, LAST_THRESHOLD = 0.9, 0.5
"""What a similarity has to reach in the first and in the last layer; linear between. Of a quantile threshold: which one."""
SMALLEST_CAP = 2


@dataclass(frozen=True)
class Groups:
    """A partition of each layer's experts. M MoE layers, E experts in each.

    group_of  [M, E] int32, groups of a layer counted from 0, the one around the most frequent expert first
    dominant  [M, E] int32, the expert at the centre of each expert's group
    """

    group_of: Ints
    dominant: Ints

    def members(self, row: int) -> list[list[int]]:
        """The groups of one layer: indices of their experts, ascending."""
        line = self.group_of[row]
        return [np.flatnonzero(line == group).tolist() for group in range(int(line.max()) + 1)]

    @property
    def together(self) -> NDArray[np.bool_]:
        """[M, E, E], whether two experts are in one group; each is with itself."""
        return self.group_of[:, :, None] == self.group_of[:, None, :]


def depth_thresholds(
    num_rows: int, first: float = FIRST_THRESHOLD, last: float = LAST_THRESHOLD
) -> list[float]:
    """A threshold for each layer, from `first` at the shallowest to `last` at the deepest."""
    return [float(value) for value in np.linspace(first, last, num_rows)] if num_rows > 1 else [first]


def quantile_thresholds(
    similarity: NDArray[np.floating], first: float = FIRST_THRESHOLD, last: float = LAST_THRESHOLD
) -> list[float]:
    """For centred similarities, whose mean is near 0: the quantile of a layer's pairs that falls with depth, at least 0."""
    above = np.triu_indices(similarity.shape[1], k=1)
    found = []
    for line, quantile in zip(similarity, depth_thresholds(len(similarity), first, last), strict=True):
        pairs = line[above].astype(np.float64)
        found.append(max(0.0, float(np.quantile(pairs, quantile))) if len(pairs) else 0.0)
    return found


def depth_caps(num_rows: int, num_experts: int) -> list[int]:
    """Most experts of a group for each layer: 2 at the shallowest, half of all at the deepest."""
    largest = max(SMALLEST_CAP, num_experts // 2)
    return [round(value) for value in np.linspace(SMALLEST_CAP, largest, max(1, num_rows))]


def group_experts(
    similarity: NDArray[np.floating],
    frequency: NDArray[np.floating],
    *,
    thresholds: list[float] | None = None,
    caps: list[int] | None = None,
    complete: bool = False,
) -> Groups:
    """Group the experts of each layer.

    similarity  [M, E, E], symmetric, of one layer's experts with each other
    frequency   [M, E], how often each is chosen, in any unit
    thresholds  M numbers; None for `depth_thresholds`
    caps        M numbers, most members of a group; None for `depth_caps`
    complete    every pair of a group reaches the threshold, not only each member with the dominant one

    The most frequent expert that has no group yet becomes dominant and takes in those without a group that are similar
    enough to it, the most similar first; and so on. Ties go to the lower index.
    """
    num_rows, num_experts = frequency.shape
    if similarity.shape != (num_rows, num_experts, num_experts):
        raise ValueError(
            f"similarity has the shape {list(similarity.shape)}, expected {[num_rows, num_experts, num_experts]}"
        )
    thresholds = depth_thresholds(num_rows) if thresholds is None else thresholds
    caps = depth_caps(num_rows, num_experts) if caps is None else caps
    group_of = np.full((num_rows, num_experts), -1, dtype=np.int32)
    dominant = np.full((num_rows, num_experts), -1, dtype=np.int32)
    for row in range(num_rows):
        alike = similarity[row].astype(np.float64)
        by_frequency = np.argsort(-frequency[row].astype(np.float64), kind="stable").tolist()
        for group, members in enumerate(
            _layer_groups(alike, by_frequency, thresholds[row], caps[row], complete)
        ):
            group_of[row, members] = group
            dominant[row, members] = members[0]
    return Groups(group_of, dominant)


def _layer_groups(
    alike: Floats, by_frequency: list[int], threshold: float, cap: int, complete: bool
) -> list[list[int]]:
    """The groups of one layer, each with its dominant expert first."""
    groups = []
    is_open = np.ones(len(by_frequency), dtype=bool)
    for centre in by_frequency:
        if not is_open[centre]:
            continue
        is_open[centre] = False
        members = [centre]
        for other in np.argsort(-alike[centre], kind="stable").tolist():
            if len(members) >= cap or alike[centre, other] < threshold:
                break
            if is_open[other] and (not complete or (alike[other, members] >= threshold).all()):
                members.append(other)
                is_open[other] = False
        groups.append(members)
    return groups
