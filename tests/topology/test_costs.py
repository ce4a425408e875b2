"""What parts of a model weigh: the parts of a split trunk add up to the whole, and a little more if the head is tied."""

from dataclasses import replace

import pytest

from topology import costs
from topology.cluster import Cluster, Node
from topology.costs import ModelFootprint

MODEL = ModelFootprint(
    num_layers=4,
    moe_layers=(1, 3),
    experts_per_layer=2,
    expert_bytes={"as_stored": (0, 10, 0, 30)},
    embed_bytes=1000,
    head_bytes=100,
    layer_bytes=(1, 2, 3, 4),
    kv_bytes_per_token=(5, 5, 7, 7),
    context_tokens=100,
    table_bytes=50,
    row_workspace_bytes=3,
    request_workspace_bytes=11,
    expert_row_workspace_bytes=2,
)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_stages_hold_the_trunk_between_them_and_the_tables_each(cut: int) -> None:
    whole = costs.trunk_bytes(MODEL, 0, 4)
    assert whole == 1000 + 100 + 10 + 50
    assert costs.trunk_bytes(MODEL, 0, cut) + costs.trunk_bytes(MODEL, cut, 4) == whole + 50


def test_a_tied_head_costs_the_last_stage_an_embedding_of_its_own() -> None:
    tied = replace(MODEL, head_is_tied=True)
    assert costs.trunk_bytes(tied, 0, 4) == costs.trunk_bytes(MODEL, 0, 4)
    assert costs.trunk_bytes(tied, 2, 4) == costs.trunk_bytes(MODEL, 2, 4) + 1000
    assert costs.trunk_bytes(tied, 0, 2) == costs.trunk_bytes(MODEL, 0, 2)


def test_no_layers_weigh_nothing() -> None:
    assert costs.trunk_bytes(MODEL, 0, 0) == 0


def test_kv_blocks_weigh_their_tokens_over_their_layers() -> None:
    assert costs.kv_block_bytes(MODEL, 0, 4) == 16 * 24
    assert costs.kv_block_bytes(MODEL, 2, 4) == 16 * 14
    assert [costs.kv_blocks(MODEL, tokens) for tokens in (1, 16, 17)] == [1, 1, 2]


def test_experts_exist_only_in_moe_layers() -> None:
    assert MODEL.experts() == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert costs.expert_bytes(MODEL, "as_stored", 3) == 30


def test_a_cap_shortens_the_context_but_never_extends_it() -> None:
    cluster = Cluster(name="c", model="m", nodes=())
    assert costs.context_limit(cluster, MODEL) == 100
    assert costs.context_limit(replace(cluster, context_tokens=40), MODEL) == 40
    assert costs.context_limit(replace(cluster, context_tokens=4000), MODEL) == 100


@pytest.mark.parametrize(
    ("roles", "num_bytes"),
    [
        ({"decode"}, 10 * 3 + 4 * 11),
        ({"experts"}, 10 * 2),
        ({"prefill", "experts"}, 10 * 3 + 4 * 11 + 10 * 2),
    ],
)
def test_workspace_follows_the_roles(roles: set[str], num_bytes: int) -> None:
    node = Node(name="n", address="127.0.0.1:1", memory_bytes=1, roles=frozenset(roles))
    cluster = Cluster(name="c", model="m", nodes=(node,), max_batch_rows=10, max_requests=4)
    assert costs.workspace_bytes(cluster, node, MODEL) == num_bytes
