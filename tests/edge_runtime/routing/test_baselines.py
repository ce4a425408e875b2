"""Routers that know nothing of experts."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.base import HomeLoad, Question, pressure
from edge_runtime.routing.baselines import (
    DomainOracle,
    LeastPressure,
    PowerOfTwo,
    RandomChoice,
    RoundRobin,
    ShortestQueue,
    domain_pools,
)

ASKED = Question()


def homes(*in_flight: int) -> list[HomeLoad]:
    return [HomeLoad(f"n{i}", count, 8) for i, count in enumerate(in_flight)]


def test_round_robin_takes_one_after_the_other():
    router = RoundRobin()
    assert [router.choose(ASKED, homes(9, 0, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_the_shortest_queue_is_among_the_shortest_and_ties_are_drawn():
    router = ShortestQueue(1)
    drawn = Counter(router.choose(ASKED, homes(2, 1, 1, 3)) for _ in range(100))
    assert set(drawn) == {1, 2}


def test_of_two_drawn_the_less_loaded_is_taken_so_the_most_loaded_never_is():
    router = PowerOfTwo(1)
    drawn = Counter(router.choose(ASKED, homes(0, 1, 2)) for _ in range(300))
    assert set(drawn) == {0, 1} and drawn[0] > drawn[1]
    assert router.choose(ASKED, homes(5)) == 0


def test_chance_is_the_same_with_the_same_seed():
    for kind in (RandomChoice, ShortestQueue, PowerOfTwo):
        first, second = kind(7), kind(7)
        assert [first.choose(ASKED, homes(1, 1, 1)) for _ in range(20)] == [
            second.choose(ASKED, homes(1, 1, 1)) for _ in range(20)
        ]


def test_least_pressure_weighs_waiting_and_speed():
    loads = [HomeLoad("a", 3, 2), HomeLoad("b", 5, 8), HomeLoad("c", 12, 16, speed=4.0)]
    assert LeastPressure().choose(ASKED, loads) == 2
    assert min(map(pressure, loads)) == pressure(loads[2])


def test_frequent_domains_have_pools_by_largest_remainder_and_the_rest_share_one():
    pools, rest = domain_pools({"en": 50, "zh": 25, "de": 15, "fr": 10}, 8)
    assert {name: len(pool) for name, pool in pools.items()} == {"en": 4, "zh": 2, "de": 1}
    assert len(rest) == 1
    router = DomainOracle({"en": 50, "zh": 25, "de": 15, "fr": 10}, 8, seed=1)
    for name, pool in pools.items():
        assert router.choose(Question(domain=name), homes(*[1] * 8)) in pool
    assert router.choose(Question(domain="fr"), homes(*[1] * 8)) in rest
    assert router.choose(Question(domain="unheard of"), homes(*[1] * 8)) in rest


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 100), min_size=1),
    st.integers(1, 24),
)
def test_pools_are_apart_and_cover_all_homes(shares, num_homes):
    pools, rest = domain_pools(shares, num_homes)
    used = [place for pool in pools.values() for place in pool]
    assert len(used) == len(set(used)) <= num_homes
    assert rest and all(pools.values())
    assert set(used) | set(rest) == set(range(num_homes))


@pytest.mark.parametrize("kind", [LeastPressure, RoundRobin])
def test_these_choose_before_anything_is_computed(kind):
    assert not kind().needs_signature
