"""What is printed and drawn of an artifact, and what is not an artifact."""

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from calibration.cli import calibrate
from calibration.show import layer_rows
from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.errors import UserError

HASH = "a" * 32


def run(*arguments: object):
    return CliRunner().invoke(calibrate, ["show", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers of three experts whose numbers a person can check."""
    alike = torch.tensor([[1.0, 0.8, 0.2], [0.8, 1.0, 0.5], [0.2, 0.5, 1.0]])
    folder, meta = tmp_path / "calibration", {"layers": [1, 3]}
    sections = {
        "similarity": {
            "raw": torch.stack([alike, alike / 2]).half(),
            "centred": torch.stack([alike, alike]).half(),
        },
        "frequency": {"decode": torch.tensor([[1.0, 1.0, 0.0], [1.5, 0.25, 0.25]])},
        "mismatch": {
            "mismatch": torch.stack([2 - 2 * alike, 1 - alike]).half(),
            "norm": torch.ones(2, 3).half(),
        },
        "sensitivity": {"sensitivity": torch.tensor([0.01, 0.02]), "quadratic": torch.tensor([0.1, 0.2])},
    }
    for name, tensors in sections.items():
        write_section(
            folder,
            name,
            tensors,
            meta,
            model_hash=HASH,
            model="tiny",
            corpus={"requests": 7, "domains": ["a"]},
        )
    return folder


def test_rows_say_what_the_tables_hold(folder: Path):
    first, last = layer_rows(Artifact.open(folder))
    assert (first["layer"], last["layer"]) == (1, 3)
    assert first["raw_mean"] == pytest.approx(0.5, abs=1e-3) and last["raw_mean"] == pytest.approx(
        0.25, abs=1e-3
    )
    assert first["centred_closest"] == pytest.approx((0.8 + 0.8 + 0.5) / 3, abs=1e-3)
    assert first["mismatch_closest"] == pytest.approx((0.4 + 0.4 + 1.0) / 3, abs=1e-3)
    assert first["never_used"] == 1 and first["effective_experts"] == pytest.approx(2.0)
    assert last["most_used"] == pytest.approx(2.25) and last["top_tenth"] == pytest.approx(0.75)
    assert last["sensitivity"] == pytest.approx(0.02)


def test_text_json_and_picture_of_an_artifact_or_of_the_model_that_has_it(folder: Path, tmp_path: Path):
    picture = tmp_path / "found.png"
    result = run(folder, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "model hash " + HASH in result.output and "sensitivity: nats" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run(folder.parent).output == run(folder).output
    listed = json.loads(run(folder, "--json").stdout)
    assert [row["layer"] for row in listed["layers"]] == [1, 3] and listed["model_hash"] == HASH


def test_without_matplotlib_the_text_is_there_and_says_so(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(folder, "--plot", tmp_path / "found.png")
    assert (
        result.exit_code == 0
        and "matplotlib is not installed" in result.output
        and "layer 3" in result.output
    )
    assert not (tmp_path / "found.png").exists()


def test_sections_that_are_not_there_are_left_out(tmp_path: Path):
    write_section(tmp_path, "sensitivity", {"sensitivity": torch.ones(1)}, {"layers": [0]}, model_hash=HASH)
    result = run(tmp_path, "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0 and "similarity by depth" not in result.output


def test_the_demo_models_own_artifact_is_shown(demo_model: Path):
    from edge_runtime.model.checkpoint import Checkpoint

    artifact = Artifact.open(demo_model / "calibration", model_hash=Checkpoint.open(demo_model).model_hash)
    assert len(layer_rows(artifact)) == 6
    for section in artifact.sections:
        assert artifact.tensors(section)
    assert sum(path.stat().st_size for path in artifact.folder.iterdir()) < 6_000_000


def test_what_is_no_artifact_or_says_nothing_is_refused(folder: Path, tmp_path: Path):
    write_section(tmp_path / "other", "partition", {"x": torch.ones(1)}, model_hash=HASH)
    for place, why in ((tmp_path / "gone", "does not exist"), (tmp_path / "other", "none of the sections")):
        result = run(place)
        assert isinstance(result.exception, UserError) and why in str(result.exception)
    result = run(folder, "--plot", tmp_path / "no" / "folder.png")
    assert isinstance(result.exception, UserError) and "cannot be written" in str(result.exception)
    result = run(folder, "--plot", tmp_path / "a.wav")
    assert isinstance(result.exception, UserError) and "cannot be written" in str(result.exception)
