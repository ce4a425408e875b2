"""Topology files on disk: folders are found beside the file, and what cannot be read is said."""

from pathlib import Path

import pytest

from topology.errors import ClusterFileError, TopologyError
from topology.files import read_cluster

TEXT = """\
[cluster]
name = "home"
model = "models/demo"
keys = "secrets"

[[node]]
name = "desk"
address = "127.0.0.1:6001"
memory = "8 GiB"
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    """A topology file with its model beside it."""
    (tmp_path / "models" / "demo").mkdir(parents=True)
    (tmp_path / "models" / "demo" / "config.json").write_text("{}")
    path = tmp_path / "topology.toml"
    path.write_text(TEXT)
    return path


def test_folders_are_taken_relative_to_the_file(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    cluster = read_cluster(topology)
    assert Path(cluster.model) == topology.parent / "models" / "demo"
    assert cluster.keys is not None and Path(cluster.keys) == topology.parent / "secrets"
    assert cluster.source == str(topology)


def test_an_absolute_model_folder_is_left_as_it_is(topology: Path, tmp_path: Path) -> None:
    topology.write_text(TEXT.replace("models/demo", str(tmp_path / "models" / "demo")))
    assert Path(read_cluster(topology).model) == tmp_path / "models" / "demo"


def test_a_model_folder_that_is_not_there_is_a_fault_with_its_line(topology: Path) -> None:
    topology.write_text(TEXT.replace("models/demo", "models/other"))
    with pytest.raises(
        ClusterFileError, match=r"line 3, \[cluster\] model: there is no folder .*models/other"
    ):
        read_cluster(topology)


def test_a_folder_without_a_config_is_no_model(topology: Path) -> None:
    topology.write_text(TEXT.replace("models/demo", "models"))
    with pytest.raises(ClusterFileError, match=r"line 3, .* holds no config\.json"):
        read_cluster(topology)


def test_a_missing_file_says_how_to_name_another(tmp_path: Path) -> None:
    with pytest.raises(
        TopologyError, match=r"cannot read the topology file .*nothing\.toml: No such file.*--topology"
    ):
        read_cluster(tmp_path / "nothing.toml")


def test_a_folder_is_no_topology_file(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="Is a directory"):
        read_cluster(tmp_path)


def test_bytes_that_are_no_text_have_their_line(topology: Path) -> None:
    topology.write_bytes(b'[cluster]\nname = "\xff\xfe"\n')
    with pytest.raises(ClusterFileError, match="line 2: not UTF-8 text"):
        read_cluster(topology)


def test_a_byte_order_mark_is_passed_over(topology: Path) -> None:
    topology.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert read_cluster(topology).name == "home"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("hub:org/name", "hub:org/name"),
        ("org/name", "hub:org/name"),
        ("hub:org/name@v1.0", "hub:org/name@v1.0"),
    ],
)
def test_an_id_of_the_hub_is_kept_as_one(topology: Path, model: str, expected: str) -> None:
    topology.write_text(TEXT.replace("models/demo", model))
    assert read_cluster(topology).model == expected


def test_a_folder_wins_over_an_id_of_its_name(topology: Path) -> None:
    (topology.parent / "org" / "name").mkdir(parents=True)
    (topology.parent / "org" / "name" / "config.json").write_text("{}")
    topology.write_text(TEXT.replace("models/demo", "org/name"))
    assert read_cluster(topology).model == str(topology.parent / "org" / "name")


@pytest.mark.parametrize(
    "model", ["hub:name", "hub:a/b/c", "hub:/etc/passwd", "hub:a/b@", "hub:", "hub:../b"]
)
def test_what_is_no_id_of_the_hub_is_a_fault(topology: Path, model: str) -> None:
    topology.write_text(TEXT.replace("models/demo", model))
    with pytest.raises(ClusterFileError, match=r"line 3, \[cluster\] model: .* is no model of the hub"):
        read_cluster(topology)


@pytest.mark.parametrize("model", ["models/other", "/nowhere/at/all", "org/name"])
def test_whoever_does_not_open_the_model_may_be_without_it(topology: Path, model: str) -> None:
    topology.write_text(TEXT.replace("models/demo", model))
    assert read_cluster(topology, needs_model=False).model


def test_a_folder_whose_name_no_disk_takes_is_a_fault(topology: Path) -> None:
    topology.write_text(TEXT.replace("models/demo", "x" * 300))
    with pytest.raises(
        ClusterFileError, match=r"line 3, \[cluster\] model: .* cannot be looked into: File name too long"
    ):
        read_cluster(topology)
