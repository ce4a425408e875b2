"""Unequal processes on one machine: by control groups of either kind, else by niceness; and nothing is left of it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edge_runtime import limits
from edge_runtime.limits import group_of, hold, niceness, release
from tests.support.clusters import LocalCluster, wait_for, write_topology

MIB = 2**20


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that waits to be ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_a_share_of_a_processor_is_a_niceness_that_gives_about_as_much():
    assert [niceness(share) for share in (2.0, 1.0, 0.8, 0.5, 0.1, 0.01)] == [0, 0, 1, 3, 10, 19]


def test_groups_of_the_older_kind_get_both_limits(tmp_path: Path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "cpu").mkdir()
    said = hold(4711, "g", "attic", 512 * MIB, 0.25, root=tmp_path)
    assert said == "attic: memory 512 MiB by control group, 0.25 of a processor by control group"
    assert (tmp_path / "memory/g/attic/memory.limit_in_bytes").read_text() == str(512 * MIB)
    assert (tmp_path / "cpu/g/attic/cpu.cfs_quota_us").read_text() == "25000"
    assert (tmp_path / "cpu/g/attic/cgroup.procs").read_text() == "4711"


def test_groups_of_the_newer_kind_get_both_limits_in_one_tree(tmp_path: Path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    hold(4711, "g", "attic", 512 * MIB, 1.5, root=tmp_path)
    group = tmp_path / "g" / "attic"
    assert (group / "memory.max").read_text() == str(512 * MIB)
    assert (group / "cpu.max").read_text() == "150000 100000"
    assert (group.parent / "cgroup.subtree_control").read_text() == "+cpu"


def test_without_groups_a_process_is_nicer_and_its_memory_is_said_to_be_free(
    tmp_path: Path, process: subprocess.Popen[bytes]
):
    said = hold(process.pid, "g", "attic", MIB, 0.5, root=tmp_path)
    assert said.startswith("attic: memory not limited (") and said.endswith(
        "niceness 3 for 0.5 of a processor"
    )
    assert psutil.Process(process.pid).nice() >= 3
    assert hold(process.pid, "g", "attic", None, None, root=tmp_path) == "attic: not limited"
    assert release("g", root=tmp_path)


def test_a_node_in_a_small_group_is_refused_before_it_allocates_and_the_groups_go_with_the_cluster(
    tmp_path: Path, process: subprocess.Popen[bytes]
):
    """A person's container is smaller than what the file says: 408 MiB are planned on desk, 48 MiB are left there.

    What a process had before it came into a group counts elsewhere: so it comes when all is imported.
    """
    probe = group_of(tmp_path / "probe")
    said = hold(process.pid, probe, "probe", 300 * MIB, 0.5)
    process.kill()
    process.wait()
    wait_for(lambda: release(probe), "the group of the probe goes", 5.0)
    if "not limited" in said or "niceness" in said:
        pytest.skip(f"no control groups may be made here: {said}")
    cluster = LocalCluster(write_topology(tmp_path, "two_nodes"))
    group = group_of(Path(cluster.env["EDGE_RUNTIME_STATE"]) / "two-nodes")
    try:
        desk = cluster.start_node("desk")
        desk.wait_for_line("listening on")
        hold(desk.pid, group, "desk", 48 * MIB, None)
        cluster.start_coordinator().wait_for_line("listening on")
        fault = wait_for(lambda: cluster.node("desk")["fault"], "desk is refused", 40.0)
        assert " more for its share" in fault and "are available in its control group" in fault
    finally:
        cluster.close()
    assert not (limits.ROOT / "memory" / group).exists() and not (limits.ROOT / group).exists()
