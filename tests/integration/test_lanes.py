"""Lanes of tiers through daemons: who answers what, who helps out when a lane is full, and what becomes of a lost home's lane."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import LocalCluster, wait_for, write_topology

LANES = Path(__file__).parent / "scenarios" / "lanes.toml"
CHEAP = {"prompt": "def main():", "k": 1}
DEAR = {"prompt": "def main():"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("lanes"), LANES)) as local:
        yield local


def lanes(cluster: LocalCluster) -> dict[str, Any]:
    return cluster.status()["routing"]["lanes"]


def homes(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["home"] for answer in answers]


def test_requests_land_in_the_lane_of_their_tier(cluster: LocalCluster) -> None:
    found = lanes(cluster)
    assert (found["low"], found["high"], found["border"], found["window"]) == (
        ["desk"],
        ["laptop", "attic"],
        8,
        2,
    )
    answers = cluster.answers([CHEAP, DEAR, CHEAP, DEAR], "--max-tokens", "4")
    assert homes(answers)[::2] == ["desk", "desk"]
    assert set(homes(answers)[1::2]) == {"laptop", "attic"}, "the least pressure decides within a lane"
    assert [answer["bill"].get("K") for answer in answers] == [4, None, 4, None]
    near = cluster.answer("def main():", "--max-tokens", "4", "--sub-experts", "8")
    assert near["home"] == "desk", "either lane is right near the border, and the first of equals is taken"
    found = lanes(cluster)
    assert found["requests"] == {"low": 2, "either": 1, "high": 2}
    assert found["crossings"] == {"low": 0, "high": 0}
    shown = cluster.cli("status").stdout
    assert (
        "lanes: K below 6 at desk (2 requests, 0 crossed); above 10 at laptop, attic (2, 0 crossed)" in shown
    )


def test_a_full_lane_crosses_the_border_where_the_other_has_room(cluster: LocalCluster) -> None:
    cluster.wait_until_idle()
    before = lanes(cluster)["crossings"]["low"]
    found = homes(cluster.answers([CHEAP] * 4, "--max-tokens", "200", "--ignore-eos"))
    crossed = lanes(cluster)["crossings"]["low"] - before
    assert found.count("desk") >= 2, "it takes as many as it runs at once"
    assert crossed == 4 - found.count("desk") >= 1


def test_a_lost_homes_lane_is_filled_from_the_other_and_its_requests_go_on(cluster: LocalCluster) -> None:
    cluster.wait_until_idle()
    expected = cluster.answer("def main():", "--k", "1", "--max-tokens", "16")
    running = cluster.start_command(
        "submit",
        "--file",
        cluster.write_prompts([CHEAP | {"max_tokens": 300, "ignore_eos": True}]),
    )
    wait_for(lambda: cluster.node("desk")["in_flight"], "desk is at work")
    cluster.kill("desk")
    wait_for(lambda: "desk" not in lanes(cluster)["low"], "the lost home is of no lane")
    found = lanes(cluster)
    assert len(found["low"]) == len(found["high"]) == 1
    finished = running.finish(60.0)
    assert finished.exit_code == 0, finished.stderr
    again = cluster.answer("def main():", "--k", "1", "--max-tokens", "16")
    assert again["home"] == found["low"][0] and again["token_ids"] == expected["token_ids"]
    cluster.start_node("desk")
    wait_for(
        lambda: {"desk", "laptop", "attic"} == {*lanes(cluster)["low"], *lanes(cluster)["high"]},
        "desk has a lane again",
        40.0,
    )
    assert len(lanes(cluster)["low"]) == 1
