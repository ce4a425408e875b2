"""Starts and stops the daemons of one topology file as processes of this machine: `up` and `down`.

Knows processes, their logs and their records; what a daemon does is behind its own command.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from edge_runtime.client import Client
from edge_runtime.clock import Clock
from edge_runtime.config import (
    ProcessRecord,
    is_running,
    log_path,
    read_records,
    record_process,
    remove_record,
    state_dir,
    write_record,
)
from edge_runtime.errors import EXIT_USER, ClusterError, PeerError, UserError
from topology.cluster import Cluster

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
REPORT_S = 2.0
STOP_DEADLINE_S = 10.0
POLL_S = 0.05


@dataclass
class LocalCluster:
    """The processes that one `up` started."""

    directory: Path
    processes: dict[str, subprocess.Popen[bytes]]

    def exited(self) -> tuple[str, int, str] | None:
        """First process that ended: its name, exit code and the last line of its log. None while all run."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None:
                return name, code, last_log_line(log_path(self.directory, name))
        return None


def start_local(cluster: Cluster, topology_path: Path) -> LocalCluster:
    """Start the coordinator and every node of the file, each a process with its own log and record.

    Raises UserError when this cluster already runs here. The processes outlive the caller.
    """
    directory = state_dir(topology_path)
    running = [record for record in read_records(directory) if is_running(record)]
    if running:
        names = ", ".join(f"{record.name} (pid {record.pid})" for record in running)
        raise UserError(
            f"cluster {cluster.name} is already up here: {names}; stop it with `edge-runtime down` first"
        )
    directory.mkdir(parents=True, exist_ok=True)
    local = LocalCluster(directory, {})
    threads = {node.name: node.threads for node in cluster.nodes}
    for name in (COORDINATOR, *cluster.node_names):
        words = [COORDINATOR] if name == COORDINATOR else ["node", name]
        command = [sys.executable, "-m", "edge_runtime", *words, "--topology", str(topology_path)]
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads.get(name, 1)), PYTHONUNBUFFERED="1")
        with log_path(directory, name).open("wb") as log_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        local.processes[name] = process
        write_record(directory, record_process(name, process.pid))
    return local


def wait_ready(
    local: LocalCluster,
    connect: Callable[[], Client],
    clock: Clock,
    timeout_s: float,
    report: Callable[[str], None],
) -> None:
    """Return when every node serves. Raises ClusterError when a process ends, a node fails, or time is over.

    report  is told how far it is, at most every 2 s
    """
    give_up = clock.now() + timeout_s
    next_report = clock.now() + REPORT_S
    waiting_for = "the coordinator to start"
    client: Client | None = None
    try:
        while True:
            ended = local.exited()
            if ended is not None:
                name, code, line = ended
                kind = UserError if code == EXIT_USER else ClusterError
                raise kind(f"{name} ended with exit code {code}: {line or 'its log is empty'}")
            if client is None:
                client = _try_connect(connect)
            else:
                body = client.status()
                if body["ready"]:
                    return
                failed = [node for node in body["nodes"] if node["state"] == "failed"]
                if failed:
                    raise ClusterError(f"node {failed[0]['name']} cannot serve: {failed[0]['fault']}")
                waiting_for = body["waiting_for"]
            if clock.now() > give_up:
                raise ClusterError(f"not ready after {timeout_s:.0f} s, waiting for {waiting_for}")
            if clock.now() >= next_report:
                next_report += REPORT_S
                report(f"waiting for {waiting_for}")
            clock.sleep(POLL_S)
    finally:
        if client is not None:
            client.close()


def wait_for_signal(local: LocalCluster, clock: Clock) -> None:
    """Return on Ctrl-C or SIGTERM. A process that ends meanwhile is told, and the others go on."""
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda found, _: stop.append(found))
    told: set[str] = set()
    while not stop:
        for name, process in local.processes.items():
            code = process.poll()
            if code is not None and name not in told:
                told.add(name)
                log.warning(
                    "%s ended with exit code %d: %s",
                    name,
                    code,
                    last_log_line(log_path(local.directory, name)),
                )
        if len(told) == len(local.processes):
            raise ClusterError("every process of the cluster has ended; look at the logs")
        clock.sleep(POLL_S)


def _try_connect(connect: Callable[[], Client]) -> Client | None:
    client = connect()
    try:
        client.connect(0.5)
    except PeerError:
        client.close()
        return None
    except BaseException:
        client.close()
        raise
    return client


def stop_local(
    topology_path: Path, clock: Clock, report: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Stop every recorded process of this cluster: asked first, killed after 10 s. Names of those that ran.

    Nothing that was started by `up` is left when this returns; a process it may not kill is a ClusterError.
    """
    directory = state_dir(topology_path)
    records = [record for record in read_records(directory) if is_running(record)]
    for record in records:
        _signal(record.pid, signal.SIGTERM)
    stopped = [record.name for record in records]
    deadline = clock.now() + STOP_DEADLINE_S
    next_report = clock.now() + 2.0
    while records and clock.now() < deadline:
        records = [record for record in records if is_running(record)]
        if records and clock.now() >= next_report:
            report(f"waiting for {_names(records)} to stop")
            next_report += 2.0
        if records:
            clock.sleep(POLL_S)
    for record in records:
        report(f"{record.name} (pid {record.pid}) did not stop within {STOP_DEADLINE_S:.0f} s: killed")
        _signal(record.pid, signal.SIGKILL)
    deadline = clock.now() + STOP_DEADLINE_S
    while any(is_running(record) for record in records):
        if clock.now() > deadline:
            raise ClusterError(f"{_names(records)} cannot be killed; look at {directory}")
        clock.sleep(POLL_S)
    for record in read_records(directory):
        remove_record(directory, record.name)
    return stopped


def last_log_line(path: Path) -> str:
    """The last line of a log that is not blank, for an error message; empty if there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        psutil.Process(pid).send_signal(number)
    except psutil.NoSuchProcess:
        pass  # it went by itself meanwhile


def _names(records: Sequence[ProcessRecord]) -> str:
    return ", ".join(f"{record.name} (pid {record.pid})" for record in records)
