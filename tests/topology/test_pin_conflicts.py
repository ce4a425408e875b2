"""Pins that put members of a similarity group on one node, which is what the placement would set apart."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.planning import cluster
from topology.cluster import Cluster, Node, Pin
from topology.grouping import Groups
from topology.ids import ExpertId
from topology.pin_conflicts import pin_conflicts
from topology.traits import ExpertTraits

# Layers 1 and 4 of six experts: 0, 1 and 2 are a group in both; 3 and 4 in layer 4; the others are alone.
GROUP_OF = np.array([[0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 1, 2]], dtype=np.int32)
TRAITS = ExpertTraits(
    (1, 4), np.full((2, 6), 1 / 6), np.ones((2, 6, 6)), Groups(GROUP_OF, np.zeros((2, 6), dtype=np.int32))
)
NODES = tuple(Node(name=name, address="127.0.0.1:1", memory_bytes=2**30) for name in "abc")


def pinned(*pins: tuple[int, int, str], rule: str = "similarity", nodes=NODES) -> Cluster:
    found = tuple(Pin(ExpertId(layer, index), node) for layer, index, node in pins)
    return replace(cluster(), nodes=nodes, placement=rule, pins=found)


def test_a_group_that_pins_hold_on_one_node_is_named_with_node_pins_and_remedy():
    (told,) = pin_conflicts(pinned((4, 3, "b"), (4, 4, "b"), (4, 0, "b")), TRAITS)
    assert told.startswith(
        "layer 4: experts 3 and 4 are one similarity group, and pins put all of them (3 and 4) on b"
    )
    assert "pin at most one of them to b" in told and "another placement than similarity" in told


def test_a_part_of_a_group_is_told_as_such_and_each_node_for_itself():
    found = pin_conflicts(pinned((1, 0, "a"), (1, 2, "a"), (4, 0, "c"), (4, 1, "c"), (4, 2, "c")), TRAITS)
    assert len(found) == 2 and "pins put 2 of them (0 and 2) on a" in found[0]
    assert "pins put all of them (0, 1 and 2) on c" in found[1]


@pytest.mark.parametrize(
    "found",
    [
        pinned(),
        pinned((1, 0, "a"), (1, 1, "b"), (1, 2, "c")),
        pinned((1, 0, "a"), (1, 3, "a"), (1, 4, "a")),
        pinned((1, 0, "a"), (4, 1, "a")),
        pinned((1, 0, "a"), (1, 1, "a"), rule="spread"),
        pinned((1, 0, "a"), (1, 1, "a"), nodes=NODES[:1]),
        pinned((0, 0, "a"), (0, 1, "a")),
    ],
    ids=["no pins", "apart", "other groups", "other layers", "another rule", "one node", "not calibrated"],
)
def test_nothing_is_said_where_nothing_is_lost(found):
    assert pin_conflicts(found, TRAITS) == []
