"""The scenarios that come with the testbed: each can be read and holds the demo model as it says."""

from pathlib import Path

import pytest

from topology.cluster import Cluster, split_address
from topology.costs import ModelFootprint
from topology.files import read_cluster
from topology.placement import Placement, plan_placement

FOLDER = Path(__file__).resolve().parents[2] / "testbed" / "scenarios"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.toml"))

# testbed/models/edge-moe-demo: bfloat16, tied head, and KV and activations in float32.
L, E, K, D, F, H, G, P, V = 6, 32, 4, 256, 96, 4, 2, 64, 8192
EXPERT_BYTES = 3 * D * F * 2
LAYER_BYTES = 2 * (D * (H + 2 * G) * P + H * P * D) + 4 * E * D + 4 * (2 * D + 2 * P)
DEMO = ModelFootprint(
    num_layers=L,
    moe_layers=tuple(range(L)),
    experts_per_layer=E,
    expert_bytes={"as_stored": (EXPERT_BYTES,) * L},
    embed_bytes=2 * V * D,
    head_bytes=4 * D,
    head_is_tied=True,
    layer_bytes=(LAYER_BYTES,) * L,
    kv_bytes_per_token=(2 * G * P * 4,) * L,
    context_tokens=512,
    row_workspace_bytes=4 * (4 * D + 2 * (H + 2 * G) * P + 2 * K * D + E),
    request_workspace_bytes=4 * 4 * V,
    expert_row_workspace_bytes=4 * (D + K * D + 2 * K * F),
)


def planned(name: str) -> tuple[Cluster, Placement]:
    cluster = read_cluster(FOLDER / f"{name}.toml")
    return cluster, plan_placement(cluster, DEMO)


def test_the_demo_models_numbers_are_those_of_its_readme() -> None:
    assert EXPERT_BYTES == 147_456
    assert sum(DEMO.kv_bytes_per_token) == 6 * 1024


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_holds_every_expert_and_all_the_kv_it_asks_for(name: str) -> None:
    cluster, placement = planned(name)
    assert len(placement.hosts()) == L * E
    for plan in placement.nodes:
        assert plan.experts, f"{plan.node} has a share"
        assert plan.planned_bytes <= plan.memory_bytes
        if "decode" in plan.roles:
            assert plan.kv_blocks * DEMO.block_tokens == cluster.kv_tokens


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "one_node"])
def test_no_single_node_of_several_holds_all_experts_and_no_two_are_equal(name: str) -> None:
    cluster, placement = planned(name)
    assert all(len(plan.experts) < L * E for plan in placement.nodes)
    assert len({node.memory_bytes for node in cluster.nodes}) == len(cluster.nodes)


def test_eight_unequal_nodes_hold_the_demo_model_twice_and_can_lose_any_host() -> None:
    _, placement = planned("eight_nodes")
    copies = placement.copies()
    assert len(placement.nodes) == 8
    assert copies.total() == 2 * L * E
    hosts = [plan for plan in placement.nodes if plan.roles == {"experts"}]
    homes = [plan for plan in placement.nodes if plan.roles == {"decode", "prefill", "experts"}]
    assert len(hosts) >= 3 and len(homes) >= 3
    assert all(copies[expert] >= 2 for plan in hosts for expert in plan.experts)


def test_the_unreplicated_scenario_has_a_host_with_experts_that_nobody_else_has() -> None:
    cluster, placement = planned("unreplicated")
    assert cluster.memory_ratio == 1.0 and len(cluster.nodes) == 3
    assert set(placement.copies().values()) == {1}
    assert placement.plan_of("vault").roles == {"experts"} and placement.plan_of("vault").experts


def test_scenarios_can_run_side_by_side() -> None:
    clusters = [read_cluster(FOLDER / f"{name}.toml") for name in SCENARIOS]
    ports = [
        split_address(address)[1]
        for cluster in clusters
        for address in (cluster.coordinator, *(node.address for node in cluster.nodes))
    ]
    assert len(ports) == len(set(ports))
    assert len({cluster.name for cluster in clusters}) == len(clusters)
