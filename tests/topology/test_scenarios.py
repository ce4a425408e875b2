"""The scenarios that come with the testbed: each can be read and holds the demo model as it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from topology.cluster import Cluster, split_address
from topology.costs import ModelFootprint
from topology.files import read_cluster
from topology.placement import Placement, plan_placement

FOLDER = Path(__file__).resolve().parents[2] / "testbed" / "scenarios"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.toml"))

ALONE = ("one_node", "far_rooms")  # where a machine has room for everything

# testbed/models/edge-moe-demo: bfloat16 with float32 norms, tied head; KV and activations are float32. The buffers
# per row and request are those of the runtime's decoder when this was written; the scenarios leave room for twice that.
L, E, K, D, F, H, G, P, V = 6, 32, 4, 256, 96, 4, 2, 64, 8192
EXPERT_BYTES = 2 * 3 * D * F
LAYER_BYTES = 2 * (D * (H + 2 * G) * P + H * P * D + E * D) + 4 * (2 * D + 2 * P)
CONTEXT_TOKENS = 512
DEMO = ModelFootprint(
    num_layers=L,
    moe_layers=tuple(range(L)),
    experts_per_layer=E,
    expert_bytes={"as_stored": (EXPERT_BYTES,) * L},
    embed_bytes=2 * V * D,
    head_bytes=4 * D,
    head_is_tied=True,
    layer_bytes=(LAYER_BYTES,) * L,
    kv_bytes_per_token=(4 * 2 * G * P,) * L,
    context_tokens=CONTEXT_TOKENS,
    table_bytes=4 * 2 * CONTEXT_TOKENS * P // 2,
    row_workspace_bytes=9344,
    request_workspace_bytes=4 * V,
    expert_row_workspace_bytes=4 * (D + K * D),
    width=D,
    top_k=K,
)
WIDER = replace(
    DEMO,
    row_workspace_bytes=2 * DEMO.row_workspace_bytes,
    request_workspace_bytes=2 * DEMO.request_workspace_bytes,
    expert_row_workspace_bytes=2 * DEMO.expert_row_workspace_bytes,
)


def planned(name: str, footprint: ModelFootprint = DEMO) -> tuple[Cluster, Placement]:
    cluster = read_cluster(FOLDER / f"{name}.toml")
    return cluster, plan_placement(cluster, footprint)


BOTH = pytest.mark.parametrize("footprint", [DEMO, WIDER], ids=["as_measured", "wider_buffers"])


def test_the_demo_models_numbers_are_those_of_its_readme() -> None:
    assert EXPERT_BYTES == 147_456
    assert sum(DEMO.kv_bytes_per_token) == 6 * 1024


@BOTH
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_holds_every_expert_and_all_the_kv_it_asks_for(
    name: str, footprint: ModelFootprint
) -> None:
    cluster, placement = planned(name, footprint)
    assert len(placement.hosts()) == L * E
    for plan in placement.nodes:
        assert plan.experts, f"{plan.node} has a share"
        assert plan.planned_bytes <= plan.memory_bytes
        if "decode" in plan.roles:
            assert plan.kv_blocks * DEMO.block_tokens == cluster.kv_tokens


@BOTH
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name not in ALONE])
def test_no_single_node_of_several_holds_all_experts_and_no_two_are_equal(
    name: str, footprint: ModelFootprint
) -> None:
    cluster, placement = planned(name, footprint)
    assert all(len(plan.experts) < L * E for plan in placement.nodes)
    assert len({node.memory_bytes for node in cluster.nodes}) == len(cluster.nodes)


@BOTH
def test_eight_unequal_nodes_hold_the_demo_model_twice_and_can_lose_any_host(
    footprint: ModelFootprint,
) -> None:
    _, placement = planned("eight_nodes", footprint)
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
