"""Processes of one topology file: found by their records, stopped with all means, and never another's."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.clock import ManualClock, SystemClock
from edge_runtime.commands import daemons
from edge_runtime.config import (
    ProcessRecord,
    is_running,
    read_records,
    record_process,
    state_dir,
    write_record,
)
from edge_runtime.errors import ConfigError, PeerLost, UserError
from edge_runtime.launch import (
    LocalCluster,
    last_log_line,
    start_local,
    start_nodes,
    stop_local,
    wait_ready,
)
from edge_runtime.spawner import Spawned, Spawner
from tests.support.clusters import write_topology
from tests.support.processes import wait_until_gone
from topology.files import read_cluster


@pytest.fixture
def topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_RUNTIME_STATE", str(tmp_path / "state"))
    return write_topology(tmp_path, "two_nodes")


@pytest.fixture
def polite(topology: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is recorded as the node `desk` and ends when it is asked to."""
    script = "import signal; print('up', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        write_record(state_dir(topology), record_process("desk", process.pid))
        yield process
        process.kill()


def test_what_is_recorded_is_stopped_and_forgotten(topology: Path, polite: subprocess.Popen[str]) -> None:
    assert stop_local(topology, SystemClock()) == ["desk"]
    assert polite.wait(5) == -signal.SIGTERM
    assert not read_records(state_dir(topology))
    assert stop_local(topology, SystemClock()) == []


def test_a_frozen_process_is_woken_to_be_asked(topology: Path, polite: subprocess.Popen[str]) -> None:
    polite.send_signal(signal.SIGSTOP)
    assert stop_local(topology, SystemClock()) == ["desk"]
    assert polite.wait(5) == -signal.SIGTERM  # it was not killed


def test_a_cluster_that_runs_is_not_started_again(topology: Path, polite: subprocess.Popen[str]) -> None:
    with pytest.raises(UserError, match=rf"already up here: desk \(pid {polite.pid}\)"):
        start_local(read_cluster(topology), topology)
    assert polite.poll() is None


def test_a_record_of_a_process_that_is_gone_keeps_nobody_from_starting(
    topology: Path, polite: subprocess.Popen[str]
) -> None:
    polite.kill()
    polite.wait(5)
    local = start_local(read_cluster(topology), topology)
    pids = [process.pid for process in local.processes.values()]
    assert list(local.processes) == ["coordinator", "desk", "attic"]
    assert all(is_running(record) for record in read_records(state_dir(topology)))
    stop_local(topology, SystemClock())
    for process in local.processes.values():
        process.wait(15)
    wait_until_gone(pids, deadline_s=1.0)


def test_nodes_that_come_later_are_held_and_shaped_like_those_of_the_beginning(
    topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, folder, start = read_cluster(topology), state_dir(topology), Spawner.start
    before = replace(cluster, nodes=cluster.nodes[:1])
    shaped, said = [], []

    def noted(spawner: Spawner, words: list[str], log: Path, env: dict[str, str]) -> Spawned:
        shaped.append((os.environ | env).get("EDGE_SHAPE") == "1")
        return start(spawner, words, log, env)

    monkeypatch.setattr(Spawner, "start", noted)
    for is_so in (True, False):
        with monkeypatch.context() as of_up:
            if is_so:
                of_up.setenv("EDGE_SHAPE", "1")
            started = [start_local(before, topology, limited=said.append if is_so else None)]
        started.append(start_nodes(cluster, ["attic"], topology, folder, said.append))
        stop_local(topology, SystemClock())
        for local in started:
            for process in local.processes.values():
                process.wait(15)
    assert shaped == [True] * 3 + [False] * 3
    held = [line.partition(":")[0] for line in said if not line.startswith("waiting for Python")]
    assert held == ["desk", "attic"]


def test_what_fails_while_daemons_start_leaves_none_of_them(
    topology: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pids = state_dir(topology), []

    def full(directory: Path, record: ProcessRecord) -> Path:
        pids.append(record.pid)
        if record.name == "attic":
            raise OSError(28, "No space left on device")
        return write_record(directory, record)

    monkeypatch.setattr("edge_runtime.launch.write_record", full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        start_local(read_cluster(topology), topology)
    assert len(pids) == 3
    wait_until_gone(pids, deadline_s=1.0)
    assert not read_records(folder)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a command
    try:
        daemons._interrupt_on(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_state_folder_that_cannot_be_made_is_named(topology: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_RUNTIME_STATE", str(topology))  # a file
    with pytest.raises(ConfigError, match="EDGE_RUNTIME_STATE"):
        start_local(read_cluster(topology), topology)


def test_a_daemon_that_ends_by_itself_is_waited_for_until_its_process_is_gone(topology: Path) -> None:
    """Nodes that had given up were seconds from their end, and `down` said that nothing runs."""
    script = (
        "import sys, time; from pathlib import Path; from edge_runtime.launch import leave_record\n"
        "leave_record(Path(sys.argv[1]), 'attic'); print('left', flush=True); time.sleep(0.3)"
    )
    command = [sys.executable, "-c", script, str(topology)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "left\n"
        assert [record.pid for record in read_records(state_dir(topology))] == [process.pid]
        assert stop_local(topology, SystemClock()) == ["attic"]
        assert process.poll() is not None or process.wait(1) is not None
    assert stop_local(topology, SystemClock()) == [] and not read_records(state_dir(topology))


class SlowToStart:
    """A coordinator that cannot be reached for a while, and then serves."""

    def __init__(self, clock: ManualClock, after_s: float, pid: int) -> None:
        self.ready_at_s = clock.now() + after_s
        self.clock = clock
        self.pid = pid

    def connect(self, timeout_s: float) -> None:
        if self.clock.now() < self.ready_at_s:
            raise PeerLost("not yet")

    def status(self) -> dict[str, Any]:
        return {"coordinator": {"pid": self.pid}, "ready": True}

    def close(self) -> None:
        pass


def test_what_is_waited_for_is_said_more_and_more_seldom(
    topology: Path, polite: subprocess.Popen[str]
) -> None:
    clock, said = ManualClock(), []
    local = LocalCluster(topology.parent, {"coordinator": polite})  # type: ignore[dict-item]
    coordinator = SlowToStart(clock, 25.0, polite.pid)
    wait_ready(local, lambda: coordinator, clock, 60.0, said.append)  # type: ignore[arg-type, return-value]
    assert said == [f"waiting for the coordinator to start, {seconds} s" for seconds in (2, 6, 14)]


def test_the_last_line_of_a_log_is_the_last_that_says_something(tmp_path: Path) -> None:
    log = tmp_path / "desk.log"
    assert last_log_line(log) == ""
    log.write_bytes(b"one\nerror: port 1 \xff in use\n\n  \n")
    assert last_log_line(log).startswith("error: port 1")
