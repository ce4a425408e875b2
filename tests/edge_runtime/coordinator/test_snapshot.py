"""What a coordinator leaves for the next one: the same after the disk, and used only where it still fits."""

from dataclasses import replace

import pytest

from edge_runtime.coordinator.epochs import Epochs
from edge_runtime.coordinator.snapshot import (
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    plan_to_go_on_with,
    snapshot_of,
)
from tests.edge_runtime.coordinator.test_epochs import FOUR, NAMES, PARTS, WANTED, World
from topology.placement import plan_placement


@pytest.fixture
def applied() -> World:
    """Four nodes that serve a file that was applied, after one that was not."""
    world = World()
    for name in NAMES:
        world.start(name)
    world.settle(1.0)
    epoch = world.change(WANTED[6])
    world.call("give_up", epoch, "never mind")
    world.change(WANTED[6])
    world.settle(5.0)
    return world


def snapshot(world: World) -> Snapshot:
    found = decode_snapshot(encode_snapshot(snapshot_of(world.epochs, "m", "f")))
    assert found is not None
    return found


def test_the_next_coordinator_goes_on_with_the_file_that_was_applied(applied) -> None:
    found = snapshot(applied)
    plan, why = plan_to_go_on_with(found, FOUR, "m", "f", 512)
    assert plan is not None and "going on with epoch 3" in why
    assert plan.cluster == WANTED[6] and plan.placement == applied.epochs.placement
    again = Epochs(plan.cluster, PARTS, plan.placement, 0.0, newest=found.newest, outcomes=found.outcomes)
    assert list(again.outcomes) == list(applied.epochs.outcomes)
    assert again.newest == applied.epochs.newest, "no epoch is used twice"


def test_its_nodes_hold_what_it_wants_and_load_nothing(applied) -> None:
    found = snapshot(applied)
    applied.epochs = Epochs(found.cluster, PARTS, found.placement, applied.now, newest=found.newest)
    shares = {process.name: set(process.shares) for process in applied.running()}
    for process in applied.running():
        applied.join(process)
    for process in applied.running():
        while process.inbox:
            applied.take(process)
        assert not process.loads, "what it is sent it holds already"
    applied.settle(2.0)
    applied.check_settled()
    assert {process.name: process.shares for process in applied.running()} == shares


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_hash": "other"}, "another model"),
        ({"file_hash": "other"}, "was edited since"),
        ({"cluster": replace(FOUR, name="other")}, "does not fit the file"),
    ],
)
def test_what_does_not_fit_any_more_leaves_the_file_to_count(changes, why) -> None:
    fields = {
        "format": 1,
        "model_hash": "m",
        "file_hash": "f",
        "cluster": FOUR,
        "placement": plan_placement(FOUR, PARTS),
        "newest": 1,
        "outcomes": [],
    }
    plan, told = plan_to_go_on_with(Snapshot(**(fields | changes)), FOUR, "m", "f", 512)
    assert plan is None and why in told
    assert plan_to_go_on_with(None, FOUR, "m", "f", 512) == (None, "")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"format": 2}'])
def test_what_cannot_be_read_counts_as_nothing(content) -> None:
    assert decode_snapshot(content) is None


def test_a_cut_or_newer_snapshot_counts_as_nothing(applied) -> None:
    whole = encode_snapshot(snapshot_of(applied.epochs, "m", "f"))
    assert all(decode_snapshot(whole[:end]) is None for end in range(0, len(whole), 997))
    assert decode_snapshot(whole.replace(b'"format":1', b'"format":2')) is None
