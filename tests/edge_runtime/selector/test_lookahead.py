"""Cost-to-go tables against the recursion that defines them."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.selector.lookahead import Road, choose_server, cost_to_go, future_of, least_losses


def situation(seed: int, stays: bool = True):
    generator = np.random.default_rng(seed)
    M, S, E = (int(n) for n in generator.integers([2, 1, 2], [5, 5, 6]))
    holds = generator.random((M, S, E)) < 0.5
    holds[:, 0] |= ~holds.any(axis=1)  # every expert is somewhere
    group = generator.integers(0, 2, (M, E))
    together = group[:, :, None] == group[:, None, :]
    loss = generator.uniform(0.01, 0.2, (M, E, E))
    travel = generator.uniform(0.001, 0.02, (S, S))
    np.fill_diagonal(travel, 0.0)
    follows = generator.dirichlet(np.ones(E), (M - 1, E))
    best, by = least_losses(holds, together, loss)
    road = Road(travel, generator.uniform(0, 0.01, S), best, follows, stays)
    return road, holds, together, loss, by


def by_recursion(road, holds, together, loss, price, depth) -> np.ndarray:
    """min over (server, expert there that is the target or of its group) of cost plus the expectation of what follows."""
    M, S, E = holds.shape

    @cache
    def value(h: int, m: int, p: int, e: int) -> float:
        if h == 0 or m == M:
            return 0.0
        best = np.inf
        for s in range(S):
            for e2 in range(E):
                if not holds[m, s, e2] or not (e2 == e or together[m, e, e2]):
                    continue
                way = road.travel[p, s] * (1 if road.stays else 2)
                cost = way + road.serve[s] + price * (0.0 if e2 == e else loss[m, e, e2])
                where = s if road.stays else p
                if m + 1 < M:
                    cost += sum(road.follows[m, e, e3] * value(h - 1, m + 1, where, e3) for e3 in range(E))
                best = min(best, cost)
        return best

    return np.array([[[value(depth, m, p, e) for e in range(E)] for p in range(S)] for m in range(M)])


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([0.0, 0.05, 1.0]), st.booleans())
def test_the_table_equals_the_recursion(seed, depth, price, stays):
    road, holds, together, loss, _ = situation(seed, stays)
    table = cost_to_go(road, price, depth)
    assert table == pytest.approx(by_recursion(road, holds, together, loss, price, depth), rel=1e-9)


@given(st.integers(0, 10_000), st.booleans())
def test_looking_further_never_costs_less(seed, stays):
    road = situation(seed, stays)[0]
    tables = [cost_to_go(road, 0.1, depth) for depth in (0, 1, 2, 3, 4)]
    for nearer, further in pairwise(tables):
        assert (further >= nearer - 1e-12).all()


def test_depth_one_is_greedy_and_the_last_layer_has_no_future():
    road = situation(3)[0]
    greedy = cost_to_go(road, 0.1, 1)
    here = road.serve[None, :, None] + np.where(np.isfinite(road.loss), 0.1 * road.loss, np.inf)
    assert greedy == pytest.approx((road.travel[None, :, :, None] + here[:, None]).min(axis=2))
    assert (future_of(road, greedy)[-1] == 0).all()


def test_an_expert_itself_costs_nothing_and_who_may_not_stand_in_costs_everything():
    holds = np.array([[[True, False, False], [False, True, True]]])
    together = np.array([[[True, True, False], [True, True, False], [False, False, True]]])
    loss = np.full((1, 3, 3), 0.3)
    best, by = least_losses(holds, together, loss)
    assert best[0].tolist() == [[0.0, 0.3, np.inf], [0.3, 0.0, 0.0]]
    assert by[0].tolist() == [[0, 0, -1], [1, 1, 2]]


def test_a_server_nearer_to_what_comes_next_is_worth_a_detour():
    """Layer 1 is only at server 2; both 1 and 2 hold layer 0, and 1 is nearer now."""
    holds = np.array([[[0], [1], [1]], [[0], [0], [1]]], dtype=bool)
    best, _ = least_losses(holds, np.ones((2, 1, 1), dtype=bool), np.zeros((2, 1, 1)))
    travel = np.array([[0, 1.0, 1.2], [1.0, 0, 5.0], [1.2, 5.0, 0]])
    road = Road(travel, np.zeros(3), best, np.ones((1, 1, 1)))
    assert cost_to_go(road, 0.0, 1)[0, 0, 0] == pytest.approx(1.0), "greedy goes to the nearer one"
    future = future_of(road, cost_to_go(road, 0.0, 1))
    total = travel[0, :, None] + future[0]
    assert total[1:, 0].tolist() == pytest.approx([6.0, 1.2])
    assert choose_server(road, np.zeros((2, 3, 1)), 0.0, 0, 0, 0, left=0.0) == 1
    assert choose_server(road, future, 0.0, 0, 0, 0, left=0.0) == 2


@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans())
def test_acting_by_the_table_costs_what_the_table_says(seed, depth, stays):
    road = situation(seed, stays)[0]
    table = cost_to_go(road, 0.1, depth)
    future = future_of(road, cost_to_go(road, 0.1, depth - 1))
    for row, here, expert in np.ndindex(table.shape):
        server = choose_server(road, future, 0.1, row, here, expert, left=np.inf)
        way = road.travel[here, server] * (1 if stays else 2)
        ahead = future[row, server if stays else here, expert]
        cost = way + road.serve[server] + 0.1 * road.loss[row, server, expert] + ahead
        assert cost == pytest.approx(table[row, here, expert])


def test_what_cannot_be_paid_for_is_not_chosen():
    road = situation(5)[0]
    for row, here, expert in np.ndindex(road.loss.shape):
        server = choose_server(road, np.zeros(road.loss.shape), 0.0, row, here, expert, left=0.0)
        assert road.loss[row, server, expert] == 0
