"""What a node is told to hold: complete, the same after the wire, and never too long for it."""

from dataclasses import replace

import pytest

from edge_runtime.coordinator.deploy import (
    deploy_for,
    experts_without_host,
    hosts_table,
    refuse_unchangeable,
)
from edge_runtime.protocol import Deploy, decode, encode
from tests.support.coordinators import cluster, footprint
from topology.cluster import DECODE, EXPERTS, MIB, find_node
from topology.errors import TopologyError
from topology.placement import plan_placement


@pytest.fixture
def three():
    """A home with everything, an experts-only node, a node with neither trunk nor room for replicas of all."""
    found = cluster("home", "attic", "shed")
    nodes = (
        found.nodes[0],
        replace(found.nodes[1], roles=frozenset({EXPERTS}), weight_format="float32"),
        replace(found.nodes[2], roles=frozenset({DECODE})),
    )
    found = replace(found, nodes=nodes, max_requests=3, call_deadline_s=2.5)
    parts = footprint(
        num_layers=3,
        moe_layers=(0, 2),
        layer_bytes=(MIB,) * 3,
        kv_bytes_per_token=(256,) * 3,
        expert_bytes={"as_stored": (MIB, 0, MIB), "float32": (2 * MIB, 0, 2 * MIB)},
    )
    return found, parts, plan_placement(found, parts)


def deploy(found, parts, placement, name, keys=None) -> Deploy:
    return deploy_for(name, found, parts, placement, model_hash="hash", public_keys=keys or {})


def test_shares_and_hosts_say_the_placement(three):
    found, _parts, placement = three
    names = [node.name for node in found.nodes]
    for name in names:
        message = deploy(*three, name)
        plan = placement.plan_of(name)
        assert (message.share.first_layer, message.share.last_layer) == (plan.first_layer, plan.last_layer)
        assert message.share.kv_blocks == plan.kv_blocks
        held = {(layer, i) for layer, ids in enumerate(message.share.experts) for i in ids}
        assert held == set(plan.experts)
        assert all(ids == sorted(ids) for ids in message.share.experts)
        hosted = {
            (layer, i): tuple(names[node] for node in nodes)
            for layer, experts in enumerate(message.hosts)
            for i, nodes in enumerate(experts)
        }
        assert hosted == placement.hosts()
        assert message.hosts[1] == [], "a dense layer"
        assert [peer.name for peer in message.peers] == names


def test_settings_say_the_file_and_the_nodes_own_format(three):
    found, _parts, placement = three
    settings = deploy(*three, "attic").settings
    assert settings == {
        "context_tokens": 512,
        "max_batch_rows": 256,
        "max_requests": 3,
        "call_deadline_s": 2.5,
        "selector": "live",
        "look_ahead": True,
        "defer": False,
        "drop": False,
        "counts_experts": False,
        "weight_format": "float32",
        "trunk_format": "as_stored",
        "planned_bytes": placement.plan_of("attic").planned_bytes,
    }
    assert find_node(found, "home").weight_format == deploy(*three, "home").settings["weight_format"]


def test_keys_go_with_the_peers_they_belong_to(three):
    keys = {"home": "h" * 40, "attic": "a" * 40, "shed": "s" * 40}
    assert {peer.name: peer.public_key for peer in deploy(*three, "home", keys).peers} == keys
    assert {peer.public_key for peer in deploy(*three, "home").peers} == {""}


@pytest.mark.parametrize("name", ["home", "attic", "shed"])
def test_a_share_is_the_same_after_the_wire(three, name):
    message = deploy(*three, name)
    assert decode(encode(message)).message == message


def test_48_layers_of_128_experts_on_8_nodes_fit_in_a_message():
    names = [f"machine-{i}" for i in range(8)]
    found = replace(cluster(*names), memory_ratio=8.0)
    parts = footprint(
        num_layers=48,
        moe_layers=tuple(range(48)),
        experts_per_layer=128,
        expert_bytes={"as_stored": (1000,) * 48},
        layer_bytes=(1000,) * 48,
        kv_bytes_per_token=(2,) * 48,
    )
    placement = plan_placement(found, parts)
    assert min(placement.copies().values()) == 8, "the largest there can be"
    for name in names:
        message = deploy(found, parts, placement, name, dict.fromkeys(names, "k" * 40))
        [frame] = encode(message)
        assert len(frame) < Deploy.max_body_bytes / 10
        assert decode([frame]).message == message


def test_experts_that_no_living_node_holds_are_counted(three):
    found, _parts, placement = three
    assert experts_without_host(placement, {"home", "attic", "shed"}) == 0
    assert experts_without_host(placement, set()) == 8
    hosts = placement.hosts()
    for name in found.node_names:
        alone = sum(nodes == (name,) for nodes in hosts.values())
        others = set(found.node_names) - {name}
        assert experts_without_host(placement, others) == alone


def test_every_expert_has_its_place_in_the_table(three):
    table = hosts_table(*three)
    assert [len(layer) for layer in table] == [4, 0, 4]
    assert all(nodes for layer in table for nodes in layer)


def test_a_context_longer_than_the_running_cluster_can_have_needs_a_new_start():
    running = cluster("n1", context_tokens=512)
    refuse_unchangeable(running, replace(running, context_tokens=100), 512)
    with pytest.raises(
        TopologyError, match=r"context_tokens: found 513, the running cluster was started with 512"
    ):
        refuse_unchangeable(running, replace(running, context_tokens=513), 512)
