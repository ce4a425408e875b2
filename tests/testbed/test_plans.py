"""The topology files of the plans that are measured, and the table of what came of them. Starts nothing."""

from pathlib import Path

import pytest

from testbed.plans import CHOICE, Measured, on_other_ports, table, variants, with_plan
from topology.cluster import Cluster
from topology.files import read_cluster, read_cluster_text

SCENARIO = Path(__file__).resolve().parents[2] / "testbed" / "scenarios" / "far_rooms.toml"


@pytest.fixture
def clusters() -> dict[str, Cluster]:
    """Plan -> the cluster of its file."""
    text = SCENARIO.read_text(encoding="utf-8")
    return {
        name: read_cluster_text(changed, SCENARIO)
        for name, changed in variants(text, read_cluster(SCENARIO)).items()
    }


def test_every_plan_has_the_same_machines_and_links(clusters: dict[str, Cluster]) -> None:
    assert list(clusters) == ["solo", "one home", "2 stages", "4 stages", CHOICE]
    assert [cluster.plan for cluster in clusters.values()] == ["solo", "home", "stages", "stages", "auto"]
    assert [cluster.stages for cluster in clusters.values()] == [None, None, 2, 4, None]
    machines = {
        tuple((node.name, node.address, node.memory_bytes) for node in cluster.nodes)
        for cluster in clusters.values()
    }
    assert len(machines) == 1 and {cluster.default_link.rtt_s for cluster in clusters.values()} == {0.005}


def test_the_one_home_is_no_machine_that_could_do_it_alone(clusters: dict[str, Cluster]) -> None:
    roles = {node.name: node.roles for node in clusters["one home"].nodes}
    assert [name for name in roles if "decode" in roles[name]] == ["desk"]
    assert all(roles[name] == {"experts"} for name in roles if name != "desk")


def test_another_plan_takes_the_place_of_the_one_there_was_and_ports_move() -> None:
    text = '[cluster]\nname = "x"\nplan = "stages"\nstages = 3\naddress = "127.0.0.1:5000"\n'
    assert with_plan(text, "home") == '[cluster]\nplan = "home"\nname = "x"\naddress = "127.0.0.1:5000"\n'
    assert '"127.0.0.1:5050"' in on_other_ports(text, 50)


def test_the_choice_is_held_against_the_fastest_of_the_others() -> None:
    cells = [
        Measured("solo", 4, "tower", 2.0, 4.0, 3.5, 4.5),
        Measured("2 stages", 4, "tower layers 0-2, desk layers 3-5", 8.0, 10.0, 9.0, 11.0),
        Measured(CHOICE, 4, "tower", 2.0, 4.2, 4.0, 4.4),
        Measured("4 stages", 4, why="no room"),
    ]
    lines = table(cells).splitlines()
    assert lines[2].startswith("| solo | 4 | 4.00 (3.50-4.50) | 2.00 | 0.50 |")
    assert "no room" in table(cells)
    assert lines[-1] == (
        "4 requests: the planner's choice takes +5% beside solo, the fastest of the others; it is solo"
    )
