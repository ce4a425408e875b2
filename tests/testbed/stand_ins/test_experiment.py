"""Stand-ins at one home on paper, and tokens that roam: what must hold of every comparison."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edge_runtime.artifacts import Artifact
from edge_runtime.selector.learned import read_losses, read_traits
from testbed.stand_ins import daemons
from testbed.stand_ins.cli import stand_ins
from testbed.stand_ins.daemons import Arrivals, as_markdown, shaped_file, with_quality
from testbed.stand_ins.decision_times import decision_times
from testbed.stand_ins.experiment import ROAMING, Policy, as_csv, roam, shaped, swept
from testbed.stand_ins.roam import Rule, uneven_servers, walk
from tests.support.calibrating import small_corpus
from topology.cluster import Link
from topology.files import read_cluster

LATE_ONES = ("live, late replies", "the same, no look-ahead", "the same, no redundancy")


@pytest.fixture(scope="module")
def artifact(demo_model) -> Artifact:
    return Artifact.open(demo_model / "calibration")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The comparison at one home, over two short texts of each domain of a small corpus."""
    folder = small_corpus(tmp_path_factory.mktemp("corpus"))
    told = CliRunner().invoke(
        stand_ins,
        ["--corpus", str(folder), "--documents", "1", "--prompt", "16", "--decode", "10", "--streams", "2"]
        + ["--threads", "1", "--out", str(folder / "out"), "--json"],
        catch_exceptions=False,
    )
    assert told.exit_code == 0, told.output
    found = json.loads(told.stdout)["home"]
    with (folder / "out" / "home.csv").open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == [row["policy"] for row in found]
    return found


def test_exact_policies_cost_nothing_and_others_keep_to_their_budget(rows):
    for row in rows:
        ways = ("local_exact", "local_substitute", "remote", "remote_late")
        assert sum(row[way] for way in ways) == pytest.approx(1.0)
        assert (row["remote_late"] > 0) == (row["policy"] in LATE_ONES)
        if row["policy"].endswith("exact"):
            assert (row["perplexity_rise"], row["spent_per_token"], row["local_substitute"]) == (0, 0, 0)
        elif row["budget"] != "":
            assert row["spent_per_token"] <= row["budget"] * (1 + 1e-6)


def test_stand_ins_save_time_and_bytes_at_the_same_placement(rows):
    by_name = {row["policy"]: row for row in rows}
    exact, live, local = by_name["similarity, exact"], by_name["live"], by_name["local only"]
    assert local["tpot_ms"] < live["tpot_ms"] < exact["tpot_ms"]
    assert local["remote"] < 0.01, "all but experts for which nobody may stand in"
    assert local["mb_per_1000_tokens"] < 0.2 * live["mb_per_1000_tokens"]
    assert live["local_exact"] == pytest.approx(exact["local_exact"], abs=0.05)
    assert by_name["similarity, exact"]["local_exact"] > by_name["the same, no redundancy"]["local_exact"]


def test_every_policy_of_the_sweep_can_be_placed(repository, artifact):
    cluster = read_cluster(repository / "testbed" / "scenarios" / "eight_nodes.toml")
    for policy in swept():
        changed = shaped(cluster, policy, 0.005, 2e8)
        assert len({node.name for node in changed.nodes}) == (policy.nodes or 8)
        assert changed.memory_ratio == (policy.ratio or 2.0) and not changed.links


def test_tokens_that_roam_all_arrive_and_stand_ins_are_within_the_budget(artifact):
    traits, losses = read_traits(artifact), read_losses(artifact)
    servers = uneven_servers(traits, 5, 2.0, seed=3)
    assert servers.holds.any(axis=1).all(), "every expert is somewhere"
    for rule in (Rule("exact", 1, 0.0), Rule("all", 3, 0.007), Rule("returning", 2, 0.007, stays=False)):
        found = walk(servers, traits, losses, rule, rate_per_s=100, num_tokens=60)
        assert len(found.seconds) == 60 and min(found.seconds) > 0 and found.layers == 60 * 6
        assert (found.stood_in > 0) == (rule.budget > 0)


def test_nobody_who_returns_gains_by_looking_ahead(artifact):
    """Wherever it was served it goes on from where it is: the tables differ by what is the same for all servers."""
    traits, losses = read_traits(artifact), read_losses(artifact)
    servers = uneven_servers(traits, 4, 2.0, seed=1)
    near, far = (
        walk(
            servers, traits, losses, Rule("x", depth, 0.007, stays=False), rate_per_s=50, num_tokens=40
        ).seconds
        for depth in (1, 3)
    )
    assert np.array_equal(near, far)


def test_a_table_of_roaming_has_a_line_for_each_rule_and_seed(artifact):
    found = roam(read_traits(artifact), read_losses(artifact), num_tokens=20, num_servers=4, seeds=(1, 2))
    lines = as_csv(found).splitlines()
    assert len(lines) == 1 + len(found) == 1 + 2 * 2 * 2 * len(ROAMING)
    assert lines[0].startswith("lines,location,rule,seed,mean_ms")


def test_decision_times_are_told_for_each_policy_and_batch(artifact):
    found = decision_times(read_losses(artifact), top_k=4, batches=(2,))
    assert [(row["policy"], row["batch"]) for row in found] == [
        ("paper", 2),
        ("live", 2),
        ("live, late replies", 2),
    ]
    assert all(0 < row["us_min"] <= row["us"] <= row["us_max"] for row in found)


def test_without_a_corpus_there_is_only_roaming(tmp_path: Path):
    told = CliRunner().invoke(stand_ins, [])
    assert told.exit_code == 2 and "--corpus" in told.output


def test_a_shaped_file_keeps_its_nodes_and_has_the_links_and_rules_of_the_policy(repository, tmp_path: Path):
    source = repository / "testbed" / "scenarios" / "eight_nodes.toml"
    policy = Policy("x", "popularity", "paper", 0.007, ratio=1.5, may=frozenset({"defer"}))
    found = read_cluster(shaped_file(source, tmp_path, policy, "5 ms", "200 Mbit/s"))
    assert (found.defer, found.drop, found.look_ahead) == (True, False, False)
    assert found.node_names == read_cluster(source).node_names
    assert (found.placement, found.selector, found.memory_ratio) == ("popularity", "paper", 1.5)
    assert found.links == () and found.link("tower", "board-b") == Link("tower", "board-b", 0.005, 2e8)


def test_what_was_measured_through_daemons_is_kept_and_not_measured_again(
    repository, tmp_path: Path, monkeypatch
):
    asked: list[str] = []

    def measured(topology, policy, *_):
        asked.append(policy.name)
        return {"policy": policy.name, "tpot_ms": 1.0}

    monkeypatch.setattr(daemons, "_through_one", measured)
    one, other = Policy("one"), Policy("the other, late", may=frozenset({"defer", "ahead"}))
    source = repository / "testbed" / "scenarios" / "eight_nodes.toml"

    def go(policies, **changed):
        return daemons.through_daemons(
            source,
            policies,
            ["x"],
            None,
            Arrivals(4, 8, 10.0, 16, changed.get("seed", 1)),
            rtt=changed.get("rtt", "5 ms"),
            bandwidth="200 Mbit/s",
            kept=tmp_path / "kept",
            progress=lambda *_: None,
        )

    assert [row["policy"] for row in go([one])] == ["one"]
    assert [row["policy"] for row in go([one, other])] == ["one", "the other, late"]
    assert asked == ["one", "the other, late"]
    go([one], rtt="6 ms")
    go([one], seed=2)
    go([Policy("one", budget=0.007, selector="live")], seed=2)
    assert asked[2:] == ["one"] * 3, "other settings are another measurement"


def test_a_table_says_how_far_below_exact_each_policy_is():
    def row(policy: str, budget: float, tpot: float) -> dict:
        names = ("local_exact", "local_substitute", "remote", "remote_late")
        return {
            "policy": policy, "placement": "similarity", "budget": budget, "tpot_ms": tpot, "tpot_p50_ms": tpot,
            "tpot_p95_ms": tpot, "mb_per_1000_tokens": 3.0, "tokens_per_s": 9.0, **dict.fromkeys(names, 0.25),
        }  # fmt: skip

    judged = [{"policy": "b", "perplexity_rise": 0.004, "rise_error": 0.001, "agreement": 0.9}]
    text = as_markdown(with_quality([row("a", 0.0, 40.0), row("b", 0.007, 30.0)], judged))
    assert text.splitlines()[2].startswith("| a | 40.0 | 40.0 |")
    assert "| b | 30.0 (-25 %) |" in text and "| +0.40 % (0.10) |" in text
