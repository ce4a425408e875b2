"""The tables of `status` and `plan`: every number is there, nothing is folded, and no cell is taken for markup."""

import json
from dataclasses import replace

from edge_runtime.tables import plan_body, plan_table, status_table
from tests.support.coordinators import cluster, footprint
from tests.support.traits import traits_of
from topology.cluster import MIB
from topology.placement import plan_placement


def group(*nodes: str, serves: bool = True) -> dict:
    """A decode group of two layers for each node."""
    stages = [
        {"node": name, "first_layer": 2 * index, "last_layer": 2 * index + 1}
        for index, name in enumerate(nodes)
    ]
    return {"stages": stages, "serves": serves, "in_flight": 3}


def status(**changes: object) -> dict:
    node = {
        "name": "n1",
        "roles": ["decode", "experts"],
        "state": "ready",
        "pid": 77,
        "address": "127.0.0.1:5601",
        "memory_planned_bytes": 400 * MIB,
        "memory_used_bytes": 300 * MIB,
        "experts": 8,
        "in_flight": 2,
        "fault": None,
        "report": {"kv_blocks_total": 64, "kv_blocks_free": 60, "tokens_generated": 123, "calls_served": 9},
        "speed": {"declared": {"memory_bytes_per_s": None, "flops": None}, "measured": None, "cores": None},
    }
    return {
        "cluster": "test",
        "ready": True,
        "state": "ready",
        "to_start": "",
        "waiting_for": "",
        "epoch": 1,
        "requests": {"in_flight": 2, "finished": 5, "failed": 1, "refused": 7},
        "experts_without_host": 0,
        "groups": [group("n1")],
        "nodes": [node | changes],
        "links": [],
    }


def test_a_ready_cluster_is_shown_with_every_number():
    head, requests, _, columns, row = status_table(status()).splitlines()
    assert head == "cluster test: ready, placement epoch 1"
    assert requests == "requests: 2 in flight, 5 finished, 1 failed, 7 refused"
    assert columns.split()[:4] == ["node", "roles", "state", "pid"]
    cells = ["n1", "decode,experts", "ready", "77", "127.0.0.1:5601", "400.0", "300.0", "8", "60", "of", "64"]
    assert row.split() == [*cells, "2", "123", "9"]


def test_a_group_of_stages_is_shown_with_its_layers_and_a_plain_home_is_not():
    body = status() | {"groups": [group("n1"), group("n2", "n3"), group("n4", "n5", serves=False)]}
    lines = [line for line in status_table(body).splitlines() if line.startswith("group")]
    assert lines == [
        "group of 2 stages: n2 layers 0-1, n3 layers 2-3: serves, 3 in flight",
        "group of 2 stages: n4 layers 0-1, n5 layers 2-3: lacks a node, 3 in flight",
    ]


def test_a_cluster_that_waits_says_for_what_and_shows_faults_and_lost_experts():
    body = status(state="failed", fault="no memory", pid=None, report={})
    body |= {
        "ready": False,
        "state": "waiting",
        "waiting_for": "n1 failed (no memory)",
        "experts_without_host": 8,
    }
    text = status_table(body)
    assert "waiting for n1 failed (no memory)" in text and "8 experts have no living host" in text
    assert text.splitlines()[-1] == "n1: no memory"
    assert text.splitlines()[-2].split()[3] == "-"


def test_addresses_and_names_are_shown_letter_by_letter():
    """`:a:` is an emoji and `[red]` a colour to a console; here they are parts of an address and a name."""
    for cell in ("[fe80::a:b:1]:5601", "[red]:1", "host:100:x"):
        assert f" {cell} " in status_table(status(address=cell))


def test_nothing_is_folded_however_long(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    name = "n" * 200
    lines = status_table(status(name=name, address="h" * 255 + ":1")).splitlines()
    assert len(lines) == 5 and lines[-1].startswith(name)


def test_what_is_declared_is_shown_beside_what_was_measured():
    measured = {
        "memory_bytes_per_s": 8.123456e9,
        "flops": 6e10,
        "call_overhead_s": 0.0001,
        "experts": {"bytes_per_s": 2e10, "flops": 5e10, "overhead_s": 1e-5},
    }
    declared = {"memory_bytes_per_s": 9e9, "flops": None}
    body = status(speed={"declared": declared, "measured": measured, "cores": 2.0})
    link = {
        "between": ["n1", "n2"],
        "declared": {"rtt_s": 0.001, "bandwidth_bps": 1e9},
        "measured": {"rtt_s": 0.0048, "bandwidth_bps": 2e8, "rate_is_bound": False},
    }
    near = link | {"measured": {"rtt_s": 0.0, "bandwidth_bps": 1.8e10, "rate_is_bound": True}}
    text = status_table(body | {"links": [link, near]})
    assert "n1: memory 9 GB/s declared, 8.12 GB/s, compute 60 GFLOP/s, experts 20 GB/s, a call 100 us" in text
    assert (
        "n1 - n2: round trip 1 ms declared, 4.8 ms measured; 1 Gbit/s declared, 200 Mbit/s measured" in text
    )
    assert "1 ms declared, too short to tell, measured; 1 Gbit/s declared, over 18 Gbit/s measured" in text


def test_a_speed_that_no_memory_has_is_not_shown_as_one():
    experts = {"bytes_per_s": 8e12, "flops": 5e10, "overhead_s": 1e-5}
    measured = {"memory_bytes_per_s": 8e9, "flops": 6e10, "call_overhead_s": 1e-4, "experts": experts}
    declared = {"memory_bytes_per_s": None, "flops": None}
    text = status_table(status(speed={"declared": declared, "measured": measured, "cores": 2.0}))
    assert "experts no time beside arithmetic" in text


def test_a_plan_shows_the_same_bytes_as_its_json():
    found = replace(cluster("n1", "n2"), memory_ratio=1.5)
    placement = plan_placement(found, footprint())
    body = plan_body(found, footprint(), placement)
    assert json.loads(json.dumps(body)) is not None
    assert (body["experts"], body["copies"], body["replicated"]) == (8, 12, 4)
    text = plan_table(body)
    assert text.startswith(
        "cluster test: 8 experts in 12 copies (at most 1.5 per expert), 4 of them more than once"
    )
    for row in body["nodes"]:
        plan = placement.plan_of(row["name"])
        assert row["planned_bytes"] == plan.planned_bytes and row["memory_bytes"] == plan.memory_bytes
        [line] = [line for line in text.splitlines() if line.startswith(f"{row['name']} ")]
        assert f"{plan.planned_bytes / MIB:.1f}" in line.split()
        assert f"{row['name']}: {row['why']}" in text


def test_a_plan_of_a_calibrated_model_says_what_is_served_where_requests_live():
    parts = footprint()
    found = replace(cluster("n1", "n2"), memory_ratio=1.5, placement="similarity")
    traits = traits_of(parts.moe_layers, parts.experts_per_layer)
    body = plan_body(found, parts, plan_placement(found, parts, traits=traits), traits)
    assert 0 < body["coverage"]["exact"] <= body["coverage"]["covered"] <= 1
    line = plan_table(body).splitlines()[1]
    assert line.startswith("placed by similarity, ") and f"{body['coverage']['exact']:.1%} of choices" in line
