"""Whole clusters over links that are slow, cut and healed while answers run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import CLOCK, LocalCluster, read_json_lines, wait_for, write_topology
from tests.support.processes import run_cli

LENDERS = Path(__file__).parent / "scenarios" / "lenders.toml"
PROMPT = "Once upon a time"

pytestmark = pytest.mark.timeout(120)


def link(cluster: LocalCluster, *words: str) -> str:
    """`edge-runtime testbed link`, which must succeed."""
    done = run_cli(
        "testbed", "link", *words, "--topology", cluster.topology, env=cluster.env, deadline_s=30.0
    )
    assert done.exit_code == 0, done
    return done.stdout


def shaped(folder: Path, scenario: str | Path) -> LocalCluster:
    cluster = LocalCluster(write_topology(folder, scenario))
    cluster.env["EDGE_SHAPE"] = "1"
    return cluster


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with shaped(tmp_path_factory.mktemp("shaped"), "two_nodes") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lenders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with shaped(tmp_path_factory.mktemp("shaped"), LENDERS) as cluster:
        yield cluster


def test_a_slower_link_makes_slower_tokens_and_the_same_ones(two_nodes):
    flags = ("--max-tokens", "12", "--ignore-eos")
    quick = two_nodes.answer(PROMPT, *flags)
    assert "20 ms" in link(two_nodes, "desk", "attic", "--rtt", "40ms")
    slow = two_nodes.answer(PROMPT, *flags)
    link(two_nodes, "desk", "attic", "--heal")
    healed = two_nodes.answer(PROMPT, *flags)
    assert quick["text"] == slow["text"] == healed["text"]
    assert slow["timing"]["tpot_s"] > 0.04, "not even one round trip per token"
    assert quick["timing"]["tpot_s"] < slow["timing"]["tpot_s"] > healed["timing"]["tpot_s"]


def test_an_answer_pauses_while_a_link_is_cut_and_goes_on_as_it_would_have(two_nodes):
    entry = {"prompt": PROMPT, "max_tokens": 80, "ignore_eos": True}
    [undisturbed] = two_nodes.answers([entry])
    # An answer takes seconds then, so that it is cut and not over.
    link(two_nodes, "desk", "attic", "--rtt", "10ms")
    process = two_nodes.start_command("submit", "--file", two_nodes.write_prompts([entry]))
    before = two_nodes.node("attic")["report"]["calls_served"]
    wait_for(lambda: two_nodes.node("attic")["report"]["calls_served"] > before, "attic is called")
    began = CLOCK.now()
    link(two_nodes, "desk", "attic", "--cut", "2s")
    [answer] = read_json_lines(process.finish(60.0).stdout)
    assert answer["text"] == undisturbed["text"]
    assert CLOCK.now() - began > 2.0
    link(two_nodes, "desk", "attic", "--heal")
    assert two_nodes.status()["ready"]


def test_a_node_that_is_cut_off_from_all_is_lost_and_comes_back_by_itself(lenders):
    entries = [{"prompt": f"{PROMPT} {number}", "max_tokens": 200, "ignore_eos": True} for number in range(4)]
    undisturbed = [answer["text"] for answer in lenders.answers(entries)]
    process = lenders.start_command("submit", "--file", lenders.write_prompts(entries))
    wait_for(lambda: lenders.status()["requests"]["in_flight"] == 4, "all run")
    link(lenders, "attic", "all", "--cut", "12s")
    wait_for(lambda: lenders.node("attic")["state"] == "lost", "attic is lost", 15.0)
    answers = read_json_lines(process.finish(90.0).stdout)
    assert [answer["text"] for answer in answers] == undisturbed
    wait_for(lambda: lenders.status()["ready"], "attic is back", 30.0)


def test_a_cluster_that_was_not_started_so_says_what_to_do(one_node):
    done = run_cli(
        "testbed",
        "link",
        "coordinator",
        "all",
        "--rtt",
        "1ms",
        "--topology",
        one_node.topology,
        env=one_node.env,
    )
    assert done.exit_code == 3
    assert "up --shape" in done.stderr
