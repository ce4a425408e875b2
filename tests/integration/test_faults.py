"""What happens to running answers when a node, or the coordinator, is killed, frozen or started again."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.clock import SystemClock
from tests.support.clusters import LocalCluster, read_json_lines, wait_for, write_topology
from tests.support.processes import CliProcess

LENDERS = Path(__file__).parent / "scenarios" / "lenders.toml"
NUM_TOKENS = 200
LOST_AFTER_S = 2.0
PROMPTS = [f"Story {number}: the lighthouse keeper" for number in range(1, 5)]

pytestmark = pytest.mark.timeout(120)


def start_streams(cluster: LocalCluster, prompts: Sequence[str] = PROMPTS) -> CliProcess:
    """All prompts as streams of one `submit --file`; returns while every one of them is being answered."""
    entries = [{"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True} for prompt in prompts]
    before = num_tokens(cluster)
    process = cluster.start_command("submit", "--file", cluster.write_prompts(entries))
    wait_for(
        lambda: cluster.status()["requests"]["in_flight"] == len(prompts) and num_tokens(cluster) > before,
        "all streams run",
    )
    return process


def num_tokens(cluster: LocalCluster) -> int:
    return sum(node["report"].get("tokens_generated", 0) for node in cluster.status()["nodes"])


def undisturbed(cluster: LocalCluster, prompts: Sequence[str] = PROMPTS) -> list[str]:
    entries = [{"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True} for prompt in prompts]
    return [answer["text"] for answer in cluster.answers(entries)]


def wait_until_called(cluster: LocalCluster, name: str) -> None:
    """It serves calls of what runs now."""
    before = cluster.node(name)["report"]["calls_served"]
    wait_for(lambda: cluster.node(name)["report"]["calls_served"] > before, f"{name} is called")


@pytest.fixture(scope="module")
def lenders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("lenders"), LENDERS)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def texts(lenders: LocalCluster) -> list[str]:
    return undisturbed(lenders)


@pytest.fixture
def whole_lenders(lenders: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster with all its nodes, which it has again after the test."""
    lenders.wait_until_ready()
    yield lenders
    for node in lenders.status()["nodes"]:
        if node["pid"] and psutil.pid_exists(node["pid"]):
            lenders.signal(node["name"], signal.SIGCONT)
        else:
            lenders.start_node(node["name"])
    lenders.wait_until_ready()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lender_with_replicas_may_be_lost_while_four_streams_run(
    whole_lenders: LocalCluster, texts: list[str], how: signal.Signals
) -> None:
    streams = start_streams(whole_lenders)
    wait_until_called(whole_lenders, "attic")
    whole_lenders.signal("attic", how)
    finished = streams.finish(deadline_s=30.0)
    assert finished.exit_code == 0, finished
    assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts
    wait_for(lambda: whole_lenders.node("attic")["state"] == "lost", "attic is lost")
    assert whole_lenders.answer(PROMPTS[0], "--max-tokens", "8")["text"] == texts[0][:0] + whole_lenders.answer(
        PROMPTS[0], "--max-tokens", "8"
    )["text"]


def test_a_decode_home_that_is_killed_ends_its_requests_and_no_others(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    whole_lenders.kill("laptop")
    began = SystemClock().now()
    wait_for(lambda: whole_lenders.node("laptop")["state"] == "lost", "laptop is lost")
    assert SystemClock().now() - began < LOST_AFTER_S + 1.5
    finished = streams.finish(deadline_s=30.0)
    assert finished.exit_code == 3
    assert "laptop" in finished.stderr and len(finished.stderr.splitlines()) == 1
    answers = read_json_lines(finished.stdout)
    failed = [answer for answer in answers if answer["finish_reason"] == "error"]
    assert len(failed) == 2
    for answer in failed:
        assert answer["error"]["kind"] == "cluster"
        assert answer["error"]["node"] == "laptop"
        assert "laptop" in answer["error"]["message"]
    for answer, text in zip(answers, texts, strict=True):
        assert text.startswith(answer["text"])  # whatever came was right
        assert answer in failed or answer["text"] == text
    again = whole_lenders.answer(PROMPTS[3], "--max-tokens", "16")
    assert again["home"] == "desk" and texts[3].startswith(again["text"])


def test_a_coordinator_that_is_killed_comes_back_to_nodes_that_kept_their_weights(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    pids = whole_lenders.pids()
    whole_lenders.kill("coordinator")
    finished = streams.finish(deadline_s=15.0)
    assert finished.exit_code == 3
    assert "coordinator" in finished.stderr and "Traceback" not in finished.stderr
    whole_lenders.forget_coordinator()
    loads = whole_lenders.log("attic").count("MB of weights")
    whole_lenders.start_coordinator()
    whole_lenders.wait_until_ready()
    now = whole_lenders.pids()
    assert now.pop("coordinator") != pids.pop("coordinator")
    assert now == pids
    assert whole_lenders.log("attic").count("MB of weights") == loads
    assert [answer["text"] for answer in whole_lenders.answers([{"prompt": p, "max_tokens": 200, "ignore_eos": True} for p in PROMPTS])] == texts


@pytest.fixture(scope="module")
def unreplicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    topology = write_topology(
        tmp_path_factory.mktemp("unreplicated"),
        "unreplicated",
        heartbeat='"300 ms"',
        lost_after=f'"{LOST_AFTER_S} s"',
    )
    with LocalCluster(topology) as cluster:
        yield cluster


def test_experts_without_replicas_that_are_lost_are_named_and_come_back_with_their_node(
    unreplicated: LocalCluster,
) -> None:
    texts = undisturbed(unreplicated)
    streams = start_streams(unreplicated)
    wait_until_called(unreplicated, "vault")
    unreplicated.kill("vault")
    finished = streams.finish(deadline_s=15.0)
    assert finished.exit_code == 3
    answers = read_json_lines(finished.stdout)
    failed = [answer for answer in answers if answer["finish_reason"] == "error"]
    assert failed
    for answer in failed:
        message = answer["error"]["message"]
        assert "vault" in message and "expert" in message and "layer" in message
    for answer, text in zip(answers, texts, strict=True):
        assert text.startswith(answer["text"])
        assert answer in failed or answer["text"] == text

    wait_for(lambda: unreplicated.node("vault")["state"] == "lost", "vault is lost")
    status = unreplicated.status()
    assert status["experts_without_host"] == unreplicated.node("vault")["experts"] > 0
    single = unreplicated.submit(PROMPTS[0], "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    assert single.exit_code == 3
    assert "vault" in single.stderr and len(single.stderr.splitlines()) == 1

    unreplicated.start_node("vault")
    unreplicated.wait_until_ready()
    assert undisturbed(unreplicated) == texts
