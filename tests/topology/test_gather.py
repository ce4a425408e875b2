"""What homes lack stands on few nodes: never on more than before, and nothing else is lost by it."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.planning import ALL, EXPERTS_ONLY, cluster, model, needed_bytes, node
from tests.support.traits import traits_of
from topology.cluster import Cluster, Link, Pin
from topology.coverage import coverage_of
from topology.gather import Demand, gather, served
from topology.host_choice import choose_hosts, cover_ranks, cover_tables
from topology.ids import ExpertId
from topology.placement import Placement, plan_placement
from topology.serving import predict_serving
from topology.speeds import machines_of
from topology.traits import shares


def scattered(
    generator: np.random.Generator, layers: int, nodes: int, experts: int, per_node: int
) -> np.ndarray:
    """[L, N, E] every expert somewhere, and `per_node` copies on each node where they fit."""
    held = np.zeros((layers, nodes, experts), dtype=bool)
    for layer in range(layers):
        held[layer, np.arange(experts) % nodes, generator.permutation(experts)] = True
        for at in range(nodes):
            missing = max(0, min(experts, per_node) - int(held[layer, at].sum()))
            lacks = np.flatnonzero(~held[layer, at])
            held[layer, at, generator.choice(lacks, missing, replace=False)] = True
    return held


def demand_of(
    generator: np.random.Generator, layers: int, nodes: int, experts: int, top_k: int, stand_in: float = 0.0
) -> Demand:
    frequency = shares(np.exp(generator.normal(size=(nodes, layers, experts))))
    group = generator.integers(0, max(1, experts // 2), size=(layers, experts))
    is_home = generator.random(nodes) < 0.7
    is_home[0] = True
    return Demand(
        weight=np.repeat(is_home[:, None] * generator.uniform(0.5, 2.0, size=(nodes, 1)), layers, axis=1),
        chances=np.minimum(1.0, top_k * frequency),
        together=group[:, :, None] == group[:, None, :],
        stand_in=stand_in,
        top_k=top_k,
    )


@given(st.integers(0, 2**31 - 1), st.integers(1, 6), st.integers(2, 12), st.sampled_from([0.0, 1.0]))
@settings(max_examples=40)
def test_nothing_is_lost_and_no_more_peers_are_called(seed, nodes, experts, stand_in):
    generator = np.random.default_rng(seed)
    layers, per_node = 3, int(generator.integers(1, experts + 1))
    held = scattered(generator, layers, nodes, experts, per_node)
    capacity = held.sum(axis=2) + generator.integers(0, 4, size=(layers, nodes))
    pinned = held & (generator.random(held.shape) < 0.2)
    demand = demand_of(generator, layers, nodes, experts, min(2, experts), stand_in)
    rank = cover_ranks([f"n{at}" for at in range(nodes)], range(layers))
    unchanged = held.copy()
    found = gather(held, capacity, pinned, demand, rank)
    assert (held == unchanged).all(), "what it was given is not changed"
    assert (found == gather(held, capacity, pinned, demand, rank)).all(), "the same again"
    assert found.any(axis=1).all(), "every expert is somewhere"
    assert (found.sum(axis=2) <= capacity).all()
    assert (found & pinned).sum() == pinned.sum()
    assert (found.sum(axis=(1, 2)) == held.sum(axis=(1, 2))).all(), "as many copies of each layer"
    before, after = served(held, demand, rank), served(found, demand, rank)
    assert (after.calls <= before.calls + 1e-9).all()
    assert (after.exact >= before.exact - 1e-9).all() and (after.covered >= before.covered - 1e-9).all()


@given(st.integers(0, 2**31 - 1), st.integers(2, 6))
@settings(max_examples=25)
def test_covers_of_many_layers_are_those_of_choose_hosts(seed, nodes):
    generator = np.random.default_rng(seed)
    held = scattered(generator, 3, nodes, 9, 3)
    names = [f"node {at}" for at in range(nodes)]
    hosts = {
        ExpertId(layer, index): [names[at] for at in np.flatnonzero(held[layer, :, index])]
        for layer in range(3)
        for index in range(9)
    }
    rank = cover_ranks(names, range(3))
    for home in range(nodes):
        others = [at for at in range(nodes) if at != home]
        peers = [names[home], *(names[at] for at in others)]
        plain = choose_hosts(hosts, home=names[home], alive=names, num_layers=3, num_experts=9, peers=peers)
        assert (np.array([home, *others])[plain] == cover_tables(held, home, rank[:, home])).all()


def test_a_layer_that_steps_would_be_slower_with_stays_as_it_is():
    generator = np.random.default_rng(3)
    held, demand = scattered(generator, 2, 6, 12, 4), demand_of(generator, 2, 6, 12, 2)
    capacity, pinned = np.full((2, 6), 12), np.zeros_like(held)
    rank = cover_ranks("abcdef", range(2))
    free = gather(held, capacity, pinned, demand, rank)
    assert (free != held).any(axis=(1, 2)).all()
    bound = gather(held, capacity, pinned, demand, rank, lambda tried: np.array([True, False]))
    assert (bound[0] == held[0]).all() and (bound[1] == free[1]).all()


def test_a_large_model_takes_less_than_a_few_seconds():
    generator = np.random.default_rng(1)
    held, demand = scattered(generator, 48, 8, 128, 32), demand_of(generator, 48, 8, 128, 8)
    rank = cover_ranks("abcdefgh", range(48))
    began = time.process_time()
    found = gather(held, held.sum(axis=2) + 8, np.zeros_like(held), demand, rank)
    took = time.process_time() - began
    assert served(found, demand, rank).calls.mean() < 0.8 * served(held, demand, rank).calls.mean()
    assert took < 10, f"{took:.1f} s of processor time; a second where nothing else runs"


SMALL = model(layers=4, experts=16, top_k=2, width=128, inner=128, vocab=512)
SIZE = SMALL.expert_bytes["as_stored"][0]
EMPTY = cluster(kv_tokens=512, plan="home")
TRAITS = traits_of((0, 1, 2, 3), 16)


def six_nodes(rule: str, **changes: object) -> Cluster:
    """Three homes and three hosts; copies enough for two of each expert, and room for more."""
    bare = needed_bytes(EMPTY, SMALL, 0, 4, 0.0)
    host = EMPTY.process_reserve_bytes + EMPTY.max_batch_rows * SMALL.expert_row_workspace_bytes
    nodes = [node(name, bare + room * SIZE, ALL) for name, room in (("a", 52), ("b", 40), ("c", 28))]
    nodes += [
        node(name, host + room * SIZE, EXPERTS_ONLY) for name, room in (("x", 24), ("y", 18), ("z", 12))
    ]
    return replace(EMPTY, placement=rule, nodes=tuple(nodes), memory_ratio=2.0, **changes)


def peers_of(found: Cluster, placement: Placement, requests: int = 24) -> float:
    [one] = predict_serving(SMALL, machines_of(found), placement, (requests,), demand=TRAITS.demand())
    return one.peers_per_layer


@pytest.mark.parametrize("rule", ["similarity", "popularity"])
def test_placements_by_demand_call_fewer_peers_and_serve_no_less(rule, monkeypatch):
    gathered = plan_placement(six_nodes(rule), SMALL, traits=TRAITS)
    monkeypatch.setattr("topology.rules.gather", lambda held, *_: held)
    plain = plan_placement(six_nodes(rule), SMALL, traits=TRAITS)
    assert peers_of(six_nodes(rule), gathered) < 0.9 * peers_of(six_nodes(rule), plain)
    assert coverage_of(gathered, TRAITS).exact >= coverage_of(plain, TRAITS).exact
    assert coverage_of(gathered, TRAITS).covered >= coverage_of(plain, TRAITS).covered


def test_pins_stay_where_they_are():
    pins = tuple(Pin(ExpertId(layer, index), "z") for layer, index in ((0, 3), (1, 5)))
    placement = plan_placement(six_nodes("similarity", pins=pins), SMALL, traits=TRAITS)
    assert {pin.expert for pin in pins} <= set(placement.plan_of("z").experts)


def test_links_that_take_long_for_many_rows_keep_calls_short():
    thin = six_nodes("popularity", default_link=Link("*", "*", 0.0001, 1e5))
    fast = six_nodes("popularity", default_link=Link("*", "*", 0.005, 1e9))
    slow_peers = peers_of(thin, plan_placement(thin, SMALL, traits=TRAITS))
    assert peers_of(fast, plan_placement(fast, SMALL, traits=TRAITS)) <= slow_peers
