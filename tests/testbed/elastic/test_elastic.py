"""`testbed elastic`: rows for every way, files that hold them, and a sentence where experts are whole."""

import csv
import shutil

import pytest
import torch
from click.testing import CliRunner

from edge_runtime.artifacts import remove_section
from edge_runtime.errors import ArtifactError, UserError
from kernels.replay import REPEATING
from testbed.cli import testbed as commands
from testbed.elastic import measure
from testbed.elastic.steps import distinct_slices
from tests.support.clusters import MODEL


def test_times_and_ways_are_measured_and_written(tmp_path):
    checkpoint, _, parts = measure.open_parts(MODEL, MODEL / "calibration")
    bench = measure.Bench(checkpoint, parts, 2, measure.Load(answer_tokens=8))
    times = measure.time_rows(bench, (1, 2), rounds=1, stream_bps=1e10)
    assert {row["n"] for row in times} == {1, 2} and all(row["us_per_token"] > 0 for row in times)
    assert [row["experts_of_full"] for row in times if row["n"] == 1] == [each / 8 for each in range(2, 9)]
    two = [row["experts_of_full"] for row in times if row["n"] == 2]
    assert two == sorted(two) and two[0] > 2 / 8, "rows that run less share less of what they read"
    assert [row["of_full"] for row in times if row["K"] == bench.full] == [1.0, 1.0]
    tiers = measure.mixed_tiers(6, bench.full, 4)
    assert sorted(tiers) == [6, 6, 16, 16]
    uneven = measure.Bench(checkpoint, parts, 2, measure.Load(answer_tokens=8, uneven=True))
    ways = measure.offline_rows(uneven, tiers, 2, times, rounds=1)
    assert ways[0]["way"] == "full tier" and len(ways) == 6
    measure.write_rows(tmp_path, "time", times)
    with (tmp_path / "time.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(times)
    assert measure.table(ways).count("\n") == len(ways) + 1
    whole = measure.whole_rows(bench, measure.Bench(checkpoint, None, 2), (1,), rounds=1)
    assert 0.3 < whole[0]["median_ratio"] < 3
    kept = {row["kept"]: row for row in measure.kept_rows(bench)}
    assert kept["segments"]["entries"] == 5 + 5 * 16 and kept["whole steps"]["entries"] == 5 * 16
    assert kept["share spared"]["bytes"] > 0.84
    rows = measure.segment_rows(bench, (1,), 1, REPEATING)
    assert [row["K"] for row in rows] == [16, 8] and all(row["segments_us"] > 0 for row in rows)


def test_what_full_batches_of_one_tier_bring_is_the_mean_of_their_costs():
    assert measure.most_by_tiers([12, 32], [5, 5], {12: 0.5, 32: 1.0, 24: 0.9}) == pytest.approx(1 / 0.75)
    assert measure.most_by_tiers([12, 32], [9, 1], {12: 2.0, 32: 4.0}) == pytest.approx(10 * 4 / (9 * 2 + 4))


def test_slices_that_several_rows_run_are_read_once():
    ids, masks = torch.tensor([[0, 3], [3, 1]]), torch.tensor([[1, 6], [3, 0]])
    assert distinct_slices(ids, masks, 4).tolist() == [0, 12, 13, 14]
    assert distinct_slices(ids, None, 2).tolist() == [0, 1, 2, 3, 6, 7]


def test_experts_are_cut_where_they_lie_without_an_artifact():
    checkpoint, parts = measure.split_as_they_lie(MODEL, 2)
    bench = measure.Bench(checkpoint, parts, 1, measure.Load(answer_tokens=2))
    assert bench.full == 8 and bench.read(4, 1).experts * 2 == bench.read(8, 1).experts
    with pytest.raises(UserError, match="found experts of width 96, expected 2 to 8 that divide the width"):
        measure.split_as_they_lie(MODEL, 5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["elastic", "--parts", "4", "--corpus", "x"], "--parts is for times"),
        (["elastic", "--low", "17"], "--low is 17, expected a tier of this model, 1 to 16"),
        (["elastic", "--size", "0"], "--size is 0, expected at least 1"),
        (["elastic", "--trunk-format", "int5"], "int5"),
        (["segments", "--answer-tokens", "2000"], "are 2016 tokens, expected at most 512 of this model"),
        (
            ["segments", "--sizes", "1,none"],
            "--sizes is '1,none', expected whole numbers from 1, such as 1,8",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(words, told):
    found = CliRunner().invoke(commands, [words[0], str(MODEL), *words[1:]], terminal_width=300)
    assert found.exit_code == 2 and told in found.output


def test_whole_experts_are_told_in_a_sentence(tmp_path):
    folder = tmp_path / "calibration"
    shutil.copytree(MODEL / "calibration", folder)
    remove_section(folder, "partition")
    with pytest.raises(ArtifactError, match="no section partition; run `edge-runtime calibrate prism`"):
        measure.open_parts(MODEL, folder)
