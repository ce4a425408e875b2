"""Which node computes a prompt and which one answers."""

from dataclasses import replace

import numpy as np
import pytest

from edge_runtime.coordinator.routes import Routes, counts_wanted, first_bytes, homes_of, policy_of
from edge_runtime.elastic.tiers import Elasticity
from edge_runtime.errors import ArtifactError
from edge_runtime.protocol import Submit
from edge_runtime.routing.base import HomeLoad
from edge_runtime.routing.clusters import fit_clusters
from edge_runtime.routing.fit import SignatureFit
from edge_runtime.routing.signature import SignatureRule
from tests.support.coordinators import cluster, footprint
from topology.cluster import Cluster, Link, Routing
from topology.grouping import Groups
from topology.placement import plan_placement
from topology.speeds import LinkSpeed
from topology.traits import ExpertTraits

PARTS = footprint()  # 2 layers of 4 experts
NAMES = [bytes([i]) * 16 for i in range(8)]


def fit(num_clusters: int = 2) -> SignatureFit:
    """Requests of two kinds: those that use experts 0 and 1 of both layers, and those that use 2 and 3."""
    counts = np.zeros((12, 2, 4), dtype=np.int16)
    for index in range(12):
        counts[index, :, (0, 1) if index % 2 else (2, 3)] = 5 + index
    rule = SignatureRule((0, 1), np.ones((2, 4), dtype=np.float32))
    signatures = rule.signatures(counts) + 0.01 * np.random.default_rng(1).random((12, 8)).astype(np.float32)
    return SignatureFit(rule, signatures, counts, fit_clusters(signatures, num_clusters))


def separated(policy: str = "auto", **routing: object) -> Cluster:
    """A node that prefills for two that decode."""
    found = cluster("p", "a", "b")
    roles = (frozenset({"prefill"}), frozenset({"decode", "experts"}), frozenset({"decode", "experts"}))
    nodes = tuple(replace(node, roles=role) for node, role in zip(found.nodes, roles, strict=True))
    return replace(found, nodes=nodes, routing=Routing(policy=policy, **routing))


def loads(a: int, b: int) -> list[HomeLoad]:
    return [HomeLoad("a", a, 8), HomeLoad("b", b, 8)]


def test_auto_is_eldr_only_where_it_can_be_and_helps():
    assert policy_of(separated(), fit()) == "eldr"
    assert policy_of(separated(), None) == "pressure"
    assert policy_of(cluster("a", "b"), fit()) == "pressure"
    assert not Routes(cluster("a", "b"), PARTS, fit(), seed=1).separates
    assert Routes(separated(), PARTS, None, seed=1).separates, "somebody prefills for others"


def test_a_window_that_leaves_no_lane_a_tier_is_refused_before_anything_changes():
    wide = separated("pressure", lanes=True, lane_window=8)
    with pytest.raises(
        ArtifactError, match=r"\[routing\] lane_window: 8 leaves .* 1 to 16 sub-experts .*; write at most 7"
    ):
        Routes(wide, PARTS, None, seed=1, elasticity=Elasticity(4, 4))
    routes = Routes(
        separated("pressure", lanes=True, lane_window=7), PARTS, None, seed=1, elasticity=Elasticity(4, 4)
    )
    with pytest.raises(ArtifactError, match="lane_window"):
        routes.refuse(wide)
    Routes(wide, PARTS, None, seed=1)  # experts are whole: no lanes


def test_eldr_without_a_calibration_is_refused_in_one_sentence():
    with pytest.raises(
        ArtifactError, match='policy: "eldr" goes by section signature_fit.*run "edge-runtime calibrate"'
    ):
        Routes(separated("eldr"), PARTS, None, seed=1)
    running = Routes(separated("pressure"), PARTS, None, seed=1)
    with pytest.raises(ArtifactError, match="signature_fit"):
        running.refuse(separated("eldr"))


def test_like_goes_to_like_unless_load_differs_and_the_band_allows():
    routes = Routes(separated("eldr", tau=0.1), PARTS, fit(), seed=1)
    low = routes.signature(np.array([[9, 9, 0, 0]] * 2, dtype=np.int16))
    high = routes.signature(np.array([[0, 0, 9, 9]] * 2, dtype=np.int16))
    first, second = routes.choose_home(loads(0, 0), low), routes.choose_home(loads(0, 0), high)
    assert {first, second} == {"a", "b"}
    busy = loads(9, 0) if first == "a" else loads(0, 9)
    assert routes.choose_home(busy, low) == first
    assert routes.choose_home(busy, None) == second, "without a signature load decides"
    loose = Routes(separated("eldr", tau=1.0), PARTS, fit(), seed=1)
    assert loose.choose_home(busy, low) == second


def test_a_fit_for_another_number_of_homes_is_made_anew_and_said_so():
    routes = Routes(separated("eldr"), PARTS, fit(4), seed=1)
    body = routes.body()
    assert body["centroids"] == 2 and "fitted anew: calibration has 4" in body["text"]
    assert body["homes"]["a"]["centroid"] is not None
    with pytest.raises(ArtifactError, match="12 calibration signatures cannot make 13 clusters"):
        routes.refuse(replace(cluster(*(f"n{i}" for i in range(13))), routing=Routing(policy="eldr")))


def test_counts_of_another_model_give_no_signature():
    routes = Routes(separated("eldr"), PARTS, fit(), seed=1)
    assert routes.signature(np.zeros((0, 0), dtype=np.int16)) is None
    assert routes.signature(np.zeros((3, 4), dtype=np.int16)) is None


def test_homes_hold_the_experts_of_their_clusters_if_the_placement_knows_them():
    routes = Routes(separated("eldr"), PARTS, fit(), seed=1)
    even = np.full((2, 4), 0.25)
    groups = Groups(*[np.tile(np.arange(4, dtype=np.int32), (2, 1))] * 2)
    traits, traffic = routes.joint(
        ["a", "b"], ExpertTraits((0, 1), even, np.eye(4)[None].repeat(2, 0), groups)
    )
    assert traits.by_cluster.sum(axis=2) == pytest.approx(np.ones((2, 2)))
    assert traffic.mix == {"a": [1, 0], "b": [0, 1]}
    signatures = {"a": traits.by_cluster[0], "b": traits.by_cluster[1]}
    for home, demand in signatures.items():
        counts = (demand * 100).astype(np.int16)
        assert routes.choose_home(loads(0, 0), routes.signature(counts)) == home
    assert routes.joint(["a", "b"], None) == (None, None)


def test_a_placement_that_is_there_already_decides_which_home_gets_which_cluster():
    wanted = separated("eldr")
    placement = plan_placement(wanted, PARTS)
    swapped = []
    for low, high in ((0, 1), (1, 0)):
        held = [[0, 1], [2, 3]]
        nodes = list(placement.nodes)
        for place, kind in ((1, low), (2, high)):
            experts = tuple(
                type(nodes[place].experts[0])(layer, index) for layer in (0, 1) for index in held[kind]
            )
            nodes[place] = replace(nodes[place], experts=experts)
        routes = Routes(wanted, PARTS, fit(), seed=1)
        routes.follow(wanted, replace(placement, nodes=tuple(nodes)))
        swapped.append(
            routes.choose_home(loads(0, 0), routes.signature(np.array([[9, 9, 0, 0]] * 2, dtype=np.int16)))
        )
    assert swapped == ["a", "b"]


def test_kv_that_is_there_costs_nothing_and_a_slow_link_costs_load():
    wanted = replace(separated("pressure"), links=(Link("p", "a", 0.01, 1e6),))
    routes = Routes(replace(wanted, routing=Routing(policy="eldr")), PARTS, fit(), seed=1)
    block_bits = 16 * 512 * 8
    assert routes.transfer_s("p", "a", NAMES) == pytest.approx(0.01 + 8 * block_bits / 1e6)
    assert routes.transfer_s("a", "a", NAMES) == 0
    assert routes.choose_home(loads(2, 2), None, source="p", hashes=NAMES) == "b"
    routes.sent("a", NAMES[:6], 100)
    assert routes.transfer_s("p", "a", NAMES) == pytest.approx(0.01 + 2 * block_bits / 1e6)
    routes.sent("a", NAMES, 100)
    assert routes.transfer_s("p", "a", NAMES) == 0
    assert routes.body()["homes"]["a"] | {"centroid": None} == {
        "centroid": None,
        "requests": 2,
        "prompt_blocks": 14,
        "hit_blocks": 6,
    }
    routes.forget("a")
    assert routes.transfer_s("p", "a", NAMES) > 0.5
    assert routes.transfer_s("p", "a", NAMES, num_ahead=8) == 0, "it was told to fetch them already"
    routes.measured({("a", "p"): LinkSpeed(rtt_s=0.002, bandwidth_bps=1e9)})
    assert routes.transfer_s("p", "a", NAMES) == pytest.approx(0.002 + 8 * block_bits / 1e9)


def test_a_home_is_not_thought_to_hold_more_blocks_than_it_has():
    routes = Routes(separated("pressure"), PARTS, None, seed=1)
    routes.sent("a", NAMES[:4], 3)
    assert routes.transfer_s("p", "a", NAMES[1:4]) == 0
    assert routes.transfer_s("p", "a", NAMES[:1]) > 0


@pytest.mark.parametrize("policy", ["pressure", "jsq", "round_robin", "random", "power_of_two"])
def test_every_policy_of_the_file_answers_with_a_home(policy):
    routes = Routes(separated(policy), PARTS, fit(), seed=1)
    assert routes.policy == policy
    assert {routes.choose_home(loads(1, 1)) for _ in range(50)} <= {"a", "b"}
    assert routes.choose_home([]) is None


def test_prompts_that_begin_alike_are_computed_by_one_worker():
    routes = Routes(separated(), PARTS, None, seed=1)
    workers = ["p", "q", "r"]
    same = {routes.choose_worker(Submit(str(i), prompt="x" * 1024 + str(i)), workers, {}) for i in range(20)}
    other = {routes.choose_worker(Submit(str(i), prompt=f"{i} x"), workers, {}) for i in range(40)}
    assert len(same) == 1 and other == set(workers)


def test_a_prompt_in_any_form_has_first_bytes():
    assert first_bytes(Submit("r", prompt="\udcff" * 3000))[:3] == b"\xed\xb3\xbf"
    assert len(first_bytes(Submit("r", prompt_ids=list(range(1000))))) == 1024
    one, other = ([{"role": "user", "content": text}] for text in ("a", "b"))
    assert first_bytes(Submit("r", messages=one)) != first_bytes(Submit("r", messages=other))


def test_only_nodes_that_prefill_for_a_router_that_asks_count():
    assert counts_wanted(separated("eldr"), {"prefill"}) and not counts_wanted(separated("eldr"), {"decode"})
    assert counts_wanted(separated("auto"), {"prefill"}) and not counts_wanted(cluster("a"), {"prefill"})
    assert not counts_wanted(separated("jsq"), {"prefill"})
    assert homes_of(separated()) == ("a", "b")


def test_clusters_follow_what_is_asked_only_where_that_is_wanted():
    for wanted in (False, True):
        routes = Routes(separated("eldr", refit=wanted), PARTS, fit(), seed=1)
        rng = np.random.default_rng(3)
        for tick in range(60):
            counts = np.zeros((2, 4), dtype=np.int16)
            counts[:, (0, 3) if tick % 2 else (1, 2)] = rng.integers(5, 9, (2, 2))
            signature = routes.signature(counts)
            routes.see(signature, tick / 10)
            if tick < 50:
                assert routes.refit_due(tick / 10) is None, "a whole window has not passed"
        refit = routes.refit_due(6.0)
        assert (refit is not None) == wanted
        if refit is not None:
            refit()
            assert routes.refit_due(6.1) is None, "not again so soon"
            other = routes.signature(np.array([[0, 7, 7, 0]] * 2, dtype=np.int16))
            homes = {routes.choose_home(loads(0, 0), each) for each in (signature, other)}
            assert homes == {"a", "b"}, "kinds of requests that calibration did not know go apart"


def test_requests_that_are_all_alike_change_no_clusters():
    routes = Routes(separated("eldr", refit=True), PARTS, fit(), seed=1)
    for tick in range(60):
        routes.see(routes.signature(np.array([[9, 9, 0, 0]] * 2, dtype=np.int16)), tick / 10)
    before = routes.body()
    routes.refit_due(6.0)()
    assert routes.body() == before


HALVES = Elasticity(num_parts=4, top_k=4)


def test_a_request_goes_to_its_tiers_lane_and_in_it_where_its_like_are():
    wanted = separated("eldr", lanes=True)
    wanted = replace(wanted, nodes=(*wanted.nodes, *replace_names(wanted.nodes[1:], "c", "d")))
    routes = Routes(wanted, PARTS, fit(4), seed=1, elasticity=HALVES)
    four = [HomeLoad(name, 0, 8) for name in "abcd"]
    routes.follow_lanes(four, 0.0)
    counts = [np.array([row] * 2, dtype=np.int16) for row in ([9, 9, 0, 0], [0, 0, 9, 9])]
    signatures = [routes.signature(each) for each in counts]
    for signature in signatures:
        assert routes.choose_home(four, signature, tier=4) in "ab"
        assert routes.choose_home(four, signature, tier=0) in "cd"
        best = routes.choose_home(four, signature, tier=8)
        lane = 4 if best in "ab" else 0
        assert routes.choose_home(four, signature, tier=lane) == best, "the nearest home, if its lane has it"
    full = [load._replace(in_flight=8) if load.node in "ab" else load for load in four]
    assert routes.choose_home(full, signatures[0], tier=4) in "cd"


def replace_names(nodes, *names):
    return tuple(
        replace(node, name=name, address=f"127.0.0.1:{5700 + place}")
        for place, (node, name) in enumerate(zip(nodes, names, strict=True))
    )


def test_lanes_follow_the_file_and_need_experts_that_are_split():
    plain = separated("pressure")
    wanted = separated("pressure", lanes=True)
    routes = Routes(plain, PARTS, None, seed=1, elasticity=HALVES)
    asked = Submit("r", prompt="x", sampling={"k": 1})
    assert "lanes" not in routes.body() and routes.tier_of(asked) == 0
    routes.follow(wanted, None)
    routes.follow_lanes(loads(0, 0), 0.0)
    assert routes.tier_of(asked) == 4 and routes.choose_home(loads(1, 0), tier=4) == "a"
    routes.sent("a", (), 8, 4)
    routes.follow(wanted, None)
    assert routes.body()["lanes"]["requests"]["low"] == 1, "another placement is no reason to count anew"
    routes.follow(plain, None)
    assert "lanes" not in routes.body() and routes.choose_home(loads(1, 0), tier=4) == "b"
    assert "lanes" not in Routes(wanted, PARTS, None, seed=1).body()


def holding(placement, kinds: list[int]):
    """A placement whose homes hold the experts of requests of these kinds."""
    held = [[0, 1], [2, 3]]
    nodes = list(placement.nodes)
    expert = type(placement.nodes[1].experts[0])
    for place, kind in enumerate(kinds, 1):
        experts = tuple(expert(layer, index) for layer in (0, 1) for index in held[kind])
        nodes[place] = replace(nodes[place], experts=experts)
    return replace(placement, nodes=tuple(nodes))


@pytest.mark.parametrize("kinds", [[0, 1], [1, 0]])
def test_clusters_that_follow_what_is_asked_go_where_their_experts_are(kinds):
    wanted = separated("eldr", refit=True, tau=0.0)
    routes = Routes(wanted, PARTS, fit(), seed=1)
    routes.follow(wanted, holding(plan_placement(wanted, PARTS), kinds))
    rng = np.random.default_rng(5)
    for tick in range(60):
        counts = rng.integers(0, 2, (2, 4)).astype(np.int16)
        counts[:, (0, 1) if tick % 2 else (2, 3)] += rng.integers(5, 9, (2, 2)).astype(np.int16)
        routes.see(routes.signature(counts), tick / 10)
    routes.refit_due(6.0)()
    low = routes.signature(np.array([[7, 7, 0, 1]] * 2, dtype=np.int16))
    assert routes.choose_home(loads(0, 0), low) == ("a" if kinds == [0, 1] else "b")


def test_when_homes_come_and_go_each_gets_the_cluster_of_what_it_holds():
    """Three homes, then two: clusters for the number there is, each at the home that has its experts."""
    three = cluster("p", "a", "b", "c")
    roles = (frozenset({"prefill"}), *[frozenset({"decode", "experts"})] * 3)
    nodes = tuple(replace(node, roles=role) for node, role in zip(three.nodes, roles, strict=True))
    three = replace(three, nodes=nodes, routing=Routing(policy="eldr", tau=0.0))
    two = replace(three, nodes=(nodes[0], nodes[2], nodes[3]))
    routes = Routes(three, PARTS, fit(3), seed=1)
    high = np.array([[0, 0, 9, 9]] * 2, dtype=np.int16)
    for kinds, home in (([0, 0, 1], "c"), ([1, 0, 0], "a")):
        routes.follow(three, holding(plan_placement(three, PARTS), kinds))
        idle = [HomeLoad(name, 0, 8) for name in "abc"]
        assert routes.choose_home(idle, routes.signature(high)) == home
    for kinds, home in (([0, 1], "c"), ([1, 0], "b")):
        routes.follow(two, holding(plan_placement(two, PARTS), kinds))
        anew = routes.refit_due(0.0)
        assert (anew is not None) == (kinds == [0, 1]), "made once for each number of homes"
        if anew is not None:
            told = routes.body()
            assert "clusters for 2 homes are being made" in told["text"] and told["centroids"] == 0
            assert (
                routes.choose_home([HomeLoad("b", 3, 8), HomeLoad("c", 1, 8)], routes.signature(high)) == "c"
            )
            anew()
        idle = [HomeLoad(name, 0, 8) for name in "bc"]
        assert routes.choose_home(idle, routes.signature(high)) == home
        assert routes.body()["centroids"] == 2


def test_a_home_that_fetches_already_is_kept_by_a_router_that_learns_nothing_more():
    for policy in ("round_robin", "jsq", "pressure"):
        routes = Routes(separated(policy), PARTS, None, seed=1)
        assert {routes.choose_home(loads(0, 9), source="p", ahead="b", num_ahead=1) for _ in range(4)} == {
            "b"
        }
        assert routes.choose_home(loads(0, 9)[:1], source="p", ahead="b", num_ahead=1) == "a", "b is gone"
    eldr = Routes(separated("eldr"), PARTS, fit(), seed=1)
    assert eldr.choose_home(loads(0, 9), source="p", ahead="b", num_ahead=1) == "a", (
        "load has changed meanwhile"
    )
