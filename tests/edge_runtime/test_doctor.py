"""The doctor's findings: what is looked at, what each fault is called, and whose it is."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edge_runtime.clock import SystemClock
from edge_runtime.doctor import Finding, _nodes, examine
from edge_runtime.errors import EXIT_CLUSTER, EXIT_USER
from tests.support.clusters import write_topology
from tests.support.tiny_models import write_tiny_qwen3_moe, write_tokenizer
from topology.parse import parse_cluster


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    model = write_tiny_qwen3_moe(tmp_path / "model")
    write_tokenizer(model)
    return write_topology(tmp_path, "one_node", model=model)


def findings(topology: Path | None) -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(topology, SystemClock())}


def test_without_a_topology_only_the_machine_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGE_RUNTIME_TOPOLOGY", raising=False)
    monkeypatch.chdir(tmp_path)
    found = findings(None)
    assert list(found) == ["python", "packages", "memory", "environment", "kernels", "topology"]
    assert all(finding.is_well for finding in found.values())
    assert "not looked at" in found["topology"].detail


def test_kernels_that_were_not_built_are_told_with_what_builds_them(repository: Path, tmp_path: Path) -> None:
    """The packages as they are installed where there is no compiler: all of `kernels` but what was compiled."""
    shutil.copytree(
        repository / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for package in ("edge_runtime", "topology"):
        (tmp_path / package).symlink_to(repository / package)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EDGE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "edge_runtime", "doctor"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    (said,) = (line for line in ran.stdout.splitlines() if "kernels:" in line)
    assert "ok    kernels: torch path, self-test off by" in said and "the native kernels are missing" in said
    assert "answers come slower" in said and "run `make install`" in said


def test_a_machine_that_does_not_answer_is_told_with_its_address_and_is_the_clusters_fault(
    topology: Path,
) -> None:
    found = findings(topology)
    assert found["topology"].is_well and found["model"].is_well
    for name in ("coordinator", "solo"):
        assert not found[name].is_well and found[name].exit_code == EXIT_CLUSTER
        assert "127.0.0.1:" in found[name].detail and "refused" in found[name].detail


def test_a_port_where_somebody_else_listens_is_no_node(
    topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.doctor.REACH_S", 0.3)
    port = int(topology.read_text().rpartition("127.0.0.1:")[2].partition('"')[0])
    with socket.create_server(("127.0.0.1", port)):
        found = findings(topology)
    assert not found["solo"].is_well and found["solo"].exit_code == EXIT_CLUSTER


def test_a_model_that_does_not_fit_or_is_damaged_is_the_users_fault(topology: Path, tmp_path: Path) -> None:
    shard = next((tmp_path / "model").glob("*-00002-of-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    found = findings(topology)["model"]
    assert not found.is_well and found.exit_code == EXIT_USER and shard.name in found.detail


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EDGE_KERNELS", "cuda"),
        ("EDGE_THREADS", "many"),
        ("EDGE_CPU_ISA", "sse9"),
        ("EDGE_GRAPHS", "perhaps"),
        ("EDGE_COMPILE", "perhaps"),
        ("EDGE_LOG", "loud"),
    ],
)
def test_a_variable_that_asks_for_what_there_is_not_is_told(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    found = findings(None)["environment"]
    assert not found.is_well and variable in found.detail and repr(value) in found.detail


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('device = "cuda:7"', "device: found 'cuda:7', but torch sees"),
        pytest.param(
            'device = "cuda"',
            "device: found 'cuda', but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ("threads = 1000", "threads: found 1000"),
    ],
)
def test_a_node_that_is_this_machine_is_held_to_what_there_is(
    topology: Path, setting: str, said: str
) -> None:
    text = topology.read_text().replace("512 MiB", "4 GiB")
    topology.write_text(f"{text}\n[default_node]\n{setting}\n")
    found = findings(topology)["node solo"]
    assert not found.is_well and found.exit_code == EXIT_USER and said in found.detail


def test_a_node_elsewhere_is_not_held_to_this_machine(topology: Path) -> None:
    text = (
        topology.read_text().replace("127.0.0.1", "203.0.113.9").replace("512 MiB", "4 GiB")
        + '\n[default_node]\ndevice = "cuda:7"\n'
    )
    cluster = parse_cluster(text.replace("[cluster]", '[cluster]\nkeys = "keys"'))
    assert list(_nodes(cluster)) == []


def test_a_topology_with_faults_shows_them(topology: Path) -> None:
    topology.write_text(topology.read_text().replace("memory", "memmory"))
    found = findings(topology)
    assert not found["topology"].is_well and "memmory" in found["topology"].detail
    assert "model" not in found
