"""The comparison of routers through daemons: what is asked, what is kept, what comes of it; one small run for real."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.errors import ClusterError, ConfigError
from edge_runtime.model.tokenizer import Tokenizer
from testbed.carried import DEMO_MODEL
from testbed.routing.daemons import (
    Setting,
    agreement,
    arrivals,
    checksum,
    key_of,
    read_rows,
    refuse_other_answers,
    run_all,
    shortened,
    table,
    topology_text,
)
from topology.cluster import DECODE, PREFILL
from topology.parse import parse_cluster

SMALL = Setting(DEMO_MODEL, homes=2, workers=1, copies=2.0, requests=8, tokens=24)
TEXTS = {name: [f"{name} {index} " * 40 for index in range(4)] for name in ("c", "python", "de", "fr")}


@pytest.mark.parametrize("policy", ["round_robin", "eldr", "eldr tau=0.1", "eldr affinity=1 joint"])
def test_every_policy_makes_a_file_that_can_be_read(policy):
    found = parse_cluster(topology_text(SMALL, policy, [25000, 25001, 25002, 25003]))
    assert [PREFILL in node.roles for node in found.nodes] == [True, False, False]
    assert [DECODE in node.roles for node in found.nodes] == [False, True, True]
    assert found.routing.policy == policy.split()[0] and found.memory_ratio == 2.0
    assert found.routing.tau == (0.1 if "tau=0.1" in policy else None)
    assert found.placement == ("popularity" if "joint" in policy else "spread")


def test_arrivals_are_the_same_for_a_seed_and_come_from_the_workloads_domains():
    first = arrivals(TEXTS, "task", 40, 10.0, 3)
    assert first == arrivals(TEXTS, "task", 40, 10.0, 3) != arrivals(TEXTS, "task", 40, 10.0, 4)
    assert all(a < b for (a, _), (b, _) in zip(first, first[1:], strict=False))
    assert {text.split()[0] for _, text in first} == {"c", "python"}
    drift = [text.split()[0] for _, text in arrivals(TEXTS, "drift", 40, 10.0, 3)]
    assert set(drift[:20]) <= {"c", "python"} and set(drift[20:]) <= {"de", "fr"}
    with pytest.raises(ConfigError, match="no workload is called 'noon'"):
        arrivals(TEXTS, "noon", 4, 10.0, 3)


def test_prompts_are_cut_to_the_context_whatever_a_character_takes():
    tokenizer = Tokenizer.open(DEMO_MODEL)
    for text in ("word " * 400, "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0" * 150, "\U0001f9ee" * 300):
        cut = shortened(text, tokenizer, 64)
        assert text.startswith(cut) and 32 < len(tokenizer.encode(cut)) <= 64
    assert shortened("a few words", tokenizer, 64) == "a few words"


def test_answers_that_leave_no_room_for_a_prompt_are_refused(tmp_path):
    long = replace(SMALL, tokens=512)
    with pytest.raises(ConfigError, match="answers of 512 leave no room .* context of 512 tokens"):
        run_all(
            long,
            Path(__file__).parent,
            tmp_path / "runs.jsonl",
            workloads=("task",),
            rates=(10.0,),
            policies=("jsq",),
            seeds=1,
            budget_s=0.0,
            clock=SystemClock(),
            say=print,
        )


def row(policy: str, seed: int, p50: float, p99: float) -> dict:
    names = ("ttft_p50", "distinct", "batch", "remote_calls", "imbalance", "processor_ms")
    key = {"workload": "task", "rate": 10.0, "copies": 0.0, "seed": seed, "policy": policy}
    return key | dict.fromkeys(names, 1.0) | {"tpot_p50": p50, "tpot_p99": p99}


def test_ratios_are_taken_run_by_run_against_the_balancer_that_is_best_on_average():
    rows = [row("jsq", 0, 10.0, 20.0), row("jsq", 1, 20.0, 30.0), row("random", 0, 12.0, 19.0)]
    rows += [row("random", 1, 22.0, 29.0), row("eldr", 0, 9.0, 19.0), row("eldr", 1, 18.0, 29.0)]
    lines = table(rows).splitlines()
    [eldr] = [line for line in lines if "| eldr |" in line]
    assert "-10.0%, +0.0%" in eldr and "| 2 |" in eldr and "13.50 (6.36)" in eldr
    assert " - |" in eldr  # runs from before messages were counted
    [eldr] = [line for line in table([rows[-1] | {"messages": 2.5}]).splitlines() if "| eldr |" in line]
    assert "| 2.50 (0.00) |" in eldr


def test_a_policy_that_answers_otherwise_is_an_error_and_others_are_counted():
    asked = {"requests": 3, "tokens": 6, "answers": [checksum([1, 2]), checksum([3, 4]), checksum([5, 6])]}
    first, same = row("round_robin", 0, 1.0, 1.0) | asked, row("eldr", 0, 1.0, 1.0) | asked
    older, other_work = row("jsq", 0, 1.0, 1.0), row("jsq", 1, 1.0, 1.0) | asked | {"answers": ["", "", ""]}
    refuse_other_answers([older, first, other_work], same)
    assert "3 prompts in 1 runs, 6 tokens: the same under eldr, round_robin" in agreement(
        [older, first, same]
    )
    assert "no two of them had the same prompts" in agreement([older, first, other_work])
    wrong = same | {"answers": [*asked["answers"][:2], checksum([5, 7])]}
    with pytest.raises(
        ClusterError, match="eldr answered 1 of 3 prompts otherwise than round_robin, first number 2"
    ):
        refuse_other_answers([older, other_work, first], wrong)


def test_a_damaged_file_of_runs_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    assert read_rows(path) == []
    path.write_text('{"policy": "eldr"\n')
    with pytest.raises(ConfigError, match="holds a line that is no run"):
        read_rows(path)


@pytest.mark.timeout(240)
def test_runs_are_made_once_and_kept(tmp_path):
    corpus, out = tmp_path / "corpus", tmp_path / "runs.jsonl"
    for name, texts in TEXTS.items():
        (corpus / name).mkdir(parents=True)
        (corpus / name / "valid.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    asked = {
        "workloads": ["task"],
        "rates": [50.0],
        "policies": ["round_robin", "eldr"],
        "seeds": 1,
        "budget_s": 0.0,
        "clock": SystemClock(),
        "say": lambda line: None,
    }
    first, found = run_all(SMALL, corpus, out, **asked)
    assert first["policy"] == "round_robin" and first["requests"] == 8
    assert key_of(found) == ("task", 50.0, 2.0, 0, "eldr") and found["tpot_p99"] >= found["tpot_p50"] > 0
    assert found["remote_calls"] > 0 and found["processor_ms"] > 0
    assert found["answers"] == first["answers"], "greedy answers do not hang on who routed them"
    assert len(set(first["answers"])) > 1 and first["tokens"] == found["tokens"] == 8 * 24
    assert first["blocks"] > 0 and found["blocks"] > 0, (
        "prompts were computed elsewhere than they were answered"
    )
    assert run_all(SMALL, corpus, out, **asked) == [first, found] and len(out.read_text().splitlines()) == 2


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_at_which_nothing_comes_are_refused_before_anything_starts(rate, tmp_path):
    options = {"workloads": ["task"], "policies": ["jsq"], "seeds": 1, "budget_s": 0.0}
    with pytest.raises(ConfigError, match="--rate: expected requests per second"):
        run_all(SMALL, tmp_path, tmp_path / "o", rates=[rate], clock=SystemClock(), say=print, **options)
