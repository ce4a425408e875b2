"""The difference of two topology files and their placements, in values and in words."""

from dataclasses import replace

import pytest

from tests.support.planning import DEMO, EXPERTS_ONLY, cluster, even_stages, needed_bytes, node
from topology.cluster import Cluster, Link, Pin
from topology.costs import TrunkSizes
from topology.diff import ADDED, CHANGED, DISK_BYTES_PER_S, KEPT, REMOVED, diff_clusters
from topology.ids import ExpertId
from topology.layout import lay_out
from topology.speeds import LinkSpeed

EMPTY = cluster(plan="home", kv_tokens=512, links=(Link("a", "b", 0.002, 100e6),))
SIZE = DEMO.expert_bytes["as_stored"][0]


def wide(name: str, share: float, port: int, **changes: object):
    return node(name, needed_bytes(EMPTY, DEMO, 0, 6, share), port=port, **changes)


OLD = replace(EMPTY, nodes=(wide("a", 0.7, 6001), wide("b", 0.7, 6002), wide("c", 0.7, 6003)))
OLD_PLACEMENT = lay_out(OLD, DEMO)


def diff(new: Cluster, **given: object):
    return diff_clusters(OLD, OLD_PLACEMENT, new, lay_out(new, DEMO, previous=OLD_PLACEMENT), DEMO, **given)


def kinds(found) -> dict[str, str]:
    return {entry.node: entry.kind for entry in found.nodes}


def test_the_same_file_changes_nothing() -> None:
    found = diff(OLD)
    assert not found.changes_anything and found.load_bytes == found.seconds == 0
    assert set(kinds(found).values()) == {KEPT}
    assert found.step_before_s == pytest.approx(found.step_after_s)


def test_a_node_that_comes_and_one_that_goes_are_told_apart() -> None:
    new = replace(OLD, nodes=(OLD.nodes[0], OLD.nodes[1], wide("d", 0.7, 6004)))
    found = diff(new)
    assert kinds(found) == {"a": KEPT, "b": KEPT, "d": ADDED, "c": REMOVED} | {
        n: CHANGED for n in ("a", "b") if kinds(found)[n] == CHANGED
    }
    comes = next(entry for entry in found.nodes if entry.node == "d")
    assert comes.load_bytes >= sum(DEMO.layer_bytes) + len(comes.load) * SIZE and comes.load
    goes = next(entry for entry in found.nodes if entry.node == "c")
    assert goes.drop == OLD_PLACEMENT.plan_of("c").experts and goes.load_bytes == 0
    assert "d added: loads" in str(found) and "c removed: drops" in str(found)


def test_less_memory_is_said_with_both_sizes_and_costs_no_unneeded_byte() -> None:
    smaller = replace(OLD.nodes[2], memory_bytes=needed_bytes(EMPTY, DEMO, 0, 6, 0.2))
    found = diff(replace(OLD, nodes=(*OLD.nodes[:2], smaller)))
    entry = next(entry for entry in found.nodes if entry.node == "c")
    assert entry.kind == CHANGED and [change.what for change in entry.changes] == ["memory"]
    assert str(entry.changes[0]).startswith("memory ") and " -> " in str(entry.changes[0])
    assert entry.drop and not entry.load


def test_address_roles_and_links_are_named() -> None:
    moved = replace(OLD.nodes[0], address="127.0.0.1:7001")
    plain = replace(OLD.nodes[2], roles=EXPERTS_ONLY)
    new = replace(OLD, nodes=(moved, OLD.nodes[1], plain), links=(Link("a", "b", 0.004, 100e6),))
    found = diff(new)
    by_name = {entry.node: [change.what for change in entry.changes] for entry in found.nodes}
    assert by_name["a"] == ["address"] and by_name["b"] == []
    assert by_name["c"][:1] == ["roles"] and "layers" in by_name["c"] and "used for" in by_name["c"]
    assert [str(change) for change in found.links] == ["a to b: 2 ms, 100 Mbit/s -> 4 ms, 100 Mbit/s"]
    assert "c changed: roles decode, experts, prefill -> experts" in str(found)
    assert any(one.switches_trunks for one in found.migration.rounds)


def test_a_trunk_in_another_format_is_named_and_loaded_anew() -> None:
    eighth = TrunkSizes(
        embed_bytes=DEMO.embed_bytes // 2,
        head_bytes=DEMO.head_bytes,
        layer_bytes=tuple(size // 2 for size in DEMO.layer_bytes),
    )
    model = replace(DEMO, trunks={"int8": eighth})
    new = replace(OLD, nodes=tuple(replace(each, trunk_format="int8") for each in OLD.nodes))
    placed = lay_out(new, model, previous=OLD_PLACEMENT)
    found = diff_clusters(OLD, OLD_PLACEMENT, new, placed, model)
    entry = next(entry for entry in found.nodes if entry.node == "a")
    assert [str(change) for change in entry.changes][:1] == ["trunk_format as_stored -> int8"]
    assert placed.plan_of("a").trunk_bytes < OLD_PLACEMENT.plan_of("a").trunk_bytes
    assert entry.load_bytes >= sum(eighth.layer_bytes) and found.step_after_s < found.step_before_s


def test_settings_and_pins_are_named() -> None:
    new = replace(OLD, memory_ratio=1.5, pins=(Pin(ExpertId(3, 17), "b"),))
    told = [str(change) for change in diff(new).settings]
    assert told == ["memory_ratio 2.0 -> 1.5", "layer 3 expert 17: no pin -> b"]


def test_loading_from_disk_and_over_a_link_take_their_times() -> None:
    new = replace(OLD, nodes=(*OLD.nodes, wide("d", 0.7, 6004)))
    here = next(entry for entry in diff(new).nodes if entry.node == "d")
    assert here.source == "disk" and here.seconds == pytest.approx(here.load_bytes / DISK_BYTES_PER_S)
    measured = next(e for e in diff(new, disk_bytes_per_s={"d": 1e6}).nodes if e.node == "d")
    assert measured.seconds == pytest.approx(here.load_bytes / 1e6)
    links = {("d", "b"): LinkSpeed(rtt_s=1e-3, bandwidth_bps=8e9)}
    far = next(e for e in diff(new, with_files={"a"}, links=links).nodes if e.node == "d")
    assert far.source == "b" and far.seconds == pytest.approx(far.load_bytes / 1e9)


def test_the_predicted_step_is_told_before_and_after() -> None:
    empty = replace(OLD, default_link=Link("*", "*", 0.005, 200e6), links=(), memory_ratio=1.0)
    two = replace(empty, nodes=(wide("a", 0.52, 6001), wide("b", 0.52, 6002)))
    before = lay_out(two, DEMO)
    roomier = replace(two, nodes=tuple(replace(n, memory_bytes=2 * n.memory_bytes) for n in two.nodes))
    after = lay_out(roomier, DEMO, groups=[even_stages(("a", "b"), 6)])
    found = diff_clusters(two, before, roomier, after, DEMO)
    assert found.step_after_s < found.step_before_s
    assert "as predicted" in str(found)
    assert found.groups_before != found.groups_after


def test_a_model_whose_shape_is_not_known_gets_no_prediction() -> None:
    unknown = replace(DEMO, width=0, top_k=0)
    found = diff_clusters(OLD, OLD_PLACEMENT, OLD, OLD_PLACEMENT, unknown)
    assert found.step_before_s is None and "as predicted" not in str(found)


def test_bytes_of_nodes_add_up_to_the_rounds_where_nothing_is_parked() -> None:
    new = replace(OLD, nodes=(*OLD.nodes, wide("d", 0.7, 6004)))
    found = diff(new)
    assert found.load_bytes == found.migration.load_bytes
    assert found.seconds == pytest.approx(
        sum(
            max(one.load_bytes.values()) / DISK_BYTES_PER_S
            for one in found.migration.rounds
            if one.load_bytes
        )
    )
