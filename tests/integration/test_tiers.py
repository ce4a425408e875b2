"""A cluster whose experts are split: requests at a tier beside whole ones, on one node and on two, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import LocalCluster, write_topology

PAIRS = Path(__file__).parent / "scenarios" / "two_pairs.toml"
PROMPT = "def main():"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tiers")
    with LocalCluster(write_topology(folder, "two_nodes", sub_experts="true")) as local:
        yield local


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes of the same model with half of the layers each, and two more."""
    folder = tmp_path_factory.mktemp("staged")
    keys = {"sub_experts": "true", "placement": '"similarity"', "memory_ratio": "1.0"}
    with LocalCluster(write_topology(folder, PAIRS, **keys)) as local:
        yield local


def test_tiers_over_stages_answer_as_where_all_layers_are_on_one_node(
    cluster: LocalCluster, stages: LocalCluster
) -> None:
    entries = [{"prompt": PROMPT}, {"prompt": PROMPT, "k": 2.25}, {"prompt": PROMPT, "service": "economy"}]
    expected = cluster.answers(entries, "--max-tokens", "24")
    found = stages.answers(entries, "--max-tokens", "24")
    assert len(stages.status()["groups"][0]["stages"]) > 1
    for one, staged in zip(expected, found, strict=True):
        assert staged["token_ids"] == one["token_ids"]
        for key in ("K", "K_run", "dropped", "dropped_loss"):
            assert staged["bill"].get(key) == pytest.approx(one["bill"].get(key))


def test_whole_answers_are_the_same_beside_cheaper_ones_and_bills_say_the_tier(cluster: LocalCluster) -> None:
    alone = cluster.answer(PROMPT, "--max-tokens", "24")
    entries = [{"prompt": PROMPT}, {"prompt": PROMPT, "k": 2.25}, {"prompt": PROMPT, "service": "economy"}]
    whole, cheaper, cheapest = cluster.answers(entries, "--max-tokens", "24")
    assert whole["token_ids"] == alone["token_ids"] and whole["bill"]["K"] == whole["bill"]["K_run"] == 16
    assert cheaper["bill"]["K"] == 9 and cheapest["bill"]["K"] == 4
    assert 0 < cheaper["bill"]["dropped"] < cheapest["bill"]["dropped"] < 1
    assert cheapest["bill"]["dropped_loss"] > cheaper["bill"]["dropped_loss"] > 0
    assert cheapest["usage"]["cached_tokens"] == 0, "no block of another tier is taken"
    assert cheapest["bill"]["exact_elsewhere"] > 0, "slices run at the other node too"
    again = cluster.answer(PROMPT, "--max-tokens", "24", "--sub-experts", "9")
    assert again["token_ids"] == cheaper["token_ids"]


def test_what_is_no_tier_is_refused_in_one_sentence(cluster: LocalCluster) -> None:
    for option, value, words in (
        ("--k", "5", "k is 5; allowed is 0.25 to 4 experts per token"),
        ("--sub-experts", "17", "sub_experts is 17; allowed is 1 to 16"),
        ("--service", "gold", "service is 'gold'; allowed is one of full, half, economy"),
        ("--k", "much", "'much' is not a number"),
        ("--k=2", "--quality=exact", "quality is 'exact', but k is 2.0, which leaves part of the model out"),
    ):
        refused = cluster.submit(PROMPT, option, value)
        assert refused.exit_code == 2 and words in refused.stderr


def test_a_budget_that_does_not_cover_k_raises_it(cluster: LocalCluster) -> None:
    free = cluster.answer(PROMPT, "--max-tokens", "12", "--sub-experts", "4")
    paid = cluster.answer(PROMPT, "--max-tokens", "12", "--sub-experts", "4", "--quality", "0.002")
    assert free["bill"]["K_run"] == 4 < paid["bill"]["K_run"] <= 16
    assert paid["bill"]["K"] == 4 and 0 < paid["bill"]["budget_spent"] <= 12 * 0.002
    assert free["bill"]["budget_spent"] == 0
    traced = cluster.answer(PROMPT, "--max-tokens", "4", "--sub-experts", "4", "--trace")
    assert all(0 < layer["dropped"] < 1 for layer in traced["trace"])


def test_a_file_of_prompts_is_answered_tier_by_tier_in_order_and_goes_on(cluster: LocalCluster) -> None:
    entries = [{"prompt": f"{PROMPT} # {i}", **({} if i % 2 else {"k": 1.5})} for i in range(5)]
    file, out = cluster.write_prompts(entries, "batch.jsonl"), cluster.topology.parent / "answers.jsonl"
    done = cluster.cli("batch", file, "--out", out, "--max-tokens", "6", "--size", "2", "--rule", "exact")
    assert done.exit_code == 0, done
    assert "a token of a batch takes, measured: 1 at K 6" in done.stderr and "at up to K" in done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["bill"].get("K") for answer in answers] == [6, 16, 6, 16, 6]
    faulty = cluster.write_prompts([{"prompt": PROMPT}, {"prompt": PROMPT, "k": 9}], "faulty.jsonl")
    faulty.write_text("\n" + faulty.read_text())
    refused = cluster.cli("batch", faulty, "--out", out.with_name("none"))
    assert refused.exit_code == 2 and f"{faulty}, line 3: k is 9; allowed is 0.25" in refused.stderr
    told = cluster.cli("submit", "--file", faulty, "--max-tokens", "2")
    assert told.exit_code == 2 and "1 of 2 prompts failed\n  line 3: k is 9; allowed" in told.stderr
    options = "--max-tokens", "6", "--size", "2"
    again = cluster.cli("batch", file, "--out", out, *options)
    assert again.exit_code == 0 and "holds the answers to these prompts already" in again.stderr
    other = cluster.cli("batch", file, "--out", out, "--max-tokens", "7")
    assert other.exit_code == 2 and "exists already" in other.stderr


def test_the_tuned_gate_serves_tiers_and_leaves_whole_requests_as_they_are(
    cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, flags = tmp_path_factory.mktemp("linear"), ("--max-tokens", "16")
    whole = cluster.answer(PROMPT, *flags)
    by_neurons = cluster.answer(PROMPT, *flags, "--sub-experts", "6")
    topology = write_topology(folder, "two_nodes", sub_experts="true", gate='"linear"')
    with LocalCluster(topology) as tuned:
        assert tuned.answer(PROMPT, *flags)["token_ids"] == whole["token_ids"]
        found = tuned.answer(PROMPT, *flags, "--sub-experts", "6")
        assert found["bill"]["K_run"] == pytest.approx(6) and found["bill"]["exact_elsewhere"] > 0
        assert found["bill"]["dropped"] != by_neurons["bill"]["dropped"], "another gate chose"
