"""What another file would change, as the coordinator says it: the placement that applying it leads to, in bytes."""

import json
from dataclasses import replace

from edge_runtime.coordinator.deploy import Plan
from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.coordinator.preview import preview_of, slower_warning
from edge_runtime.coordinator.state import Joined
from tests.support.coordinators import cluster, footprint
from topology.cluster import MIB, Node
from topology.placement import plan_placement

TWO = cluster("n1", "n2")
THREE = replace(
    TWO,
    nodes=(*TWO.nodes, Node(name="n3", address="127.0.0.1:5700", memory_bytes=400 * MIB)),
    memory_ratio=3.0,
)


def two_that_are_there() -> Epochs:
    epochs = Epochs(TWO, footprint(), plan_placement(TWO, footprint()), 0.0)
    for name in TWO.node_names:
        epochs.apply(Joined(name, name.encode(), "one", 1), 0.0)
    return epochs


def test_a_preview_promises_what_applying_allocates():
    epochs = two_that_are_there()
    plan = epochs.work_out(epochs.ask(THREE)).plan
    planned = preview_of(TWO, epochs.placement, TWO.node_names, plan, footprint())
    body = json.loads(json.dumps(planned.body))
    [n3] = [node for node in body["nodes"] if node["name"] == "n3"]
    share = plan.placement.plan_of("n3")
    assert n3["kind"] == "added" and n3["load_experts"] == len(share.experts)
    assert n3["load_bytes"] == share.expert_bytes + share.trunk_bytes
    assert body["load_bytes"] == sum(node["load_bytes"] for node in body["nodes"]) and body["rounds"] >= 1
    assert "n3 added" in planned.text and "to load" in planned.text
    holds = body["holds"]["n3"]
    assert holds["weight_bytes"] == n3["load_bytes"] and holds["kv_bytes"] == share.kv_bytes > 0
    assert sum(size for part, size in holds.items() if part.endswith("_bytes")) == share.planned_bytes
    assert "n3 will hold weights" in planned.text and "KV" in planned.text
    assert epochs.change is None and epochs.plans.keys() == {1}, "it was only asked"


def test_a_file_that_changes_nothing_says_so():
    epochs = two_that_are_there()
    planned = preview_of(
        TWO, epochs.placement, TWO.node_names, epochs.work_out(epochs.ask(TWO)).plan, footprint()
    )
    assert planned.text == "nothing changes" and not planned.body["changes_anything"]


def test_a_change_that_makes_tokens_far_slower_is_warned_of_where_it_hurts_most():
    said = slower_warning({1: 0.001, 4: 0.002, 8: 0.004}, {1: 0.0021, 4: 0.114, 16: 9.0})
    assert said == (
        "warning: tokens come 57 times as slowly after this change: 2 ms now and 114 ms then with 4 requests at once, "
        "as predicted"
    )
    assert slower_warning({1: 0.001}, {1: 0.002}) is None and slower_warning({}, {1: 1.0}) is None
    assert "with 1 request at once" in (slower_warning({1: 0.001}, {1: 0.0021}) or "")


def test_a_plan_over_a_far_slower_link_says_so_in_its_last_line():
    epochs = two_that_are_there()
    sizes = replace(footprint(), width=64, top_k=2)
    few = replace(epochs.placement.plan_of("n1"), experts=epochs.placement.plan_of("n1").experts[::2])
    apart = replace(
        epochs.placement, nodes=(few, epochs.placement.plan_of("n2"))
    )  # n1 needs n2 in every layer
    slow = Plan(replace(TWO, default_link=replace(TWO.default_link, rtt_s=0.2)), apart)
    planned = preview_of(TWO, apart, TWO.node_names, slow, sizes)
    assert planned.text.splitlines()[-1] == planned.body["warning"]
    assert planned.body["warning"].startswith("warning: tokens come ")
