"""Clusters whose nodes each run some layers: the answers of one node, bit for bit, whatever happens to a stage."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.client import Prompt
from tests.support import greedy
from tests.support.clusters import LocalCluster, wait_for, write_topology
from tests.support.streams import Streams, greedy_prompts

HERE = Path(__file__).parent / "scenarios"
SHARED = "In the old library by the harbour, where nobody had opened the tall windows for years, the keeper wrote: "

pytestmark = pytest.mark.timeout(180)


def mixed_prompts() -> list[Prompt]:
    """32 prompts of unequal length, greedy and drawn, some with one beginning, with penalties and log probabilities."""
    found = []
    for index, prompt in enumerate(greedy.prompts()):
        sampling: dict[str, Any] = {"max_tokens": 12 + index % 9, "logprobs": index % 3}
        if index % 2:
            sampling |= {"temperature": 0.8, "seed": index, "top_p": 0.95, "top_k": 40 * (index % 4)}
        if index % 5 == 0:
            sampling |= {"repetition_penalty": 1.2}
        text = SHARED * (index % 4) + prompt
        found.append(Prompt(prompt=text, sampling=sampling))
    return found


def told(streams: Streams) -> list[tuple[Any, ...]]:
    return [(answer.text, answer.token_ids, answer.logprobs) for answer in streams.finish()]


def nodes_of(status: dict[str, Any]) -> list[list[str]]:
    return [[stage["node"] for stage in group["stages"]] for group in status["groups"]]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("four"), HERE / "four_stages.toml")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("pairs"), HERE / "two_pairs.toml")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Four nodes so small that stages have a part of their experts elsewhere."""
    keys = {"placement": '"similarity"', "memory_ratio": "1.0"}
    topology = write_topology(tmp_path_factory.mktemp("lending"), HERE / "two_pairs.toml", **keys)
    topology.write_text(topology.read_text().replace("410 MiB", "364 MiB"))
    with LocalCluster(topology) as cluster:
        yield cluster


def test_32_streams_over_four_stages_get_the_tokens_and_bits_of_one_node(
    four: LocalCluster, one_node: LocalCluster
) -> None:
    status = four.status()
    assert nodes_of(status) == [["a", "b", "c", "d"]] and status["groups"][0]["serves"]
    assert next(node for node in status["nodes"] if node["name"] == "a")["experts"] == 0
    prompts = mixed_prompts()
    assert told(Streams(four, prompts)) == told(Streams(one_node, prompts))
    four.wait_until_idle()
    assert four.node("a")["report"]["prefix_hits"] > 0
    assert four.node("a")["report"]["numbers"]["stage_steps"] > 30


def test_every_stage_holds_its_layers_and_what_was_planned_for_it(four: LocalCluster) -> None:
    planned = {node["name"]: node for node in json.loads(four.cli("plan", "--json").stdout)["nodes"]}
    whole = sum(row["trunk_bytes"] for row in planned.values())
    for node in four.status()["nodes"]:
        row = planned[node["name"]]
        assert node["layers"] == row["layers"]
        assert node["weight_bytes"] == pytest.approx(row["trunk_bytes"] + row["expert_bytes"], rel=0.05)
        assert row["trunk_bytes"] < 0.6 * whole
        assert node["memory_used_bytes"] < node["memory_limit_bytes"]


def test_an_answer_says_what_every_stage_did_for_it(four: LocalCluster) -> None:
    answer = four.answer("Once upon a time", "--max-tokens", "8", "--trace")
    assert {name: did["role"] for name, did in answer["nodes"].items()} == {
        "a": "home",
        "b": "stage",
        "c": "stage",
        "d": "stage",
    }
    assert answer["bill"]["exact_here"] + answer["bill"]["exact_elsewhere"] == pytest.approx(1)
    assert answer["bill"]["exact_elsewhere"] > 0.1, "layer 0 has its experts elsewhere"
    trace = answer["trace"]
    assert [(entry["layer"], entry["node"]) for entry in trace] == list(enumerate("abbccd"))
    assert [entry["exact_here"] for entry in trace] == [0, 1, 1, 1, 1, 1] and trace[0]["exact_elsewhere"] == 1


def test_a_budget_is_spent_over_stages_and_exact_answers_stay_so(lending: LocalCluster) -> None:
    assert len(lending.status()["groups"][0]["stages"]) > 1
    alone = lending.answer("def main():", "--max-tokens", "24", "--ignore-eos")
    entries = [{"prompt": "def main():"}, {"prompt": "def main():", "quality": 0.2}]
    exact, quick = lending.answers(entries, "--max-tokens", "24", "--ignore-eos")
    assert exact["token_ids"] == alone["token_ids"] and exact["bill"].get("budget_spent", 0) == 0
    bill = quick["bill"]
    assert bill["substituted"] > 0 and 0 < bill["budget_spent"] <= 24 * 0.2 and bill["budget_left"] >= 0
    assert bill["budget_spent"] + bill["budget_left"] <= 24 * 0.2 * (1 + 1e-9)
    shares = [bill[key] for key in ("exact_here", "exact_elsewhere", "substituted", "deferred", "dropped")]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)


def test_an_abort_frees_the_blocks_of_all_stages(four: LocalCluster) -> None:
    with four.start_command("submit", "--max-tokens", "400", "--ignore-eos", "--", "A long story") as process:
        wait_for(lambda: four.node("a")["report"]["running"] == 1, "it is being answered")
        process.stop()
    four.wait_until_idle()


def test_a_stage_that_is_killed_costs_its_streams_a_pause_and_no_token(
    pairs: LocalCluster, one_node: LocalCluster
) -> None:
    assert nodes_of(pairs.status()) == [["a", "b"], ["c", "d"]]
    prompts = greedy_prompts(greedy.prompts()[:12], 150)
    expected = told(Streams(one_node, prompts))
    streams = Streams(pairs, prompts)
    wait_for(lambda: streams.all_run and streams.num_tokens > 200, "streams run", 60.0)
    in_flight = [group["in_flight"] for group in pairs.status()["groups"]]
    assert sum(in_flight) == 12 and all(in_flight), "the faster has more"
    pairs.kill("d")
    assert told(streams) == expected
    wait_for(lambda: ["c", "d"] not in nodes_of(pairs.status()), "layers without d", 30.0)
    pairs.start_node("d")
    pairs.wait_until_ready()
    wait_for(
        lambda: pairs.status()["change"] is None and pairs.node("d")["used_for"], "d has a part again", 30.0
    )
    assert told(Streams(pairs, prompts)) == expected


def test_streams_run_on_while_the_file_goes_from_stages_to_homes_and_back(
    pairs: LocalCluster, one_node: LocalCluster
) -> None:
    prompts = greedy_prompts(greedy.prompts()[:16], 150)
    expected = told(Streams(one_node, prompts))
    streams = Streams(pairs, prompts)
    text = pairs.topology.read_text()
    edited = pairs.topology.parent / "edited.toml"
    for number, plan in enumerate(("home", "stages")):
        wait_for(
            lambda: streams.all_run and streams.num_tokens > 300 * (number + 1),  # noqa: B023
            "streams run",
            60.0,
        )
        edited.write_text(re.sub('plan = "[a-z]*"', f'plan = "{plan}"', text))
        done = pairs.cli("apply", edited, deadline_s=60.0)
        assert done.exit_code == 0, f"{plan}: {done}\n{pairs.logs()}"
        assert any(len(nodes) > 1 for nodes in nodes_of(pairs.status())) == (plan == "stages")
    assert told(streams) == expected
    pairs.wait_until_idle()
    assert pairs.status()["requests"]["failed"] == 0
