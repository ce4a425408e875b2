"""Starting and stopping: nothing is left behind, whatever goes wrong, and whoever is at fault is named."""

import json
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from edge_runtime.config import read_records
from tests.support.clusters import MODEL, LocalCluster, free_ports_to_listen, wait_for, write_topology
from tests.support.processes import Finished, wait_until_gone

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes, not running."""
    local = LocalCluster(write_topology(tmp_path, "two_nodes"))
    yield local
    local.close()


def last_line(finished: Finished) -> str:
    """Standard error's last line, which is the error; there is no traceback above it."""
    assert "Traceback" not in finished.stderr, finished.stderr
    return finished.stderr.splitlines()[-1]


def records(cluster: LocalCluster) -> list[str]:
    return [
        record.name
        for folder in Path(cluster.env["EDGE_RUNTIME_STATE"]).glob("*")
        for record in read_records(folder)
    ]


def test_down_leaves_no_process_and_no_record_time_after_time(cluster: LocalCluster) -> None:
    trap = cluster.topology.parent / "topology.py"  # where the commands run; not the package of that name
    trap.write_text("raise SystemExit(9)")
    for _ in range(3):
        cluster.up()
        pids = cluster.pids()
        assert len(pids) == 3 and sorted(records(cluster)) == ["attic", "coordinator", "desk"]
        assert cluster.answer("Hello", "--max-tokens", "2")["token_ids"]
        cluster.forget_coordinator()
        assert cluster.down().exit_code == 0
        wait_until_gone(pids.values(), deadline_s=0.5)
        assert not cluster.processes() and not records(cluster)
    names = sorted(path.name for path in cluster.topology.parent.rglob("*") if path.is_file())
    logs = ["attic.log", "coordinator.log", "desk.log"]
    assert names == [*logs, "topology.good", "topology.py", "topology.toml", "up.lock"]
    again = cluster.down()
    assert again.exit_code == 0 and "nothing" in again.stderr


def test_a_second_up_is_refused_and_disturbs_nothing(cluster: LocalCluster) -> None:
    cluster.up()
    before = cluster.pids()
    second = cluster.cli("up", "--detach")
    assert second.exit_code == 2
    assert "already up" in last_line(second) and str(before["desk"]) in last_line(second)
    assert cluster.pids() == before
    assert cluster.answer("Hello", "--max-tokens", "2")["token_ids"]


def test_down_takes_a_frozen_node_and_one_started_by_hand_along(cluster: LocalCluster) -> None:
    cluster.up()
    cluster.kill("attic")
    with cluster.start_command("node", "attic") as by_hand:
        by_hand.wait_for_line("in contact")
        cluster.signal("desk", signal.SIGSTOP)
        pids = cluster.pids()
        cluster.forget_coordinator()
        assert cluster.down().exit_code == 0
        wait_until_gone([*pids.values(), by_hand.pid], deadline_s=0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_in_the_foreground_takes_its_nodes_along(cluster: LocalCluster, number: signal.Signals) -> None:
    with cluster.start_command("up") as up:
        up.wait_for_line("stop with Ctrl-C")
        pids = cluster.pids()
        cluster.forget_coordinator()
        ended = up.stop(number)
        assert ended.exit_code == 0 and "stopped" in ended.stderr
    wait_until_gone(pids.values(), deadline_s=0.5)


def test_up_that_is_interrupted_while_nodes_load_takes_them_along(cluster: LocalCluster) -> None:
    with cluster.start_command("up", "--detach") as up:
        wait_for(lambda: len(records(cluster)) == 3, "all processes are started")
        assert up.stop(signal.SIGTERM).exit_code == 130
    assert not cluster.processes() and not records(cluster)


def test_up_in_the_foreground_tells_who_ended_and_goes_on(cluster: LocalCluster) -> None:
    with cluster.start_command("up") as up:
        up.wait_for_line("stop with Ctrl-C")
        cluster.kill("attic")
        up.wait_for_line("attic was killed by SIGKILL")
        assert cluster.status()["nodes"][0]["state"] == "ready"
        cluster.forget_coordinator()


def test_a_port_in_use_ends_up_with_the_nodes_name_and_nothing_else_left(cluster: LocalCluster) -> None:
    port = int(re.findall(r"127\.0\.0\.1:(\d+)", cluster.topology.read_text())[-1])
    with socket.create_server(("127.0.0.1", port)):
        finished = cluster.cli("up", "--detach")
    assert finished.exit_code == 2
    assert "attic" in last_line(finished) and f"port {port}" in last_line(finished)
    assert not cluster.processes() and not records(cluster)


def test_a_second_cluster_on_the_ports_of_a_first_is_not_taken_for_ready(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster.up()
    (tmp_path / "other").mkdir()
    other = LocalCluster(tmp_path / "other" / "topology.toml")
    other.topology.write_text(cluster.topology.read_text().replace('"two-nodes"', '"others"'))
    finished = other.cli("up", "--detach")
    assert finished.exit_code == 2 and "in use" in last_line(finished)
    assert not other.processes()
    assert cluster.answer("Hello", "--max-tokens", "2")["token_ids"]


def test_two_clusters_run_side_by_side_and_stop_apart(cluster: LocalCluster, one_node: LocalCluster) -> None:
    cluster.up()
    flags = ("--max-tokens", "8")
    assert cluster.answer("Hello", *flags)["text"] == one_node.answer("Hello", *flags)["text"]
    cluster.forget_coordinator()
    assert cluster.down().exit_code == 0
    assert one_node.answer("Hello", *flags)["token_ids"]


def test_a_model_that_is_cut_short_ends_up_with_the_files_name(tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("calibration")))
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    cluster = LocalCluster(write_topology(tmp_path, "two_nodes", model=model))
    finished = cluster.cli("up", "--detach")
    assert finished.exit_code == 2
    assert shard.name in last_line(finished)
    assert not cluster.processes() and not records(cluster)


def test_weights_that_are_no_numbers_end_up_with_file_and_tensor_and_are_the_users_fault(
    tmp_path: Path,
) -> None:
    """Only who reads them can know."""
    model = Path(shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("calibration")))
    name = "model.layers.3.mlp.gate.weight"
    shard = model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    tensors[name][2, 3] = float("nan")
    save_file(tensors, shard)
    cluster = LocalCluster(write_topology(tmp_path, "one_node", model=model))
    finished = cluster.cli("up", "--detach")
    assert finished.exit_code == 2
    assert (
        f"error: node solo cannot serve: {shard}: tensor {name} has 1 of 8192 numbers that are not"
        in last_line(finished)
    )
    assert not cluster.processes() and not records(cluster)


def test_a_node_with_another_model_is_refused_with_both_hashes(
    one_node: LocalCluster, tmp_path: Path
) -> None:
    """The same topology, but on this machine the folder holds other weights."""
    model = Path(shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("calibration")))
    shard = model / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    text = one_node.topology.read_text().replace(str(MODEL), str(model))
    coordinator, node = re.findall(r"127\.0\.0\.1:\d+", text)
    [port] = free_ports_to_listen(1)
    topology = tmp_path / "topology.toml"
    topology.write_text(text.replace(node, f"127.0.0.1:{port}"))
    finished = LocalCluster(topology).cli("node", "solo")
    assert finished.exit_code == 3
    assert len(set(re.findall(r"\b[0-9a-f]{32}\b", last_line(finished)))) == 2, finished.stderr
    assert coordinator in one_node.topology.read_text() and one_node.status()["ready"]


def test_a_second_node_of_one_name_is_refused(one_node: LocalCluster) -> None:
    finished = one_node.cli("node", "solo")
    assert finished.exit_code == 2 and "in use" in last_line(finished)
    assert "solo" in records(one_node)  # the first is still known
