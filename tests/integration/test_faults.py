"""What happens to running answers when a node, or the coordinator, is killed, frozen or started again."""

import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.clusters import CLOCK, LocalCluster, read_json_lines, wait_for, write_topology
from tests.support.gateways import RunningGateway
from tests.support.processes import CliProcess, wait_until_gone

LENDERS = Path(__file__).parent / "scenarios" / "lenders.toml"
ONE_EXPERT = Path(__file__).parent / "scenarios" / "one_expert.toml"
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


def homes_by_load(cluster: LocalCluster) -> list[str]:
    """Those that answer, the one with most of what runs first."""
    homes = [node for node in cluster.status()["nodes"] if "decode" in node["roles"]]
    return [node["name"] for node in sorted(homes, key=lambda node: -node["in_flight"])]


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
    again = whole_lenders.answer(PROMPTS[0], "--max-tokens", "8")
    assert texts[0].startswith(again["text"]) and "attic" not in again["nodes"]


def test_answers_of_a_decode_home_that_is_killed_go_on_elsewhere_without_a_seam(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    home, other = homes_by_load(whole_lenders)
    whole_lenders.kill(home)
    began = CLOCK.now()
    wait_for(lambda: whole_lenders.node(home)["state"] == "lost", f"{home} is lost")
    assert CLOCK.now() - began < LOST_AFTER_S + 1.5
    finished = streams.finish(deadline_s=30.0)
    assert finished.exit_code == 0, finished
    answers = read_json_lines(finished.stdout)
    assert [answer["text"] for answer in answers] == texts
    assert all(len(answer["token_ids"]) == NUM_TOKENS for answer in answers)
    again = whole_lenders.answer(PROMPTS[3], "--max-tokens", "16")
    assert again["home"] == other and texts[3].startswith(again["text"])


def test_answers_go_on_while_the_coordinator_is_killed_and_comes_back_to_nodes_that_kept_their_weights(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    pids = whole_lenders.pids()
    whole_lenders.kill("coordinator")
    whole_lenders.forget_coordinator()
    loads = whole_lenders.log("attic").count("MB of weights")
    whole_lenders.start_coordinator()
    finished = streams.finish(deadline_s=60.0)
    assert finished.exit_code == 0, finished
    assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts, (
        "no token twice or missing"
    )
    assert "its answers go on" in finished.stderr
    whole_lenders.wait_until_ready()
    now = whole_lenders.pids()
    assert now.pop("coordinator") != pids.pop("coordinator")
    assert now == pids
    assert whole_lenders.log("attic").count("MB of weights") == loads
    wait_for(
        lambda: all(node["speed"]["measured"] for node in whole_lenders.status()["nodes"]), "speeds are told"
    )
    assert undisturbed(whole_lenders) == texts


def test_answers_outlive_a_coordinator_that_is_stopped_and_end_with_the_cluster(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    pid = whole_lenders.pids()["coordinator"]
    whole_lenders.signal("coordinator", signal.SIGTERM)
    wait_until_gone([pid])
    whole_lenders.forget_coordinator()
    whole_lenders.start_coordinator()
    finished = streams.finish(deadline_s=60.0)
    assert finished.exit_code == 0, finished
    assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts
    assert "its answers go on" in finished.stderr


def test_answers_of_a_home_that_is_lost_together_with_the_coordinator_are_gone_on_with_by_their_clients(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    streams = start_streams(whole_lenders)
    home, _ = homes_by_load(whole_lenders)
    pids = whole_lenders.pids()
    whole_lenders.signal("coordinator", signal.SIGSTOP)  # it is to hear nothing of the loss
    for name in (home, "coordinator"):
        os.kill(pids[name], signal.SIGKILL)
        wait_until_gone([pids[name]])
    whole_lenders.forget_coordinator()
    whole_lenders.start_coordinator()
    finished = streams.finish(deadline_s=60.0)
    assert finished.exit_code == 0, finished
    answers = read_json_lines(finished.stdout)
    assert [answer["text"] for answer in answers] == texts
    assert all(len(answer["token_ids"]) == NUM_TOKENS for answer in answers)


def test_answers_go_on_while_the_file_was_edited_before_the_coordinator_came_back(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    before = whole_lenders.topology.read_text()
    streams = start_streams(whole_lenders)
    whole_lenders.kill("coordinator")
    whole_lenders.forget_coordinator()
    whole_lenders.topology.write_text(before.replace('"371 MiB"', '"366 MiB"', 1))  # other experts for all
    try:
        whole_lenders.start_coordinator()
        finished = streams.finish(deadline_s=60.0)
        assert finished.exit_code == 0, finished
        assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts
        whole_lenders.wait_until_ready()
        assert whole_lenders.status()["epoch"] > 1
        assert undisturbed(whole_lenders) == texts
    finally:
        whole_lenders.topology.write_text(before)
        whole_lenders.cli("apply", whole_lenders.topology, deadline_s=60.0)


def test_a_coordinator_that_is_started_anew_goes_on_with_the_file_that_was_applied(
    whole_lenders: LocalCluster, texts: list[str]
) -> None:
    edited = whole_lenders.topology.parent / "edited.toml"
    edited.write_text(
        whole_lenders.topology.read_text().replace("[cluster]\n", "[cluster]\nmax_requests = 7\n", 1)
    )
    done = whole_lenders.cli("apply", edited, deadline_s=100.0)
    assert done.exit_code == 0, done
    before = whole_lenders.status()
    loads = whole_lenders.log("attic").count("MB of weights")
    whole_lenders.kill("coordinator")
    whole_lenders.forget_coordinator()
    process = whole_lenders.start_coordinator()
    process.wait_for_line(f"going on with epoch {before['epoch']} of .*edited.toml")
    whole_lenders.wait_until_ready()
    after = whole_lenders.status()
    assert after["epoch"] == before["epoch"] and after["changes"] == before["changes"]
    assert [n["experts"] for n in after["nodes"]] == [n["experts"] for n in before["nodes"]]
    assert whole_lenders.log("attic").count("MB of weights") == loads, "nothing was loaded anew"
    assert undisturbed(whole_lenders) == texts


@pytest.mark.timeout(240)
def test_experts_that_are_lost_together_with_the_coordinator_are_waited_for_and_no_text_changes(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "roomy.toml"
    scenario.write_text(ONE_EXPERT.read_text().replace("378.15 MiB", "380 MiB"))
    prompts = ["und ", "of ", "and ", "print("]
    with LocalCluster(write_topology(tmp_path / "roomy", scenario)) as cluster:
        texts = undisturbed(cluster, prompts)
        streams = start_streams(cluster, prompts)
        pids = cluster.pids()
        cluster.signal("coordinator", signal.SIGSTOP)
        for name in ("vault", "coordinator"):
            os.kill(pids[name], signal.SIGKILL)
            wait_until_gone([pids[name]])
        cluster.forget_coordinator()
        CLOCK.sleep(
            9.0
        )  # longer than a coordinator that is there may take to say what becomes of the experts
        cluster.start_coordinator()
        finished = streams.finish(deadline_s=60.0)
        assert finished.exit_code == 0, finished
        assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts


@pytest.fixture(scope="module")
def unreplicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("one-expert"), ONE_EXPERT)) as cluster:
        yield cluster


@pytest.fixture
def gateway(unreplicated: LocalCluster) -> Iterator[RunningGateway]:
    running = RunningGateway(unreplicated)
    yield running
    running.close()


@pytest.mark.timeout(240)
def test_experts_without_replicas_that_are_lost_end_only_what_needs_them_until_their_node_is_back(
    unreplicated: LocalCluster, gateway: RunningGateway
) -> None:
    affected, others = ["und ", "of ", "and ", "10"], ["print(", "import numpy", "from ", "A"]
    whole = answers_by_prompt(unreplicated, [*affected, *others])
    assert all(whole[prompt]["nodes"]["vault"]["share"] > 0.03 for prompt in affected)
    assert not any("vault" in whole[prompt]["nodes"] for prompt in others)

    streams = start_streams(unreplicated, [*affected, *others])
    events = iter(gateway.client.completions.create(**asked(affected[0]), stream=True))
    came = [next(events).choices[0].text]
    unreplicated.kill("vault")
    with pytest.raises(openai.APIError) as cut:  # half a stream says why it ends
        came += [chunk.choices[0].text for chunk in events]
    assert_names_the_loss(cut.value.message)
    assert whole[affected[0]]["text"].startswith("".join(came)) and len(came) < NUM_TOKENS
    finished = streams.finish(deadline_s=40.0)  # it might be back in a moment, and is waited for
    assert finished.exit_code == 3
    assert "vault" in finished.stderr.splitlines()[-1]
    answers = dict(zip([*affected, *others], read_json_lines(finished.stdout), strict=True))
    failed = [prompt for prompt in answers if answers[prompt]["finish_reason"] == "error"]
    assert set(failed) == set(affected)
    for prompt in failed:
        assert_names_the_loss(answers[prompt]["error"]["message"])
        assert whole[prompt]["text"].startswith(answers[prompt]["text"])
    assert [answers[prompt]["text"] for prompt in others] == [whole[prompt]["text"] for prompt in others]

    wait_for(lambda: unreplicated.node("vault")["state"] == "lost", "vault is lost")
    assert unreplicated.status()["experts_without_host"] == unreplicated.node("vault")["experts"] > 0
    alone = unreplicated.submit(affected[0], *flags())
    assert alone.exit_code == 3 and len(alone.stderr.splitlines()) == 1
    assert_names_the_loss(alone.stderr)
    with pytest.raises(openai.InternalServerError) as refused:  # and not a 200 with half a text
        gateway.client.completions.create(**asked(affected[0]))
    assert refused.value.status_code == 503
    assert_names_the_loss(refused.value.message)
    assert unreplicated.answer(others[0], *flags())["text"] == whole[others[0]]["text"]

    unreplicated.start_node("vault")
    unreplicated.wait_until_ready()
    back = gateway.client.completions.create(**asked(affected[0]))
    assert back.choices[0].text == whole[affected[0]]["text"]
    again = answers_by_prompt(unreplicated, affected)
    assert [again[prompt]["text"] for prompt in affected] == [whole[prompt]["text"] for prompt in affected]


def test_experts_without_replicas_that_are_lost_are_loaded_where_there_is_room_and_no_text_changes(
    tmp_path: Path,
) -> None:
    scenario = tmp_path / "roomy.toml"
    scenario.write_text(ONE_EXPERT.read_text().replace("378.15 MiB", "380 MiB"))
    prompts = ["und ", "of ", "and ", "10", "print(", "from "]
    with LocalCluster(write_topology(tmp_path / "roomy", scenario)) as cluster:
        texts = undisturbed(cluster, prompts)
        streams = start_streams(cluster, prompts)
        cluster.kill("vault")
        finished = streams.finish(deadline_s=60.0)
        assert finished.exit_code == 0, finished
        assert [answer["text"] for answer in read_json_lines(finished.stdout)] == texts
        body = cluster.status()
        assert body["experts_without_host"] == 0 and "lost their host with vault" in body["last_change"]
        cluster.start_node("vault")
        cluster.wait_until_ready()
        wait_for(lambda: cluster.node("vault")["experts"] == 1, "vault has its part again")
        assert undisturbed(cluster, prompts) == texts


def asked(prompt: str) -> dict[str, Any]:
    """The same of a program."""
    options = {"model": "edge-moe-demo", "max_tokens": NUM_TOKENS, "temperature": 0}
    return {"prompt": prompt, "extra_body": {"ignore_eos": True}, **options}


def flags() -> tuple[str, ...]:
    return "--max-tokens", str(NUM_TOKENS), "--ignore-eos"


def answers_by_prompt(cluster: LocalCluster, prompts: Sequence[str]) -> dict[str, dict[str, Any]]:
    return dict(zip(prompts, cluster.answers(prompts, *flags()), strict=True))


def assert_names_the_loss(message: str) -> None:
    assert "vault" in message and re.search(r"layer \d+ experts? \d", message), message
