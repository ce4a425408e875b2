"""`testbed elastic`: rows for every way, files that hold them, and a sentence where experts are whole."""

import csv
import shutil

import pytest

from edge_runtime.artifacts import remove_section
from edge_runtime.errors import ArtifactError
from testbed import elastic
from tests.support.clusters import MODEL


def test_times_and_ways_are_measured_and_written(tmp_path):
    checkpoint, _, parts = elastic.open_parts(MODEL, MODEL / "calibration")
    bench = elastic.Bench(checkpoint, parts, 2)
    times = elastic.time_rows(bench, (1, 2), rounds=1)
    assert {row["n"] for row in times} == {1, 2} and all(row["us_per_token"] > 0 for row in times)
    assert [row["of_full"] for row in times if row["K"] == bench.full] == [1.0, 1.0]
    tiers = elastic.mixed_tiers(6, bench.full, 4)
    assert sorted(tiers) == [6, 6, 16, 16]
    ways = elastic.offline_rows(bench, tiers, 2, times, rounds=1)
    assert ways[0]["way"] == "full tier" and len(ways) == 4
    elastic.write_rows(tmp_path, "time", times)
    with (tmp_path / "time.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(times)
    assert elastic.table(ways).count("\n") == len(ways) + 1


def test_whole_experts_are_told_in_a_sentence(tmp_path):
    folder = tmp_path / "calibration"
    shutil.copytree(MODEL / "calibration", folder)
    remove_section(folder, "partition")
    with pytest.raises(ArtifactError, match="no section partition; run `edge-runtime calibrate prism`"):
        elastic.open_parts(MODEL, folder)
