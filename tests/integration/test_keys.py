"""A cluster with keys serves those who have one of them, and nobody else."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from edge_runtime.errors import DeadlinePassed
from edge_runtime.protocol import Hello, Welcome, encode
from edge_runtime.transport.endpoint import Channel
from edge_runtime.transport.keys import load_keys, new_keys
from tests.support.clusters import LocalCluster, wait_for, write_topology
from tests.support.handshakes import Recorder, is_no_answer, replayed
from tests.support.processes import Finished, run_cli

WAIT_MS = 1500


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two nodes whose keys `edge-runtime keys new` made, running."""
    cluster = LocalCluster(write_topology(tmp_path_factory.mktemp("keyed"), "two_nodes", keys='"keys"'))
    made = run_cli("keys", "new", "--topology", cluster.topology)
    assert made.exit_code == 0, made
    with cluster:
        yield cluster


def with_keys(cluster: LocalCluster, folder: Path, *changed: tuple[Path, Path]) -> LocalCluster:
    """The same cluster as seen from a machine with other key files; `changed`: from, to (within the folder)."""
    shutil.copytree(cluster.topology.parent / "keys", folder / "keys")
    for source, target in changed:
        shutil.copy(source, folder / "keys" / target)
    shutil.copy(cluster.topology, folder / "topology.toml")
    return LocalCluster(folder / "topology.toml")


def failed(finished: Finished, exit_code: int, *words: str) -> None:
    assert finished.exit_code == exit_code and "Traceback" not in finished.stderr, finished
    last = finished.stderr.splitlines()[-1]
    assert all(word in last for word in words), last


def test_a_cluster_with_keys_answers_like_one_without(keyed: LocalCluster, one_node: LocalCluster) -> None:
    flags = ("--max-tokens", "32")
    ours = keyed.answer("Once upon a time", *flags)
    assert ours["text"] == one_node.answer("Once upon a time", *flags)["text"]
    assert ours["bill"]["exact_elsewhere"] > 0
    assert keyed.cli("doctor").exit_code == 0


def test_a_client_without_keys_is_told_so(keyed: LocalCluster, tmp_path: Path) -> None:
    text = re.sub(r"(?m)^keys = .*\n", "", keyed.topology.read_text())
    (tmp_path / "topology.toml").write_text(text)
    failed(LocalCluster(tmp_path / "topology.toml").cli("status"), 3, "keys")


def test_a_client_with_a_key_of_its_own_making_is_not_let_in(keyed: LocalCluster, tmp_path: Path) -> None:
    stranger = with_keys(keyed, tmp_path / "machine")
    for path in (tmp_path / "machine" / "keys").glob("client.*"):
        path.unlink()
    made = run_cli("keys", "new", "client", "--topology", stranger.topology)
    assert made.exit_code == 0
    failed(stranger.cli("status"), 3, "key")


def test_a_client_that_expects_another_coordinator_is_not_fooled(keyed: LocalCluster, tmp_path: Path) -> None:
    other = with_keys(keyed, tmp_path / "machine")
    keys = tmp_path / "machine" / "keys"
    shutil.copy(keys / "attic.key", keys / "coordinator.key")
    failed(other.cli("status"), 3, "key")


def test_a_node_whose_secret_is_missing_or_open_does_not_start(keyed: LocalCluster, tmp_path: Path) -> None:
    machine = with_keys(keyed, tmp_path / "machine")
    secret = tmp_path / "machine" / "keys" / "attic.key_secret"
    secret.chmod(0o640)
    failed(machine.cli("node", "attic"), 2, "chmod 600")
    secret.unlink()
    failed(machine.cli("node", "attic"), 2, "attic.key_secret", "edge-runtime keys new")


def test_a_node_cannot_take_anothers_name(keyed: LocalCluster, tmp_path: Path) -> None:
    """attic's key on a machine that says it is desk: the key decides."""
    machine = with_keys(keyed, tmp_path / "machine")
    keys = tmp_path / "machine" / "keys"
    for suffix in ("key", "key_secret"):
        shutil.copy(keys / f"attic.{suffix}", keys / f"desk.{suffix}")
    text = machine.topology.read_text()
    desk = re.search(r'name = "desk".*?127\.0\.0\.1:(\d+)', text, re.DOTALL)
    assert desk is not None
    machine.topology.write_text(text.replace(f"127.0.0.1:{desk[1]}", "127.0.0.1:19999"))
    failed(machine.cli("node", "desk", deadline_s=30.0), 3, "key", "desk")
    assert keyed.status()["ready"]


def test_nobody_without_a_key_gets_a_word_on_any_port(keyed: LocalCluster) -> None:
    hello = encode(Hello(node="client", role="client"), call_id=1)
    for port in keyed.ports().values():
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.set(zmq.LINGER, 0)
            peer.connect(f"tcp://127.0.0.1:{port}")
            peer.send_multipart(hello)
            assert not peer.poll(WAIT_MS)
    assert keyed.status()["ready"]


def addresses(cluster: LocalCluster) -> dict[str, str]:
    return {name: f"127.0.0.1:{port}" for name, port in cluster.ports().items()}


def test_nobody_with_a_wrong_key_or_for_a_wrong_one_gets_a_word_on_any_port(
    keyed: LocalCluster, tmp_path: Path
) -> None:
    """The coordinator's port and those over which nodes talk to each other, alike."""
    folder = keyed.topology.parent / "keys"
    new_keys(tmp_path, ["client"])
    ours, strange = load_keys(folder, "client"), load_keys(tmp_path, "client")
    for name, address in addresses(keyed).items():
        wrong = next(other for other in ("desk", "attic") if other != name)
        for keys, expected in ((strange, ours.of_peer(name)), (ours, ours.of_peer(wrong))):
            with (
                Channel(address, keys=keys, server_key=expected) as channel,
                pytest.raises(DeadlinePassed),
            ):
                channel.request(Hello("client", role="client"), Welcome, 0.5)
    assert keyed.status()["ready"]


def test_a_connection_that_is_overheard_and_replayed_gets_nothing_on_any_port(keyed: LocalCluster) -> None:
    keys = load_keys(keyed.topology.parent / "keys", "client")
    for name, address in addresses(keyed).items():
        recorder = Recorder(address)
        with Channel(recorder.address, keys=keys, server_key=keys.of_peer(name)) as channel:
            assert channel.wait_until_up(5.0)
            channel.send(Hello("client", role="client"), call_id=1)
            assert channel.receive(5.0) is not None, "whoever has a key is answered"
        recorder.close()
        assert is_no_answer(replayed(address, recorder.sent)), name
    assert keyed.status()["ready"]


def test_a_nodes_key_is_replaced_while_answers_run_and_then_the_old_one_is_worth_nothing(
    keyed: LocalCluster, tmp_path: Path
) -> None:
    folder, flags = keyed.topology.parent / "keys", ("--max-tokens", "300", "--ignore-eos")
    expected = keyed.answer("Once upon a time", *flags)["text"]
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    process = keyed.start_command("submit", "--json", *flags, "--", "Once upon a time")
    wait_for(lambda: keyed.status()["requests"]["in_flight"], "it is answered")
    new_keys(tmp_path / "new", ["attic"])
    shutil.copy(tmp_path / "new" / "attic.key", folder / "attic+next.key")  # to all machines
    shutil.copy(tmp_path / "new" / "attic.key_secret", folder / "attic.key_secret")  # and on its own
    keyed.kill("attic")
    keyed.start_node("attic")
    finished = process.finish(60.0)
    assert finished.exit_code == 0 and json.loads(finished.stdout)["text"] == expected, finished
    (folder / "attic+next.key").replace(folder / "attic.key")
    keyed.wait_until_ready()
    assert keyed.answer("Once upon a time", *flags)["text"] == expected
    coordinator = addresses(keyed)["coordinator"]
    with (
        Channel(coordinator, name="coordinator", keys=load_keys(old, "attic")) as channel,
        pytest.raises(DeadlinePassed),
    ):
        channel.request(Hello("attic"), Welcome, 0.5)


def test_up_names_all_keys_that_are_missing_before_it_starts_anything(tmp_path: Path) -> None:
    cluster = LocalCluster(write_topology(tmp_path, "two_nodes", keys='"keys"'))
    made = run_cli("keys", "new", "client", "desk", "--topology", cluster.topology)
    assert made.exit_code == 0, made
    done = cluster.cli("up", "--detach")
    failed(
        done,
        2,
        "no secret keys of coordinator, attic; make them with: edge-runtime keys new coordinator attic",
    )
    assert len(done.stderr.splitlines()) == 1
