"""Lanes of tiers through daemons: who answers what, who helps out when a lane is full, and what becomes of a lost home's lane."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import LocalCluster, wait_for, write_topology
from tests.support.streams import Streams, greedy_prompts

LANES = Path(__file__).parent / "scenarios" / "lanes.toml"
CHEAP = {"prompt": "def main():", "k": 1}
DEAR = {"prompt": "def main():"}
NAMES = {"desk", "laptop", "attic"}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("lanes"), LANES)) as local:
        yield local


def lanes(cluster: LocalCluster) -> dict[str, Any]:
    return cluster.status()["routing"]["lanes"]


def homes(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["home"] for answer in answers]


def split(cluster: LocalCluster) -> tuple[str, set[str]]:
    """The home of the low lane and those of the high one, once all are there; which they are depends on who came first."""

    def whole() -> dict[str, Any] | None:
        found = lanes(cluster)
        return found if {*found["low"], *found["high"]} == NAMES else None

    found = wait_for(whole, f"{NAMES} in lanes")
    assert len(found["low"]) == 1
    return found["low"][0], set(found["high"])


def test_requests_land_in_the_lane_of_their_tier(cluster: LocalCluster) -> None:
    low, high = split(cluster)
    assert (lanes(cluster)["border"], lanes(cluster)["window"]) == (8, 2)
    answers = cluster.answers([CHEAP, DEAR, CHEAP, DEAR], "--max-tokens", "4")
    assert homes(answers)[::2] == [low, low]
    assert set(homes(answers)[1::2]) <= high
    assert [answer["bill"]["K"] for answer in answers] == [4, 16, 4, 16]
    near = cluster.answer("def main():", "--max-tokens", "4", "--sub-experts", "8")
    assert near["home"] in NAMES, "either lane is right near the border"
    found = lanes(cluster)
    assert found["requests"] == {"low": 2, "either": 1, "high": 2}
    assert found["crossings"] == {"low": 0, "high": 0}
    shown = cluster.cli("status").stdout
    assert f"lanes: K below 6 at {low} (2 requests, 0 crossed); above 10 at " in shown


def test_a_full_lane_crosses_the_border_where_the_other_has_room(cluster: LocalCluster) -> None:
    cluster.wait_until_idle()
    low, _ = split(cluster)
    before = lanes(cluster)["crossings"]["low"]
    found = homes(cluster.answers([CHEAP] * 4, "--max-tokens", "200", "--ignore-eos"))
    crossed = lanes(cluster)["crossings"]["low"] - before
    assert found.count(low) >= 2, "it takes as many as it runs at once"
    assert crossed == 4 - found.count(low) >= 1


def test_five_hundred_prompts_queue_for_homes_that_run_two_at_once_and_none_is_lost(
    cluster: LocalCluster,
) -> None:
    cluster.wait_until_idle()
    before = cluster.status()["requests"]
    texts = [f"Letter {number}:" for number in range(10)]
    streams = Streams(cluster, greedy_prompts(texts * 50, 2))
    wait_for(lambda: cluster.status()["requests"]["in_flight"] > 100, "far more wait than run")
    answers = streams.finish()
    found = {
        text: {tuple(answer.token_ids) for answer in answers[place::10]} for place, text in enumerate(texts)
    }
    assert len(answers) == 500 and all(len(ids) == 1 for ids in found.values())
    assert all(len(token_ids) == 2 for ids in found.values() for token_ids in ids)
    assert cluster.status()["requests"]["failed"] == before["failed"]


def test_a_lost_homes_lane_is_filled_from_the_other_and_its_requests_go_on(cluster: LocalCluster) -> None:
    cluster.wait_until_idle()
    low, _ = split(cluster)
    expected = cluster.answer("def main():", "--k", "1", "--max-tokens", "16")
    running = cluster.start_command(
        "submit",
        "--file",
        cluster.write_prompts([CHEAP | {"max_tokens": 300, "ignore_eos": True}]),
    )
    wait_for(lambda: cluster.node(low)["in_flight"], "the low lane's home is at work")
    cluster.kill(low)
    wait_for(lambda: low not in lanes(cluster)["low"], "the lost home is of no lane")
    found = lanes(cluster)
    assert len(found["low"]) == len(found["high"]) == 1
    finished = running.finish(60.0)
    assert finished.exit_code == 0, finished.stderr
    again = cluster.answer("def main():", "--k", "1", "--max-tokens", "16")
    assert again["home"] == found["low"][0] and again["token_ids"] == expected["token_ids"]
    cluster.start_node(low)
    wait_for(
        lambda: {*lanes(cluster)["low"], *lanes(cluster)["high"]} == NAMES,
        "it has a lane again",
        40.0,
    )
    assert len(lanes(cluster)["low"]) == 1
