"""Whom a home calls: itself first, then as few peers as will do."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.host_choice import choose_hosts
from topology.ids import ExpertId


def choose(
    hosts: dict[int, list[str]], peers: list[str], *, alive: list[str] | None = None, layer: int = 0
) -> list[int]:
    """The choice for one layer of four experts."""
    chosen = choose_hosts(
        {ExpertId(layer, index): nodes for index, nodes in hosts.items()},
        home=peers[0],
        alive=peers if alive is None else alive,
        num_layers=layer + 1,
        num_experts=4,
        peers=peers,
    )
    assert chosen.shape == (layer + 1, 4) and chosen.dtype == np.int32
    return chosen[layer].tolist()


def test_a_local_expert_is_never_called_elsewhere() -> None:
    assert choose({0: ["b", "home"], 1: ["home"]}, ["home", "b"])[:2] == [0, 0]


def test_the_home_need_not_be_among_the_living() -> None:
    assert choose({0: ["home"], 1: ["b"]}, ["home", "b"], alive=["b"])[:2] == [0, 1]


def test_an_expert_that_nobody_living_holds_has_no_host() -> None:
    assert choose({0: ["b"], 1: ["c"]}, ["home", "b", "c"], alive=["c"]) == [-1, 2, -1, -1]


def test_a_host_that_is_no_peer_is_not_called() -> None:
    assert choose({0: ["stranger"]}, ["home", "b"], alive=["b", "stranger"])[0] == -1


def test_one_peer_that_holds_everything_is_called_rather_than_two() -> None:
    hosts = {0: ["b", "c"], 1: ["d", "c"], 2: ["b", "c"]}
    assert choose(hosts, ["home", "b", "c", "d"])[:3] == [2, 2, 2]


def test_a_replica_takes_over_when_a_peer_is_lost() -> None:
    hosts = {0: ["b", "c"], 1: ["b"]}
    assert choose(hosts, ["home", "b", "c"])[:2] == [1, 1]
    assert choose(hosts, ["home", "b", "c"], alive=["c"])[:2] == [2, -1]


def test_the_homes_share_out_equal_replicas() -> None:
    homes = [f"home{index}" for index in range(40)]
    picks = [choose({0: ["x", "y"]}, [home, "x", "y"])[0] for home in homes]
    assert 8 <= picks.count(1) <= 32


def test_the_order_of_peers_does_not_change_whom_is_called() -> None:
    hosts = {0: ["x", "y"], 1: ["y", "z"], 2: ["z", "x"]}
    one = [["home", "x", "y", "z"][index] for index in choose(hosts, ["home", "x", "y", "z"])[:3]]
    other = [["home", "z", "x", "y"][index] for index in choose(hosts, ["home", "z", "x", "y"])[:3]]
    assert one == other


def test_another_process_makes_the_same_choice() -> None:
    code = (
        "from topology.host_choice import choose_hosts; from topology.ids import ExpertId;"
        "h = {ExpertId(l, i): ['x', 'y', 'z'] for l in range(9) for i in range(4)};"
        "print(choose_hosts(h, home='home', alive='xyz', num_layers=9, num_experts=4, peers=['home', *'xyz']).tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_peers_must_begin_with_the_home() -> None:
    with pytest.raises(ValueError, match="begin with the home"):
        choose_hosts({}, home="a", alive=[], num_layers=1, num_experts=1, peers=["b"])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sets(st.sampled_from("habcdefg")), min_size=4, max_size=4),
    st.sets(st.sampled_from("habcdefg")),
)
def test_every_choice_is_a_living_holder_and_a_peer_is_called_only_if_needed(
    held: list[set[str]], alive: set[str]
) -> None:
    peers = list("habcdef")
    hosts = {index: sorted(nodes) for index, nodes in enumerate(held)}
    chosen = choose(hosts, peers, alive=sorted(alive), layer=2)
    for nodes, index in zip(held, chosen, strict=True):
        reachable = {"h"} & nodes or nodes & alive & set(peers)
        assert (index == -1) == (not reachable)
        assert index == -1 or peers[index] in reachable
    called = {peers[index] for index in chosen if index > 0}
    remote = [nodes for nodes, index in zip(held, chosen, strict=True) if index > 0]
    best = [peer for peer in alive & set(peers) if remote and all(peer in nodes for nodes in remote)]
    assert not best or len(called) == 1, "one peer that has everything is called alone"
