import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from edge_runtime import artifacts
from edge_runtime.artifacts import INDEX_FILE, Artifact, remove_section, write_section
from edge_runtime.errors import ArtifactError, UserError

HASH, OTHER = "a" * 32, "b" * 32
COUNTS = {"overall": torch.arange(12).view(3, 4).float(), "by_domain": torch.ones(2, 3, 4, dtype=torch.int16)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "calibration"
    write_section(folder, "frequency", COUNTS, {"layers": [0, 2]}, model_hash=HASH, model="tiny")
    return folder


def edit_index(folder: Path, **changes: object) -> None:
    path = folder / INDEX_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_was_written_is_read(folder: Path):
    artifact = Artifact.open(folder, model_hash=HASH)
    assert artifact.sections == ("frequency",) and artifact.has("frequency") and not artifact.has("x")
    assert artifact.meta("frequency") == {"layers": [0, 2]} and artifact.index.model == "tiny"
    read = artifact.tensors("frequency")
    assert read.keys() == COUNTS.keys()
    for name, tensor in COUNTS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_sections_come_one_by_one_and_replace_their_like(folder: Path):
    before = Artifact.open(folder).content_hash
    write_section(folder, "similarity", {"raw": torch.eye(3)}, model_hash=HASH, corpus={"requests": 7})
    write_section(folder, "frequency", {"overall": torch.zeros(3, 4)}, model_hash=HASH)
    artifact = Artifact.open(folder, model_hash=HASH)
    assert artifact.sections == ("frequency", "similarity")
    assert list(artifact.tensors("frequency")) == ["overall"] and artifact.meta("frequency") == {}
    assert artifact.index.corpus == {"requests": 7} and artifact.index.model == "tiny"
    assert artifact.content_hash != before
    assert sorted(path.name for path in folder.iterdir()) == [
        INDEX_FILE,
        "frequency.safetensors",
        "similarity.safetensors",
    ]


def test_a_section_can_be_taken_out(folder: Path):
    write_section(folder, "similarity", {"raw": torch.eye(3)}, model_hash=HASH)
    remove_section(folder, "frequency")
    remove_section(folder, "frequency")
    assert Artifact.open(folder).sections == ("similarity",)
    assert not (folder / "frequency.safetensors").exists()


def test_the_content_hash_tells_measurements_apart_and_not_folders(tmp_path: Path):
    for name in "ab":
        write_section(tmp_path / name, "frequency", COUNTS, {"layers": [0]}, model_hash=HASH)
    first, second = (Artifact.open(tmp_path / name).content_hash for name in "ab")
    assert first == second
    write_section(tmp_path / "b", "frequency", COUNTS, {"layers": [1]}, model_hash=HASH)
    assert Artifact.open(tmp_path / "b").content_hash != first


def test_another_models_artifact_is_refused_with_both_hashes(folder: Path):
    with pytest.raises(ArtifactError) as read:
        Artifact.open(folder, model_hash=OTHER)
    with pytest.raises(ArtifactError) as written:
        write_section(folder, "similarity", COUNTS, model_hash=OTHER)
    for error in read, written:
        assert HASH in str(error.value) and OTHER in str(error.value)
    assert Artifact.open(folder).sections == ("frequency",)


Damage = Callable[[Path], object]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: list[tuple[str, Damage, str]] = [
    ("no folder", lambda f: [p.unlink() for p in f.iterdir()] and f.rmdir(), "does not exist"),
    ("no index", lambda f: (f / INDEX_FILE).unlink(), "has no artifact.json"),
    ("truncated index", lambda f: truncate(f / INDEX_FILE) or truncate(f / INDEX_FILE), "damaged"),
    ("not JSON", lambda f: (f / INDEX_FILE).write_bytes(b"\xff\x00"), "damaged"),
    ("deep JSON", lambda f: (f / INDEX_FILE).write_bytes(b"[" * 100_000), "damaged"),
    ("a list", lambda f: (f / INDEX_FILE).write_text("[]"), "not the index"),
    ("foreign JSON", lambda f: (f / INDEX_FILE).write_text('{"kind": "recipe"}'), "not the index"),
    ("newer version", lambda f: edit_index(f, format_version=2), "format version 2"),
    ("no version", lambda f: edit_index(f, format_version=None), "format version None"),
    ("no hash", lambda f: edit_index(f, model_hash=7), "model_hash"),
    ("index too large", lambda f: os.truncate(f / INDEX_FILE, 1 << 30), "at most"),
    ("file outside", lambda f: edit_index(f, sections=entry("../x")), "no file of it"),
    ("bad name", lambda f: edit_index(f, sections={"A b": entry()["frequency"]}), "no file of it"),
    ("section gone", lambda f: (f / "frequency.safetensors").unlink(), "cannot be read"),
    ("section truncated", lambda f: truncate(f / "frequency.safetensors"), "truncated"),
    ("section changed", lambda f: flip_last_byte(f / "frequency.safetensors"), "sha256"),
]


def entry(file: str = "frequency.safetensors") -> dict[str, object]:
    return {"frequency": {"file": file, "num_bytes": 0, "sha256": ""}}


@pytest.mark.parametrize("damage, why", [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_what_is_no_whole_artifact_is_refused_in_one_sentence(folder: Path, damage: Damage, why: str):
    damage(folder)
    with pytest.raises(UserError, match=why) as error:
        Artifact.open(folder, model_hash=HASH).tensors("frequency")
    assert "\n" not in str(error.value)


def test_a_section_that_is_no_safetensors_file_is_refused(folder: Path):
    path, garbage = folder / "frequency.safetensors", b"no tensors in here"
    path.write_bytes(garbage)
    index = Artifact(folder, msgspec.json.decode((folder / INDEX_FILE).read_bytes(), type=artifacts.Index))
    made = msgspec.structs.replace(
        index.index.sections["frequency"],
        num_bytes=len(garbage),
        sha256=hashlib.sha256(garbage).hexdigest(),
    )
    edit_index(folder, sections={"frequency": msgspec.to_builtins(made)})
    with pytest.raises(ArtifactError, match="not a safetensors file"):
        Artifact.open(folder).tensors("frequency")


def test_an_absent_section_or_tensor_is_named_with_those_that_are_there(folder: Path):
    artifact = Artifact.open(folder)
    with pytest.raises(ArtifactError, match="no section partition, found frequency"):
        artifact.tensors("partition")
    with pytest.raises(ArtifactError, match="no section partition"):
        artifact.meta("partition")
    with pytest.raises(ArtifactError, match="no tensor raw, found by_domain, overall"):
        artifact.tensor("frequency", "raw")
    assert artifact.tensor("frequency", "overall").shape == (3, 4)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_writer_stopped_anywhere_leaves_a_whole_artifact(
    folder: Path, step: int, monkeypatch: pytest.MonkeyPatch
):
    write_section(folder, "similarity", {"raw": torch.eye(3)}, model_hash=HASH)
    renames = 0
    rename = Path.replace

    def stop_at_step(self: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == step:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop_at_step)
        with pytest.raises(KeyboardInterrupt):
            write_section(folder, "similarity", {"raw": torch.zeros(3, 3)}, model_hash=HASH)
    artifact = Artifact.open(folder, model_hash=HASH)
    assert torch.equal(artifact.tensor("frequency", "overall"), COUNTS["overall"])
    assert not artifact.has("similarity") or torch.equal(artifact.tensor("similarity", "raw"), torch.eye(3))
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    write_section(folder, "similarity", {"raw": torch.zeros(3, 3)}, model_hash=HASH)
    assert torch.equal(Artifact.open(folder).tensor("similarity", "raw"), torch.zeros(3, 3))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_section(tmp_path / "file" / "x", "frequency", COUNTS, model_hash=HASH)
