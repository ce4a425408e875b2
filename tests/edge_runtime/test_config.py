"""The topology file is found, state has one place per cluster, and a pid is only trusted with its start time."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime.config import (
    ProcessRecord,
    is_running,
    last_good_text,
    log_path,
    read_record,
    read_records,
    record_process,
    remember_good,
    remove_record,
    resolve_topology_path,
    state_dir,
    write_record,
)
from edge_runtime.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_settings_of_the_caller(monkeypatch, tmp_path):
    monkeypatch.delenv("EDGE_RUNTIME_TOPOLOGY", raising=False)
    monkeypatch.delenv("EDGE_RUNTIME_STATE", raising=False)
    monkeypatch.chdir(tmp_path)


def write_topology(path: Path, name: str = "home") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'[cluster]\nname = "{name}"\n')
    return path


def test_the_flag_wins_over_the_variable_and_the_variable_over_the_default(monkeypatch, tmp_path):
    default = write_topology(tmp_path / "topology.toml")
    variable = write_topology(tmp_path / "variable.toml")
    flag = write_topology(tmp_path / "flag.toml")
    assert resolve_topology_path(None) == default
    monkeypatch.setenv("EDGE_RUNTIME_TOPOLOGY", str(variable))
    assert resolve_topology_path(None) == variable
    assert resolve_topology_path("flag.toml") == flag


def test_a_missing_topology_file_is_refused_with_all_three_ways_to_name_one(monkeypatch):
    with pytest.raises(ConfigError) as refused:
        resolve_topology_path(None)
    for way in ("--topology", "EDGE_RUNTIME_TOPOLOGY", "./topology.toml"):
        assert way in str(refused.value)
    monkeypatch.setenv("EDGE_RUNTIME_TOPOLOGY", "elsewhere.toml")
    with pytest.raises(ConfigError, match=r"elsewhere\.toml \(EDGE_RUNTIME_TOPOLOGY\) does not exist"):
        resolve_topology_path(None)


def test_a_folder_is_not_a_topology_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        resolve_topology_path(tmp_path)


def test_state_lies_beside_the_topology_file_under_the_clusters_name(tmp_path):
    topology = write_topology(tmp_path / "clusters" / "a.toml", name="attic")
    assert state_dir(topology) == tmp_path / "clusters" / ".edge-runtime" / "attic"


def test_two_clusters_keep_apart_under_one_state_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGE_RUNTIME_STATE", str(tmp_path / "state"))
    one = state_dir(write_topology(tmp_path / "one.toml", name="one"))
    two = state_dir(write_topology(tmp_path / "two.toml", name="two"))
    assert (one, two) == (tmp_path / "state" / "one", tmp_path / "state" / "two")


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", ".hidden"])
def test_a_cluster_name_never_leads_out_of_the_state_folder(tmp_path, name):
    folder = state_dir(write_topology(tmp_path / "t.toml", name=name))
    assert folder.resolve().parent == tmp_path / ".edge-runtime"


def test_a_file_without_a_cluster_name_goes_by_its_own(tmp_path):
    path = tmp_path / "garage.toml"
    path.write_text("")
    assert state_dir(path).name == "garage"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"[cluster\n", "Expected ']'"),
        (b"\xff", "it is not UTF-8 text, by byte 1"),
        (b"a = " + b"1" * 5000, "a number has more than 4300 digits"),
        (b"a = " + b"[" * 5000, "it is nested too deeply"),
    ],
)
def test_a_file_that_is_not_toml_is_the_users_to_mend(tmp_path, text, words):
    path = tmp_path / "topology.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"is not valid TOML: .*{words}"):
        state_dir(path)


@pytest.mark.parametrize("edited", ["[cluster\n", '[cluster]\nname = "other"\n', "[cluster]\nname = 5\n"])
def test_a_file_edited_while_its_cluster_runs_still_leads_to_it(tmp_path, edited):
    path = write_topology(tmp_path / "topology.toml", name="home")
    text, folder = path.read_text(), state_dir(path)
    remember_good(path, text)
    write_record(folder, record_process("coordinator", os.getpid()))
    path.write_text(edited)
    assert state_dir(path) == folder and last_good_text(path) == text
    other = tmp_path / "other.toml"
    other.write_text(edited)
    assert last_good_text(other) is None


def test_a_file_whose_cluster_has_ended_is_taken_as_it_is_now(tmp_path):
    path = write_topology(tmp_path / "topology.toml", name="home")
    remember_good(path, path.read_text())
    write_topology(path, name="other")
    assert state_dir(path).name == "other" and last_good_text(path) is None


def test_a_record_comes_back_as_it_was_written(tmp_path):
    record = ProcessRecord("node-1", 4711, 12.5, ("edge-runtime", "node"))
    path = write_record(tmp_path / "new" / "folder", record)
    assert read_record(path) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["node-1.json"]


def test_records_are_listed_by_name_and_forgotten_by_name(tmp_path):
    for name in ("b", "a", "coordinator"):
        write_record(tmp_path, ProcessRecord(name, 1, 0.0))
    log_path(tmp_path, "a").write_text("not a record")
    remove_record(tmp_path, "b")
    remove_record(tmp_path, "b")
    assert [record.name for record in read_records(tmp_path)] == ["a", "coordinator"]
    assert read_records(tmp_path / "missing") == ()
    assert read_record(tmp_path / "b.json") is None


def test_a_damaged_record_is_named(tmp_path):
    path = tmp_path / "node-1.json"
    path.write_text('{"name": "node-1", "pid"')
    with pytest.raises(ConfigError, match=r"node-1\.json is not a process record"):
        read_records(tmp_path)


def test_this_process_is_running_and_its_record_says_how_it_was_started():
    record = record_process("tests", os.getpid())
    assert is_running(record)
    assert record.command == tuple(psutil.Process().cmdline())


def test_a_recycled_pid_is_another_process():
    record = record_process("tests", os.getpid())
    assert not is_running(msgspec.structs.replace(record, create_time=record.create_time - 60.0))


def test_a_process_that_ended_is_not_running_even_before_its_parent_collects_it():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = record_process("child", child.pid)
    assert is_running(record)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # exited, and a zombie until wait()
    assert not is_running(record)
    child.wait()
    assert not is_running(record)
