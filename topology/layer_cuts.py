"""Cut the layers into stages for nodes in a given order: dynamic programming over where each stage ends.

Knows nothing of models or machines, only what each node takes for each range of layers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Cut = tuple[tuple[int, int, int], ...]
"""(node, first layer, last layer exclusive) of each stage, in the order of the layers."""


def cut_layers(
    costs: Floats, hops: Floats, order: Sequence[int], max_stages: int, *, bottleneck: bool
) -> list[Cut]:
    """The best cut into 1, 2, ... `max_stages` stages over nodes taken in that order, any of them left out.

    N nodes, L layers.

    costs       [N, L+1, L+1]  seconds of node n for layers [a, b); infinite where it cannot hold them; b > a counts
    hops        [N, N]         seconds from one node to the next
    order       which nodes, and in which order they may follow each other
    bottleneck  the slowest stage counts, not the sum of stages and hops
    returns     one cut for each number of stages that is possible at all; its exact cost is for others to say
    """
    num_layers = costs.shape[1] - 1
    m = len(order)
    own, ways = costs[list(order)], hops[np.ix_(list(order), list(order))]
    own = np.where(
        np.triu(np.ones(own.shape[1:], dtype=bool), 1), own, np.inf
    )  # a stage has a layer at least
    best = np.full((m, num_layers + 1), np.inf)  # of the stages so far, ending on a node before a layer
    best[:, 1:] = own[:, 0, 1:]
    back: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    cuts = []
    for num_stages in range(1, min(max_stages, m) + 1):
        if num_stages > 1:
            before = np.full((m, num_layers + 1), np.inf)
            previous = np.zeros((m, num_layers + 1), dtype=np.intp)
            for index in range(1, m):
                arriving = best[:index] if bottleneck else best[:index] + ways[:index, index, None]
                previous[index] = np.argmin(arriving, axis=0)
                before[index] = arriving.min(axis=0)
            through = (
                np.maximum(before[:, :, None], own) if bottleneck else before[:, :, None] + own
            )  # [m, a, b]
            starts = np.argmin(through, axis=1)
            best = through.min(axis=1)
            back.append((starts, previous))
        last = int(np.argmin(best[:, num_layers]))
        if np.isfinite(best[last, num_layers]):
            cuts.append(_trace(back, order, last, num_layers))
    return cuts


def _trace(
    back: Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]],
    order: Sequence[int],
    last: int,
    num_layers: int,
) -> Cut:
    stages = []
    node, end = last, num_layers
    for starts, previous in reversed(back):
        start = int(starts[node, end])
        stages.append((order[node], start, end))
        node, end = int(previous[node, start]), start
    stages.append((order[node], 0, end))
    return tuple(reversed(stages))
