"""Cutting layers into stages: as good as trying every cut, for the sum and for the bottleneck."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.layer_cuts import cut_layers


def all_cuts(
    order: tuple[int, ...], num_layers: int, num_stages: int
) -> list[tuple[tuple[int, int, int], ...]]:
    found = []
    for chosen in combinations(order, num_stages):
        for ends in combinations(range(1, num_layers), num_stages - 1):
            bounds = [0, *ends, num_layers]
            found.append(tuple((n, a, b) for n, a, b in zip(chosen, bounds[:-1], bounds[1:], strict=True)))
    return found


def cost(cut, costs, hops, bottleneck: bool) -> float:
    stages = [costs[n, a, b] for n, a, b in cut]
    if bottleneck:
        return max(stages)
    return sum(stages) + sum(hops[x[0], y[0]] for x, y in zip(cut, cut[1:], strict=False))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31), st.booleans())
def test_every_number_of_stages_gets_its_best_cut(
    nodes: int, layers: int, seed: int, bottleneck: bool
) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.uniform(1, 10, (nodes, layers + 1, layers + 1))
    costs[rng.uniform(size=costs.shape) < 0.2] = np.inf
    hops = rng.uniform(0, 3, (nodes, nodes))
    order = tuple(int(n) for n in rng.permutation(nodes))
    found = {len(cut): cut for cut in cut_layers(costs, hops, order, nodes, bottleneck=bottleneck)}
    for num_stages in range(1, nodes + 1):
        best = min(
            (cost(cut, costs, hops, bottleneck) for cut in all_cuts(order, layers, num_stages)),
            default=np.inf,
        )
        if np.isinf(best):
            assert num_stages not in found
            continue
        cut = found[num_stages]
        assert [first for _, first, _ in cut] == [0, *(last for *_, last in cut[:-1])] and cut[-1][
            2
        ] == layers
        assert [order.index(n) for n, *_ in cut] == sorted(order.index(n) for n, *_ in cut)
        assert cost(cut, costs, hops, bottleneck) == pytest.approx(best)


def test_a_node_that_can_hold_nothing_is_passed_over() -> None:
    costs = np.full((3, 5, 5), 1.0)
    costs[1] = np.inf
    cuts = cut_layers(costs, np.zeros((3, 3)), (0, 1, 2), 3, bottleneck=False)
    assert [len(cut) for cut in cuts] == [1, 2]
    assert {n for cut in cuts for n, *_ in cut} <= {0, 2}
