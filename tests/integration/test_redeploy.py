"""Clusters whose topology file is edited while they answer: no stream breaks, no text changes, and what fails changes nothing."""

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clusters import MODEL, LocalCluster, free_ports_to_listen, wait_for, write_topology
from tests.support.processes import CliProcess, Finished, wait_until_gone
from tests.support.streams import Streams, greedy_prompts
from topology.files import read_cluster

NUM_STREAMS = 20
NUM_TOKENS = 300
LONGEST_PAUSE_S = 2.0
PROMPTS = [f"Chapter {number}: the harbour" for number in range(NUM_STREAMS)]

pytestmark = pytest.mark.timeout(240)


def edit(cluster: LocalCluster, change: Callable[[str], str]) -> Path:
    """The cluster's file, edited under another name."""
    path = cluster.topology.parent / "edited.toml"
    text = change(path.read_text() if path.exists() else cluster.topology.read_text())
    path.write_text(text)
    return path


def apply(cluster: LocalCluster, file: Path, *flags: str, deadline_s: float = 100.0) -> Finished:
    return cluster.cli("apply", file, *flags, deadline_s=deadline_s)


def without(name: str) -> Callable[[str], str]:
    return lambda text: re.sub(rf'(?ms)^\[\[node\]\]\nname = "{name}"\n.*?(?=^\[|\Z)', "", text)


def with_node(name: str, memory: str = "362 MiB", **keys: str) -> Callable[[str], str]:
    [port] = free_ports_to_listen(1)
    lines = [
        "[[node]]",
        f'name = "{name}"',
        f'address = "127.0.0.1:{port}"',
        f'memory = "{memory}"',
        'roles = ["experts"]',
        *(f"{key} = {value}" for key, value in keys.items()),
    ]
    return lambda text: text + "\n" + "\n".join(lines) + "\n"


def check_promise(promised: dict, cluster: LocalCluster) -> None:
    """What a preview promised is what nodes allocated: weights and KV within 5 %, and no more in all than was said."""
    for name, holds in promised["holds"].items():
        epoch = cluster.status()["epoch"]
        wait_for(
            lambda name=name, epoch=epoch: cluster.node(name)["report"].get("epoch") == epoch,
            f"{name} beats by it",
        )
        node = cluster.node(name)
        assert node["weight_bytes"] == pytest.approx(holds["weight_bytes"], rel=0.05), name
        assert node["report"].get("kv_blocks_total", 0) == holds["kv_blocks"], name
        sizes = ("weight_bytes", "kv_bytes", "workspace_bytes", "process_bytes")
        assert node["memory_used_bytes"] <= 1.05 * sum(holds[size] for size in sizes), name


@pytest.fixture
def three(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(write_topology(tmp_path, "three_nodes")) as cluster:
        yield cluster


def test_twenty_streams_run_on_unchanged_across_five_edits(three: LocalCluster) -> None:
    calm = Streams(three, greedy_prompts(PROMPTS, NUM_TOKENS))
    texts = calm.texts()
    edits = [
        with_node("extra"),
        without("attic"),
        lambda text: text.replace('memory = "406 MiB"', 'memory = "380 MiB"'),
        lambda text: text.replace('name = "laptop"', 'name = "laptop"\nroles = ["experts"]'),
        lambda text: text + '\n[[pin]]\nexpert = "2.7"\nnode = "extra"\n',
    ]
    streams = Streams(three, greedy_prompts(PROMPTS, NUM_TOKENS))
    epoch = 1
    for number, change in enumerate(edits):
        wait_for(
            lambda: streams.all_run and streams.num_tokens > number * 200,  # noqa: B023
            "streams run",
            60.0,
        )
        file = edit(three, change)
        promised = three.planned(file)
        done = apply(three, file)
        assert done.exit_code == 0, f"edit {number}: {done}\n{three.logs()}"
        check_promise(promised, three)
        assert three.status()["epoch"] > epoch
        epoch = three.status()["epoch"]
    assert streams.texts() == texts
    pause_s, calm_s = streams.longest_pause_s(), calm.longest_pause_s()
    assert pause_s < LONGEST_PAUSE_S + 3 * calm_s, f"{pause_s} s, undisturbed {calm_s} s"
    three.wait_until_idle()
    body = three.status()
    assert [node["name"] for node in body["nodes"]] == ["desk", "laptop", "extra"]
    assert body["ready"] and not body["experts_without_host"] and body["requests"]["failed"] == 0
    pids = [process.pid for process in three.processes()]
    extra = three.node("extra")["pid"]
    down = three.down()
    assert down.exit_code == 0 and "extra" in down.stderr
    wait_until_gone([*pids, extra])


def test_a_file_with_faults_or_without_room_is_refused_and_changes_nothing(three: LocalCluster) -> None:
    before = three.status()
    bad = edit(three, lambda text: text.replace("MiB", "MBi"))
    done = apply(three, bad)
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("memory") == 3, "all of its faults"
    bad.write_text(
        without("attic")(without("laptop")(three.topology.read_text())).replace("406 MiB", "368 MiB")
    )
    done = apply(three, bad)
    assert done.exit_code == 2 and "MiB" in done.stderr
    bad.write_text(three.topology.read_text().replace('name = "three-nodes"', 'name = "another"'))
    done = apply(three, bad)
    assert done.exit_code == 2 and "another" in done.stderr and "three-nodes" in done.stderr
    after = three.status()
    assert (after["epoch"], after["changes"]) == (before["epoch"], []) and after["ready"]


def test_a_new_node_that_cannot_work_ends_the_change_and_all_is_as_it_was(
    three: LocalCluster, tmp_path: Path
) -> None:
    text = three.answer(PROMPTS[0], "--max-tokens", "20")["text"]
    weights = [node["weight_bytes"] for node in three.status()["nodes"]]
    file = edit(three, with_node("extra"))
    other = Path(shutil.copytree(MODEL, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    foreign = tmp_path / "foreign.toml"
    foreign.write_text(re.sub(r"(?m)^model = .*$", f"model = {json.dumps(str(other))}", file.read_text()))
    elsewhere = three.env | {
        "EDGE_RUNTIME_STATE": str(tmp_path / "elsewhere")
    }  # a machine that started nothing
    with CliProcess("apply", file, "--topology", three.topology, env=elsewhere) as process:
        process.wait_for_line("run: edge-runtime node NAME")
        stranger = three.cli("node", "extra", "--topology", foreign)
        assert stranger.exit_code == 3 and "model hash" in stranger.stderr
        done = process.finish(60.0)
    assert done.exit_code == 3 and "extra" in done.stderr and "model hash" in done.stderr, done
    [extra] = [node for node in read_cluster(file).nodes if node.name == "extra"]
    with socket.create_server((extra.host, extra.port)):
        done = apply(three, file)
    assert done.exit_code == 3 and "extra ended with exit code" in done.stderr, done
    body = three.status()
    assert [node["name"] for node in body["nodes"]] == ["desk", "laptop", "attic"]
    assert body["epoch"] == 1 and body["change"] is None and "rolled back" in body["last_change"]
    assert [node["weight_bytes"] for node in body["nodes"]] == weights
    assert three.answer(PROMPTS[0], "--max-tokens", "20")["text"] == text
    assert not [found for found in three.processes() if "extra" in found.cmdline()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_node_that_goes_while_it_loads_ends_the_change_and_streams_go_on(
    three: LocalCluster, how: signal.Signals
) -> None:
    texts = Streams(three, greedy_prompts(PROMPTS, 150)).texts()
    streams = Streams(three, greedy_prompts(PROMPTS, 150))
    wait_for(lambda: streams.all_run, "streams run", 60.0)
    file = edit(three, with_node("extra"))
    elsewhere = three.env | {"EDGE_RUNTIME_STATE": str(three.topology.parent / "elsewhere")}
    with CliProcess("apply", file, "--topology", three.topology, env=elsewhere) as process:
        # Nobody starts `extra`, so that the change cannot be over before the loss is noticed.
        process.wait_for_line("run: edge-runtime node NAME")
        assert "extra" in wait_for(lambda: three.status()["change"], "the change has begun")
        pid = three.pids()["attic"]
        os.kill(pid, how)
        done = process.finish(60.0)
    assert done.exit_code == 3 and "attic" in done.stderr, done
    assert streams.texts() == texts
    if how is signal.SIGKILL:
        three.start_node("attic")
    else:
        os.kill(pid, signal.SIGCONT)
    three.wait_until_ready()
    wait_for(lambda: three.status()["change"] is None, "no change is under way")
    assert "extra" not in [node["name"] for node in three.status()["nodes"]]
    assert Streams(three, greedy_prompts(PROMPTS, 150)).texts() == texts


def test_an_apply_whose_coordinator_dies_says_what_counts_when_it_is_back(three: LocalCluster) -> None:
    file = edit(three, with_node("extra"))
    elsewhere = three.env | {"EDGE_RUNTIME_STATE": str(three.topology.parent / "elsewhere")}
    with CliProcess("apply", file, "--topology", three.topology, env=elsewhere) as process:
        process.wait_for_line("run: edge-runtime node NAME")
        wait_for(lambda: three.status()["change"], "the change has begun")
        three.kill("coordinator")
        three.forget_coordinator()
        process.wait_for_line("waiting for the coordinator")
        three.start_coordinator()
        done = process.finish(60.0)
    assert done.exit_code == 3 and "epoch 2 never counted" in done.stderr and "epoch 1" in done.stderr, done
    three.wait_until_ready()
    assert [node["name"] for node in three.status()["nodes"]] == ["desk", "laptop", "attic"]


def test_a_watched_file_is_applied_after_each_edit_and_a_bad_one_is_told(three: LocalCluster) -> None:
    good = three.topology.read_text()
    assert three.status()["epoch"] == 1
    with three.start_command("apply", three.topology, "--watch") as watch:
        watch.wait_for_line("nothing to change")
        three.topology.write_text(good.replace("364 MiB", "370 MiB"))
        # 2, or more: a busy machine may lose sight of a node meanwhile, and the change is then worked out anew
        first = int(watch.wait_for_line(r"epoch (\d+) in .* was applied")[1])
        three.topology.write_text(good.replace("364 MiB", "370 elephants"))
        watch.wait_for_line(r"not applied: .*line \d+.*elephants")
        three.wait_until_ready()
        assert three.status()["epoch"] == first > 1
        three.topology.write_text(good)
        watch.wait_for_line(rf"epoch {first + 1} in .* was applied")
        watch.stop(signal.SIGINT)


def test_a_drained_node_stops_and_its_answers_go_on_elsewhere(three: LocalCluster) -> None:
    texts = Streams(three, greedy_prompts(PROMPTS, 100)).texts()
    streams = Streams(three, greedy_prompts(PROMPTS, 100))
    wait_for(lambda: streams.all_run, "streams run", 60.0)
    assert three.node("laptop")["in_flight"]
    pid = three.pids()["laptop"]
    planned = three.cli("plan", edit(three, without("laptop")), "--json")
    assert planned.exit_code == 0, planned
    kinds = {node["name"]: node["kind"] for node in json.loads(planned.stdout)["nodes"]}
    assert kinds["laptop"] == "removed"
    done = three.cli("node", "drain", "laptop")
    assert done.exit_code == 0 and "laptop was drained" in done.stdout, done
    wait_until_gone([pid])
    assert streams.texts() == texts
    refused = three.cli("node", "drain", "desk")
    assert refused.exit_code == 2 and "desk cannot be drained" in refused.stderr
    three.start_node("laptop")
    wait_for(
        lambda: three.node("laptop")["experts"] and three.status()["change"] is None, "it has its part", 30.0
    )
    assert Streams(three, greedy_prompts(PROMPTS, 100)).texts() == texts
