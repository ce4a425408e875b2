"""Daemons forked from one process: each alone in all that matters, and none that ends with who started it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edge_runtime.errors import ClusterError
from edge_runtime.spawner import CODE_UNKNOWN, Spawned, Spawner
from tests.support.clusters import wait_for, write_topology


@pytest.fixture(scope="module")
def spawner() -> Spawner:
    return Spawner()


@pytest.fixture
def coordinator(spawner: Spawner, tmp_path: Path) -> Iterator[Spawned]:
    process = start_coordinator(spawner, tmp_path)
    yield process
    process.kill()


def start_coordinator(spawner: Spawner, folder: Path) -> Spawned:
    words = ["coordinator", "--topology", str(write_topology(folder, "two_nodes"))]
    return spawner.start(words, folder / "log", {"EDGE_RUNTIME_STATE": str(folder / "state")})


def test_each_has_words_and_a_log_of_its_own(spawner: Spawner, tmp_path: Path) -> None:
    right = spawner.start(["--version"], tmp_path / "right", {})
    wrong = spawner.start(["node"], tmp_path / "wrong", {})
    assert (right.wait(30.0), wrong.wait(30.0)) == (0, 2)
    assert "version" in (tmp_path / "right").read_text()
    assert "Missing argument" in (tmp_path / "wrong").read_text()


def test_it_looks_and_runs_as_if_started_alone(spawner: Spawner, coordinator: Spawned) -> None:
    process = psutil.Process(coordinator.pid)
    assert process.cmdline()[:2] == ["edge-runtime", "coordinator"]
    assert os.getsid(coordinator.pid) == coordinator.pid != os.getsid(0)
    assert coordinator.poll() is None
    coordinator.kill()
    assert coordinator.wait(10.0) == -signal.SIGKILL


def test_what_was_forked_goes_on_without_who_forked_it(tmp_path: Path) -> None:
    spawner = Spawner()
    process = start_coordinator(spawner, tmp_path)
    parent = psutil.Process(process.pid).parent()
    assert parent is not None and "edge_runtime.forker" in parent.cmdline()
    parent.kill()
    wait_for(lambda: process.poll() is None and spawner.has_ended(), "its end noticed")
    with pytest.raises(
        ClusterError, match="could not be started here: the process that forks daemons ended: it said nothing"
    ):
        start_coordinator(spawner, tmp_path)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20.0) == CODE_UNKNOWN


def test_a_wait_that_is_over_says_for_whom(coordinator: Spawned) -> None:
    with pytest.raises(ClusterError, match=f"process {coordinator.pid} still runs after 0 s"):
        coordinator.wait(0.1)


def test_what_is_undone_is_killed_even_where_its_number_was_not_read(tmp_path: Path) -> None:
    spawner = Spawner()
    first = start_coordinator(spawner, tmp_path)

    class Stopped(Exception):
        pass

    def stop(line: str) -> None:
        raise Stopped

    before = spawner.num_started()
    read, spawner._read = spawner._read, lambda timeout_s: stop("")  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        start_coordinator(spawner, tmp_path / "second")
    wait_for(lambda: len(psutil.Process(first.pid).parent().children()) == 2, "the second fork")  # type: ignore[union-attr]
    spawner._read = read  # type: ignore[method-assign]
    (second,) = spawner.undo(before)
    assert not psutil.pid_exists(second) or psutil.Process(second).status() == psutil.STATUS_ZOMBIE
    assert psutil.Process(first.pid).is_running(), "that was there before"
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait(10.0) == CODE_UNKNOWN
