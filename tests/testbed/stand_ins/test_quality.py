import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from calibration.evaluate import Slots
from edge_runtime.artifacts import write_section
from edge_runtime.errors import UserError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from testbed.stand_ins.quality import validation_requests
from testbed.stand_ins.quality_cli import quality
from testbed.stand_ins.rules import RULES, LowestReplaced
from tests.support.calibrating import small_corpus, write_corpus
from tests.support.tiny_models import write_tiny_qwen3_moe
from topology.errors import TopologyError

E, K = 6, 3
TABLE = torch.arange(E * E).view(1, E, E).float()


def slots(rows: int = 50) -> Slots:
    logits = torch.randn(rows, E, generator=torch.Generator().manual_seed(0))
    ids = logits.argsort(1, descending=True)[:, :K]
    weights = logits.softmax(1).gather(1, ids)
    return Slots(0, torch.arange(rows), torch.zeros(rows, 4), ids.int(), weights, logits)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "drop"])
def test_the_lowest_slots_go_to_experts_that_the_row_did_not_choose(rule: str, count: int):
    given = slots()
    ids, weights = LowestReplaced(rule, count, TABLE).choose(given)
    assert torch.equal(weights, given.gate_weights)
    kept = K - count
    assert torch.equal(ids[:, :kept], given.expert_ids[:, :kept])
    for row, before in zip(ids.tolist(), given.expert_ids.tolist(), strict=True):
        assert len(set(row)) == K and not set(row[kept:]) & set(before)


def test_each_rule_takes_the_best_by_its_own_measure():
    given = slots()
    ranked = given.logits.argsort(1, descending=True)
    assert torch.equal(LowestReplaced("next").choose(given)[0][:, -1].long(), ranked[:, K])
    for row in range(len(ranked)):
        free = sorted(set(range(E)) - set(given.expert_ids[row].tolist()))
        assert int(LowestReplaced("similar", 1, TABLE).choose(given)[0][row, -1]) == free[-1]
        assert int(LowestReplaced("least", 1, TABLE).choose(given)[0][row, -1]) == free[0]


def test_dropped_weight_goes_to_the_slots_that_are_left():
    given = slots()
    ids, weights = LowestReplaced("drop", 2).choose(given)
    assert torch.equal(ids, given.expert_ids) and not weights[:, 1:].any()
    torch.testing.assert_close(weights.sum(1), given.gate_weights.sum(1))


def test_where_every_expert_is_chosen_the_slot_stays():
    given = slots()
    everyone = given._replace(expert_ids=given.logits.argsort(1).int(), gate_weights=given.logits.softmax(1))
    assert torch.equal(LowestReplaced("random").choose(everyone)[0], everyone.expert_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """A tiny random model with the demo model's tokenizer and an artifact of its own."""
    folder = write_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), vocab_size=8192, num_hidden_layers=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder)
    hash = Checkpoint.open(folder).model_hash
    for section, name in (("similarity", "centred"), ("mismatch", "mismatch")):
        write_section(folder / "calibration", section, {name: torch.rand(2, 8, 8).half()}, model_hash=hash)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


def run(*arguments: object):
    return CliRunner().invoke(quality, [*map(str, arguments)])


SHORT = "--documents", 3, "--prompt", 8, "--decode", 16, "--threads", 1


def test_the_command_prints_each_policy_and_domain(model: Path, corpus: Path):
    result = run(
        "--model", model, "--corpus", corpus, "--policy", "exact", "--policy", "least:2", *SHORT, "--csv"
    )
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["policy"], row["domain"]) for row in rows] == [
        (policy, domain) for policy in ("exact", "least:2") for domain in ("code", "numbers", "sea", "all")
    ]
    assert {float(row["rise"]) for row in rows[:4]} == {0.0} and float(rows[0]["agreement"]) == 1.0
    assert int(rows[3]["tokens"]) == 9 * 15 and float(rows[7]["changed"]) == pytest.approx(1.0, abs=0.6)


def test_all_rules_run_by_default_and_print_a_table(model: Path, corpus: Path):
    result = run("--model", model, "--corpus", corpus, *SHORT)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[1:-1]] == [f"{rule}:1" for rule in RULES]
    listed = run("--model", model, "--corpus", corpus, *SHORT, "--policy", "next", "--json")
    assert [row["domain"] for row in json.loads(listed.stdout)] == ["code", "numbers", "sea", "all"]


def test_validation_text_is_not_that_of_calibration(corpus: Path, demo_model: Path, tmp_path: Path):
    tokenizer = Tokenizer.open(demo_model)
    options = {"documents": 99, "prompt_tokens": 8, "decode_tokens": 500, "seed": 1}
    requests, domains = validation_requests(corpus, tokenizer, **options)
    assert domains == ["code", "numbers", "sea"] and len(requests) == 36
    only = write_corpus(tmp_path, {"sea": ["a wave " * 30]}, "calib.jsonl")
    with pytest.raises(UserError, match="no text for validation"):
        validation_requests(only, tokenizer, **options)


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--policy", "best"), "known are exact, next"),
        (("--policy", "next:0"), "known are exact, next"),
        (("--decode", 900), "context"),
        (("--artifact", "gone"), "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(model: Path, corpus: Path, arguments, why: str):
    long = write_corpus(corpus.parent / "long", {"sea": ["wave " * 900]}, "valid.jsonl")
    result = run("--model", model, "--corpus", long, *SHORT, *arguments)
    assert isinstance(result.exception, UserError) and why in str(result.exception), result.output
    assert "\n" not in str(result.exception)


def selected(corpus: Path, *policies: str) -> dict[str, dict[str, float]]:
    asked = [argument for policy in policies for argument in ("--policy", policy)]
    result = run("--corpus", corpus, *SHORT, "--rtt", "5ms", "--json", *asked)
    assert result.exit_code == 0, result.output
    return {row["policy"]: row for row in json.loads(result.stdout) if row["domain"] == "all"}


def test_the_selectors_policies_lose_nothing_at_budget_0_and_stay_within_any_other(corpus: Path):
    rows = selected(corpus, "live:0", "paper:0", "paper:balanced", "live:fast")
    for name in ("live:0.0", "paper:0.0"):
        assert rows[name]["rise"] == rows[name]["substituted"] == rows[name]["spent"] == 0.0
        assert rows[name]["agreement"] == 1.0
    for name in ("paper:balanced", "live:fast"):
        row = rows[name]
        assert 0.0 < row["spent"] <= row["budget"]
        assert row["substituted"] == pytest.approx(row["changed"], abs=1e-6) and row["substituted"] > 0
        assert row["exact_here"] + row["exact_elsewhere"] + row["substituted"] == pytest.approx(1.0)
        assert row["exact_elsewhere"] < rows["live:0.0"]["exact_elsewhere"]


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("--policy", "live:much"), "live:much: the quality must be"),
        (("--policy", "live:-1"), "from 0 to 1"),
        (("--policy", "paper", "--home", "attic"), "no home attic"),
        (("--policy", "paper", "--topology", "gone.toml"), "gone.toml"),
    ],
)
def test_a_selector_that_cannot_be_had_is_refused_in_one_sentence(corpus: Path, arguments, why: str):
    result = run("--corpus", corpus, *SHORT, *arguments)
    assert result.exception is not None and why in str(result.exception), result.output
    assert isinstance(result.exception, UserError | TopologyError) and "\n" not in str(result.exception)


def test_a_cluster_of_another_model_is_refused_with_both_hashes(model: Path, corpus: Path, demo_model: Path):
    result = run("--model", model, "--corpus", corpus, *SHORT, "--policy", "live")
    said = str(result.exception)
    assert isinstance(result.exception, UserError)
    assert Checkpoint.open(model).model_hash in said and Checkpoint.open(demo_model).model_hash in said
