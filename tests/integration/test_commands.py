"""The commands' contract for scripts, on running clusters: fields, order, streaming, exit codes."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from tests.support.clusters import LocalCluster, wait_for
from tests.support.processes import CliProcess, run_cli

CONTEXT = 512


def one_sentence(text: str) -> str:
    """The only line of standard error, without its `error:`."""
    assert text.startswith("error: ") and len(text.splitlines()) == 1, text
    return text.removeprefix("error: ")


def test_submit_prints_one_object_with_every_field_of_the_contract(eight_nodes: LocalCluster) -> None:
    finished = eight_nodes.submit("Once upon a time", "--temperature", "0", "--max-tokens", "12")
    assert finished.exit_code == 0 and finished.stderr == ""
    assert len(finished.stdout.splitlines()) == 1
    answer = json.loads(finished.stdout)
    assert len(answer["token_ids"]) == 12 and answer["text"]
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 12 and usage["prompt_tokens"] > 0
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert 0 < answer["timing"]["tpot_s"] < 5 and 0 < answer["timing"]["ttft_s"] < 5
    names = {node["name"] for node in eight_nodes.status()["nodes"]}
    assert len(answer["nodes"]) > 1 and set(answer["nodes"]) <= names
    assert sum(did["share"] for did in answer["nodes"].values()) == pytest.approx(1.0, abs=1e-4)
    assert answer["bill"]["exact_here"] + answer["bill"]["exact_elsewhere"] == pytest.approx(1.0)


def test_a_file_is_answered_in_its_order_with_each_lines_own_options(eight_nodes: LocalCluster) -> None:
    entries = [
        {"prompt": f"Chapter {number}", "max_tokens": 30 - 7 * number, "ignore_eos": True}
        for number in range(4)
    ]
    answers = eight_nodes.answers(
        [*entries, {"prompt": "The end", "seed": 3, "temperature": 0.8}], "--max-tokens", "5"
    )
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [30, 23, 16, 9, 5]
    for entry, answer in zip(entries, answers, strict=False):
        alone = eight_nodes.answer(entry["prompt"], "--max-tokens", str(entry["max_tokens"]), "--ignore-eos")
        assert alone["text"] == answer["text"]


def test_a_line_that_cannot_be_served_fails_alone_and_sets_the_exit_code(one_node: LocalCluster) -> None:
    path = one_node.write_prompts(["Hello", {"prompt": "word " * 600}, "Bye"])
    finished = one_node.cli("submit", "--file", path, "--max-tokens", "4")
    assert finished.exit_code == 2
    reasons = [json.loads(line)["finish_reason"] for line in finished.stdout.splitlines()]
    assert reasons == ["length", "error", "length"]
    summary, line = finished.stderr.splitlines()
    assert summary == "error: 1 of 3 prompts failed"
    assert line.startswith("  line 2: ") and str(CONTEXT) in line


def test_text_comes_while_it_is_made(one_node: LocalCluster) -> None:
    """The first characters are there while the cluster still works on the rest."""
    command = [sys.executable, "-m", "edge_runtime", "submit", "--topology", str(one_node.topology)]
    argv = [*command, "--max-tokens", "450", "--ignore-eos", "Once upon a time"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | one_node.env) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 4096)
        in_flight = one_node.status()["requests"]["in_flight"]
        rest = process.stdout.read()
    assert first and in_flight == 1 and len(rest) > len(first)
    assert process.returncode == 0
    whole = one_node.answer("Once upon a time", "--max-tokens", "450", "--ignore-eos")["text"]
    assert (first + rest).decode() == whole + "\n"


def test_a_stop_string_ends_the_answer_and_is_not_shown(one_node: LocalCluster) -> None:
    whole = one_node.answer("Once upon a time", "--max-tokens", "40")["text"]
    stop = whole[20:24]
    answer = one_node.answer("Once upon a time", "--max-tokens", "40", "--stop", stop)
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"


def test_chat_applies_the_template_and_trace_says_who_did_what(eight_nodes: LocalCluster) -> None:
    raw = eight_nodes.answer("How do I list files?", "--max-tokens", "4")
    finished = eight_nodes.submit("How do I list files?", "--chat", "--trace", "--max-tokens", "4")
    assert finished.exit_code == 0
    assert json.loads(finished.stdout)["usage"]["prompt_tokens"] > raw["usage"]["prompt_tokens"]
    assert "home " in finished.stderr and "expert slots" in finished.stderr


def test_a_seed_repeats_a_random_answer_on_any_cluster(
    one_node: LocalCluster, eight_nodes: LocalCluster
) -> None:
    flags = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "7", "--max-tokens", "24")
    first, second = one_node.answer("My recipe", *flags), eight_nodes.answer("My recipe", *flags)
    assert first["token_ids"] == second["token_ids"]


def test_status_shows_every_node_with_its_roles_pid_state_and_memory(eight_nodes: LocalCluster) -> None:
    finished = eight_nodes.cli("status", "--json")
    assert finished.exit_code == 0
    nodes = json.loads(finished.stdout)["nodes"]
    assert len(nodes) == 8
    for node in nodes:
        assert node["roles"] in (["experts"], ["decode", "experts", "prefill"])
        assert node["state"] == "ready" and node["name"] in " ".join(psutil.Process(node["pid"]).cmdline())
        assert (
            0 < node["memory_used_bytes"] and 0 < node["memory_planned_bytes"] <= node["memory_limit_bytes"]
        )
    table = eight_nodes.cli("status").stdout
    assert all(node["name"] in table and str(node["pid"]) in table for node in nodes)


def test_the_plan_is_what_the_nodes_hold(eight_nodes: LocalCluster) -> None:
    planned = {node["name"]: node for node in json.loads(eight_nodes.cli("plan", "--json").stdout)["nodes"]}
    for node in eight_nodes.status()["nodes"]:
        row = planned[node["name"]]
        assert node["experts"] == row["num_experts"]
        assert node["memory_planned_bytes"] == row["planned_bytes"]
        assert node["weight_bytes"] == pytest.approx(row["trunk_bytes"] + row["expert_bytes"], rel=0.05)


def test_the_doctor_is_content_with_a_running_cluster(one_node: LocalCluster) -> None:
    finished = one_node.cli("doctor")
    assert finished.exit_code == 0, finished
    assert "FAIL" not in finished.stdout and "solo" in finished.stdout


def test_the_variable_names_the_topology(one_node: LocalCluster) -> None:
    env = one_node.env | {"EDGE_RUNTIME_TOPOLOGY": str(one_node.topology)}
    assert json.loads(run_cli("status", "--json", env=env).stdout)["cluster"] == "one-node"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(one_node: LocalCluster) -> None:
    finished = one_node.submit("word " * 600)
    assert finished.exit_code == 2 and finished.stdout == ""
    sentence = one_sentence(finished.stderr)
    assert str(CONTEXT) in sentence and any(int(n) >= 600 for n in sentence.split() if n.isdigit()), sentence


@pytest.mark.parametrize("prompt", [" ", "\n\n\t"], ids=["a space", "lines"])
def test_white_space_is_a_prompt(prompt: str, one_node: LocalCluster) -> None:
    assert one_node.answer(prompt, "--max-tokens", "3")["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-p", "1.5"),
        ("--stop-token-id", "8192"),
        ("--logprobs", "-2"),
        ("--temperature", "nan"),
    ],
    ids=" ".join,
)
def test_an_option_out_of_range_is_one_sentence_and_the_users_fault(
    flags: tuple[str, ...], one_node: LocalCluster
) -> None:
    finished = one_node.submit("hello", *flags)
    assert finished.exit_code == 2 and finished.stdout == ""
    assert flags[0].removeprefix("--").replace("-", "_").removesuffix("_id") in one_sentence(finished.stderr)


FIFTY_CLIENTS = """
import sys, threading
from edge_runtime.client import Client, Prompt
from edge_runtime.clock import SystemClock
def ask(number):
    with Client(sys.argv[1], None, SystemClock()) as client:
        client.connect(20.0)
        client.run([Prompt(prompt=f"Letter {number}:", sampling={"max_tokens": 450, "ignore_eos": True})], wait_ready_s=20.0)
for number in range(50):
    threading.Thread(target=ask, args=(number,)).start()
"""


def test_fifty_clients_that_are_killed_leave_every_block_free_and_the_memory_as_it_was(
    eight_nodes: LocalCluster,
) -> None:
    def resident() -> dict[str, int]:
        return {name: psutil.Process(pid).memory_info().rss for name, pid in eight_nodes.pids().items()}

    before = resident()
    address = eight_nodes.status()["coordinator"]["address"]
    with CliProcess(address, program=[sys.executable, "-c", FIFTY_CLIENTS]) as clients:
        wait_for(lambda: eight_nodes.status()["requests"]["in_flight"] == 50, "50 clients are being answered")
        os.kill(clients.pid, 9)
    eight_nodes.wait_until_idle(deadline_s=10.0)
    grown = {name: bytes_ - before[name] for name, bytes_ in resident().items()}
    # First batches take up to 40 MiB of a fresh process for good; what a session leaves would come on top, 50 times.
    assert max(grown.values()) < 48 * 2**20, grown


def test_every_node_stays_within_its_share_and_350_megabytes(
    eight_nodes: LocalCluster, one_node: LocalCluster
) -> None:
    for cluster in (eight_nodes, one_node):
        kv_bytes = {
            node["name"]: node["kv_bytes"]
            for node in json.loads(cluster.cli("plan", "--json").stdout)["nodes"]
        }
        for node in cluster.status()["nodes"]:
            resident = psutil.Process(node["pid"]).memory_info().rss
            assert resident <= node["weight_bytes"] + kv_bytes[node["name"]] + 350_000_000, node["name"]


@pytest.mark.parametrize("fault", ["] [", "memory = 5"])
def test_a_file_edited_into_a_fault_still_reaches_its_cluster_and_says_the_fault(
    one_node: LocalCluster, fault: str
) -> None:
    text = one_node.topology.read_text()
    try:
        one_node.topology.write_text(text.replace("[cluster]\n", f"[cluster]\n{fault}\n", 1))
        status = one_node.cli("status", "--json")
        applied = one_node.cli("apply", one_node.topology)
    finally:
        one_node.topology.write_text(text)
    assert status.exit_code == 0 and json.loads(status.stdout)["ready"], status
    *told, last = status.stderr.splitlines()
    assert "topology.toml, line " in told[0] and "as it was when the cluster was started" in last
    assert applied.exit_code == 2 and "line " in applied.stderr
