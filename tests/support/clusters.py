"""Whole clusters for tests: a scenario copied with ports of its own, run through the command line, and looked at.

Every wait has a deadline. Knows the commands and their JSON; the status is asked for over the client's own channel,
since a process per look would cost more than what is looked at.
"""

import json
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import pytest

from edge_runtime.client import Client
from edge_runtime.clock import SystemClock
from edge_runtime.commands.shared import open_client
from edge_runtime.errors import EdgeError
from edge_runtime.launch import start_local, wait_ready
from edge_runtime.spawner import Spawner
from edge_runtime.transport.keys import load_keys
from tests.support.processes import CliProcess, Finished, processes_with, run_cli, wait_until_gone
from topology.files import read_cluster

CLOCK = SystemClock()
ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "testbed" / "scenarios"
MODEL = ROOT / "testbed" / "models" / "edge-moe-demo"
_PORTS = range(20000, 32000)  # below those that the machine gives to outgoing connections
_given: set[int] = set()


def free_ports_to_listen(count: int) -> list[int]:
    """Loopback ports that nobody has, and that no outgoing connection will be given meanwhile."""
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            if port not in _given and probe.connect_ex(("127.0.0.1", port)) != 0:
                _given.add(port)
                found.append(port)
    return found


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 20.0) -> Any:
    """The first true value of `condition()`; fails with `what` after `deadline_s`."""
    until = CLOCK.now() + deadline_s
    while not (found := condition()):
        assert CLOCK.now() < until, f"{what}: not so within {deadline_s} s"
        CLOCK.sleep(0.02)
    return found


def write_topology(folder: Path, scenario: str | Path, *, model: Path = MODEL, **cluster_keys: str) -> Path:
    """A copy of a scenario with free ports and an absolute model; `cluster_keys` are TOML values for [cluster]."""
    source = scenario if isinstance(scenario, Path) else SCENARIOS / f"{scenario}.toml"
    text = source.read_text()
    ports = dict.fromkeys(re.findall(r"127\.0\.0\.1:(\d+)", text))
    free = dict(zip(ports, free_ports_to_listen(len(ports)), strict=True))
    # All at once: one after another, a port that is given may be one that the scenario has further down.
    text = re.sub(r'"127\.0\.0\.1:(\d+)"', lambda found: f'"127.0.0.1:{free[found[1]]}"', text)
    text = re.sub(r"(?m)^model = .*$", f"model = {json.dumps(str(model))}", text)
    for key, value in cluster_keys.items():
        text = re.sub(rf"(?m)^{key} = .*\n", "", text)
        text = text.replace("[cluster]\n", f"[cluster]\n{key} = {value}\n", 1)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "topology.toml"
    path.write_text(text)
    return path


@cache
def _spawner() -> Spawner:
    return Spawner()


class LocalCluster:
    """One topology file and what runs of it on this machine. As a context manager it is up inside and gone after."""

    def __init__(self, topology: Path) -> None:
        self.topology = topology
        self.env = {"EDGE_RUNTIME_STATE": str(topology.parent / "state")}
        self._client: Client | None = None
        self._by_hand: list[CliProcess] = []

    # Commands.

    def cli(self, command: str, *arguments: str | Path, deadline_s: float = 60.0) -> Finished:
        """Run one command on this cluster to its end."""
        return run_cli(
            command,
            "--topology",
            self.topology,
            *arguments,
            env=self.env,
            deadline_s=deadline_s,
            cwd=self.topology.parent,
        )

    def start_command(self, command: str, *arguments: str | Path) -> CliProcess:
        """Start a command and let it run; the caller stops it."""
        return CliProcess(
            command, "--topology", self.topology, *arguments, env=self.env, cwd=self.topology.parent
        )

    def up(self) -> None:
        finished = self.cli("up", "--detach", deadline_s=100.0)
        assert finished.exit_code == 0, f"{finished}\n{self.logs()}"

    def up_at_once(self) -> None:
        """What `up --detach` does, by the functions behind it and from one forking process for all clusters of a test process:
        thirty clusters would each import torch again, 4 s of processor time. A test about `up` calls `up`.
        """
        if set(self.env) != {"EDGE_RUNTIME_STATE"}:  # the forking process has no other settings
            self.up()
            return
        cluster = read_cluster(self.topology)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("EDGE_RUNTIME_STATE", self.env["EDGE_RUNTIME_STATE"])
            local = start_local(cluster, self.topology, spawner=_spawner())
        try:
            wait_ready(local, lambda: open_client(cluster), CLOCK, 100.0, lambda line: None)
        except EdgeError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error

    def down(self) -> Finished:
        return self.cli("down")

    def submit(self, prompt: str, *flags: str, deadline_s: float = 60.0) -> Finished:
        return self.cli("submit", "--json", *flags, "--", prompt, deadline_s=deadline_s)

    def answer(self, prompt: str, *flags: str, deadline_s: float = 60.0) -> dict[str, Any]:
        """The JSON of an answer that must succeed."""
        finished = self.submit(prompt, *flags, deadline_s=deadline_s)
        assert finished.exit_code == 0, f"{finished}\n{self.logs()}"
        return json.loads(finished.stdout)

    def write_prompts(self, entries: Sequence[Mapping[str, Any] | str], name: str = "prompts.jsonl") -> Path:
        """A file for `submit --file`."""
        path = self.topology.parent / name
        lines = [{"prompt": entry} if isinstance(entry, str) else dict(entry) for entry in entries]
        path.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
        )
        return path

    def answers(
        self, entries: Sequence[Mapping[str, Any] | str], *flags: str, deadline_s: float = 100.0
    ) -> list[dict[str, Any]]:
        """The JSON of every answer of one file, all of which must succeed."""
        finished = self.cli("submit", "--file", self.write_prompts(entries), *flags, deadline_s=deadline_s)
        assert finished.exit_code == 0, f"{finished}\n{self.logs()}"
        return read_json_lines(finished.stdout)

    def start_node(self, name: str) -> CliProcess:
        """`edge-runtime node NAME`, as a person would start it again."""
        process = self.start_command("node", name)
        self._by_hand.append(process)
        return process

    def start_coordinator(self) -> CliProcess:
        process = self.start_command("coordinator")
        self._by_hand.append(process)
        return process

    # What is.

    def status(self) -> dict[str, Any]:
        """What `status --json` prints."""
        if self._client is None:
            cluster = read_cluster(self.topology)
            keys = load_keys(Path(cluster.keys), "client") if cluster.keys else None
            self._client = Client(cluster.coordinator, keys, CLOCK)
            self._client.connect(10.0)
        return self._client.status()

    def planned(self, file: Path) -> dict[str, Any]:
        """What `plan FILE --json` prints."""
        self.status()
        assert self._client is not None
        return self._client.plan(file.read_text(), str(file)).body

    def node(self, name: str) -> dict[str, Any]:
        return next(node for node in self.status()["nodes"] if node["name"] == name)

    def pids(self) -> dict[str, int]:
        """Pids of the coordinator and of every node that was ever heard of."""
        status = self.status()
        return {"coordinator": status["coordinator"]["pid"]} | {
            node["name"]: node["pid"] for node in status["nodes"] if node["pid"]
        }

    def ports(self) -> dict[str, int]:
        """Where the coordinator and every node listen."""
        status = self.status()
        addresses = {"coordinator": status["coordinator"]["address"]} | {
            node["name"]: node["address"] for node in status["nodes"]
        }
        return {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}

    def log(self, name: str) -> str:
        """What a process that `up` started has said so far."""
        found = list(Path(self.env["EDGE_RUNTIME_STATE"]).glob(f"*/{name}.log"))
        return "".join(path.read_text() for path in found)

    def logs(self) -> str:
        """The last lines of every log."""
        logs = sorted(Path(self.env["EDGE_RUNTIME_STATE"]).glob("*/*.log"))
        return "\n".join(
            f"--- {path.stem}\n" + "\n".join(path.read_text().splitlines()[-8:]) for path in logs
        )

    def forget_coordinator(self) -> None:
        """It was ended on purpose: ask the next one over a new connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def wait_until_idle(self, deadline_s: float = 20.0) -> None:
        """No request runs, no KV block is held, and the nodes have said so."""
        wait_for(lambda: is_idle(self.status()), "no request, and every KV block free", deadline_s)

    def wait_until_ready(self, deadline_s: float = 30.0) -> None:
        try:
            wait_for(lambda: self.status()["ready"], "the cluster is ready", deadline_s)
        except AssertionError as error:
            by_hand = "\n".join(process.stderr for process in self._by_hand)
            raise AssertionError(
                f"{error}: {self.status()['waiting_for']}\n{by_hand}\n{self.logs()}"
            ) from None

    def processes(self) -> list[psutil.Process]:
        """Every process of this topology file."""
        return list(processes_with(str(self.topology)))

    # Doing harm.

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids()[name], number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        pid = self.pids()[name]
        os.kill(pid, signal.SIGKILL)
        wait_until_gone([pid])

    # With.

    def __enter__(self) -> Self:
        try:
            self.up_at_once()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all of it, by force where it must be."""
        self.forget_coordinator()
        self.down()
        for process in self._by_hand:
            process.stop()
        left = self.processes()
        for process in left:
            process.kill()
        assert not left, f"`down` left {left}"


def read_json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def is_idle(status: Mapping[str, Any]) -> bool:
    """Nothing runs, as the coordinator and the last heartbeats have it."""
    reports = [node["report"] for node in status["nodes"]]
    return status["requests"]["in_flight"] == 0 and all(
        report.get("kv_blocks_free") == report.get("kv_blocks_total")
        and not report.get("running")
        and not report.get("waiting")
        for report in reports
    )
