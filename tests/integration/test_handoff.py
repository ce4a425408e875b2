"""Prompts computed on one machine and answered on another: the same tokens as on one, and whoever may be lost meanwhile."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import LocalCluster, read_json_lines, wait_for, write_topology
from tests.support.greedy import answers as greedy_answers
from tests.support.greedy import differences
from tests.support.greedy import prompts as greedy_prompts

SEPARATE = Path(__file__).parent / "scenarios" / "separate.toml"
WORKERS, HOMES = {"press", "mill"}, {"desk", "laptop"}
BEGINNING = (
    "The keeper of the lighthouse wrote down what he had seen that night, the ships and the lights and "
)
PROMPTS = [f"{BEGINNING * 3} number {number}, which" for number in range(6)]
NUM_TOKENS = 80

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path_factory.mktemp("separate"), SEPARATE)) as cluster:
        yield cluster


def entries(num_tokens: int = NUM_TOKENS) -> list[dict]:
    return [{"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True} for prompt in PROMPTS]


def test_answers_are_those_of_one_machine_and_say_who_did_what(separate: LocalCluster) -> None:
    chosen = range(0, 32, 4)
    found = separate.answers(
        [{"prompt": greedy_prompts()[index], "max_tokens": 64, "temperature": 0} for index in chosen]
    )
    for index, answer in zip(chosen, found, strict=True):
        assert not differences(answer["token_ids"], greedy_answers()[index])
        roles = {role: name for name, node in answer["nodes"].items() if (role := node["role"]) != "experts"}
        assert answer["home"] == roles["home"] in HOMES and roles["prefill"] in WORKERS
        assert answer["bill"]["exact_here"] + answer["bill"]["exact_elsewhere"] == pytest.approx(1)
    separate.wait_until_idle()
    routing = separate.status()["routing"]
    assert routing["policy"] == "eldr" and routing["centroids"] == 2
    assert sum(home["requests"] for home in routing["homes"].values()) == len(found)


def test_an_answer_of_one_token_is_never_routed(separate: LocalCluster) -> None:
    before = separate.status()["routing"]["homes"]
    answer = separate.answer(PROMPTS[0], "--max-tokens", "1")
    assert answer["home"] in WORKERS and len(answer["token_ids"]) == 1
    assert separate.status()["routing"]["homes"] == before


def test_blocks_travel_once_and_prompts_that_begin_alike_are_computed_once(separate: LocalCluster) -> None:
    first = separate.answer(PROMPTS[0], "--max-tokens", "4")
    again = separate.answer(PROMPTS[0], "--max-tokens", "4")
    assert again["token_ids"] == first["token_ids"] and again["home"] == first["home"]
    assert again["usage"]["cached_tokens"] >= 48

    def fetched() -> int:
        return sum(separate.node(name)["report"]["numbers"].get("blocks_fetched", 0) for name in HOMES)

    wait_for(lambda: fetched() > 0, "blocks came to a home")
    assert separate.status()["routing"]["homes"][again["home"]]["hit_blocks"] > 0


def test_blocks_travel_while_the_rest_of_their_prompt_is_computed(separate: LocalCluster) -> None:
    def ahead() -> float:
        return sum(separate.node(name)["report"]["numbers"].get("blocks_fetched_ahead", 0) for name in HOMES)

    before = ahead()
    prompts = [f"Number {number} of them: {BEGINNING * 4}" for number in range(4)]
    found = separate.answers([{"prompt": prompt, "max_tokens": 8} for prompt in prompts])
    assert all(len(answer["token_ids"]) == 8 for answer in found)
    wait_for(lambda: ahead() > before, "blocks came to a home before their prompt was computed")
    separate.wait_until_idle()


def test_a_trace_tells_of_prompt_and_answer_and_of_everybody_who_took_part(separate: LocalCluster) -> None:
    answer = separate.answer(PROMPTS[1], "--max-tokens", "6", "--trace")
    roles = [node["role"] for node in answer["nodes"].values()]
    assert roles.count("home") == roles.count("prefill") == 1
    slots = sum(node["expert_slots"] for node in answer["nodes"].values())
    assert slots == (answer["usage"]["prompt_tokens"] - answer["usage"]["cached_tokens"] + 5) * 6 * 4
    assert [entry["layer"] for entry in answer["trace"]] == list(range(6))
    for way in ("exact_here", "exact_elsewhere"):
        assert sum(entry[way] for entry in answer["trace"]) / 6 == pytest.approx(
            answer["bill"][way], abs=1e-3
        )


@pytest.mark.parametrize("nodes", [WORKERS | HOMES, HOMES])
def test_readers_that_go_leave_no_block_in_use_on_either_side(
    separate: LocalCluster, nodes: set[str]
) -> None:
    asked = [
        {"prompt": f"{number} {BEGINNING * 5}", "max_tokens": 200, "ignore_eos": True} for number in range(16)
    ]
    streams = separate.start_command("submit", "--file", separate.write_prompts(asked))
    # As soon as anybody has some of it: computed, on its way, or being answered.
    wait_for(lambda: any(separate.node(name)["in_flight"] for name in nodes), "a request is there")
    streams.stop()
    separate.wait_until_idle()
    assert len(separate.answer(PROMPTS[2], "--max-tokens", "3")["token_ids"]) == 3


@pytest.mark.parametrize("role", ["prefill", "home"])
def test_either_side_may_be_killed_while_answers_run(separate: LocalCluster, role: str) -> None:
    separate.wait_until_ready()
    expected = [answer["token_ids"] for answer in separate.answers(entries())]
    streams = separate.start_command("submit", "--file", separate.write_prompts(entries()))
    names = WORKERS if role == "prefill" else HOMES
    # Killed as soon as it is seen at work, whatever of prefill, handoff and decoding that is.
    victim = wait_for(
        lambda: next((name for name in sorted(names) if separate.node(name)["in_flight"]), None),
        "somebody is at work",
    )
    separate.kill(victim)
    finished = streams.finish(deadline_s=40.0)
    assert finished.exit_code == 0, f"{finished}\n{separate.logs()}"
    assert [answer["token_ids"] for answer in read_json_lines(finished.stdout)] == expected
    separate.start_node(victim)
    separate.wait_until_ready()
    separate.wait_until_idle()


def test_prompts_that_are_computed_when_the_coordinator_is_lost_are_answered_by_the_next(
    separate: LocalCluster,
) -> None:
    separate.wait_until_ready()
    expected = [answer["token_ids"] for answer in separate.answers(entries())]
    streams = separate.start_command("submit", "--file", separate.write_prompts(entries()))
    worker = wait_for(
        lambda: next((name for name in sorted(WORKERS) if separate.node(name)["in_prefill"]), None),
        "a prompt is computed",
    )
    separate.signal(worker, signal.SIGSTOP)  # so that it has the prompt in hand
    pid = separate.pids()[worker]
    separate.kill("coordinator")
    separate.forget_coordinator()
    os.kill(pid, signal.SIGCONT)
    separate.start_coordinator()
    finished = streams.finish(deadline_s=60.0)
    assert finished.exit_code == 0, f"{finished}\n{separate.logs()}"
    assert [answer["token_ids"] for answer in read_json_lines(finished.stdout)] == expected
    separate.wait_until_ready()
    separate.wait_until_idle()
