"""Starts and stops the daemons of one topology file as processes of this machine: `up` and `down`.

Knows processes, their logs and their records; what a daemon does is behind its own command.
"""

import contextlib
import fcntl
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from edge_runtime import limits
from edge_runtime.client import Client
from edge_runtime.clock import Clock
from edge_runtime.config import (
    SHAPE_VARIABLE,
    STATE_VARIABLE,
    ProcessRecord,
    forget_snapshot,
    is_running,
    log_path,
    read_records,
    record_process,
    remove_record,
    state_dir,
    write_record,
)
from edge_runtime.errors import EXIT_USER, ClusterError, ConfigError, PeerError, Refusal, UserError
from edge_runtime.log import Reminder
from edge_runtime.spawner import CODE_UNKNOWN, Spawned, Spawner
from kernels.settings import is_on
from topology.cluster import Cluster

log = logging.getLogger(__name__)

Say = Callable[[str], None]

COORDINATOR = "coordinator"
END_CLUSTER = (
    signal.SIGUSR1
)  # for a coordinator: it ends answers too, which SIGTERM leaves to the next coordinator
SHAPED = "shaped"  # file in the folder of records of a cluster whose links are as slow as its file says
LIMITED = "limited"  # file in the folder of records of a cluster whose nodes are held to their limits
STOP_DEADLINE_S = 10.0
GROUPS_END_S = 3.0  # how long the control groups of processes that have ended may still be in use
POLL_S = 0.05


@dataclass
class LocalCluster:
    """The processes that one `up` started."""

    directory: Path
    processes: dict[str, Spawned]

    def exited(self) -> tuple[str, int, str] | None:
        """First process that ended: its name, exit code and the last line of its log. None while all run."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None:
                return name, code, last_log_line(log_path(self.directory, name))
        return None

    def ended_line(self) -> str | None:
        """One line about the first process that ended; None while all run."""
        ended = self.exited()
        return _ended_line(self, *ended) if ended is not None else None


def start_local(
    cluster: Cluster,
    topology_path: Path,
    *,
    limited: Say | None = None,
    report: Say = lambda line: None,
    spawner: Spawner | None = None,
) -> LocalCluster:
    """Start the coordinator and every node of the file, each a process with its own log and record.

    limited  hold each node to the file's `memory` and `cpu_share`, and tell how
    report   is told how long it waits for the first of them
    spawner  what forks them, where there is one already; they have its environment

    Raises UserError when this cluster already runs here. The processes outlive the caller.
    """
    directory = state_dir(topology_path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _sole_starter(directory, cluster.name):
            _refuse_second(cluster, directory)
            forget_snapshot(directory)
            return _start_all(cluster, topology_path, directory, limited, spawner or Spawner(report))
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the state folder {directory} cannot be written ({error.strerror}); name another one with {STATE_VARIABLE}"
    )


@contextlib.contextmanager
def _sole_starter(directory: Path, cluster_name: str) -> Iterator[None]:
    """Two `up` of one cluster at the same moment: the second is told so."""
    with (directory / "up.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"cluster {cluster_name} is just being started by another `edge-runtime up`"
            ) from error
        yield


def _refuse_second(cluster: Cluster, directory: Path) -> None:
    running = [record for record in read_records(directory) if is_running(record)]
    if running:
        raise UserError(
            f"cluster {cluster.name} is already up here: {_names(running)}; stop it with `edge-runtime down` first"
        )


def _start_all(
    cluster: Cluster, topology_path: Path, directory: Path, limited: Say | None, spawner: Spawner
) -> LocalCluster:
    local = LocalCluster(directory, {})
    with _all_or_none(spawner, directory):
        for name in (COORDINATOR, *cluster.node_names):
            local.processes[name] = _start(spawner, name, topology_path, directory)
        for marker, is_set in (
            (SHAPED, is_on(os.environ, SHAPE_VARIABLE)),
            (LIMITED, limited is not None),
        ):
            (directory / marker).unlink(missing_ok=True)  # they are for nodes that come later
            if is_set:
                (directory / marker).touch()
        if limited is not None:
            _hold(local, cluster, limited)
    return local


@contextlib.contextmanager
def _all_or_none(spawner: Spawner, directory: Path) -> Iterator[None]:
    """What was started inside is killed and forgotten where something fails, or where a person stops it."""
    before = spawner.num_started()
    try:
        yield
    except BaseException:
        killed = spawner.undo(before)
        for record in read_records(directory):
            if record.pid in killed:
                remove_record(directory, record.name)
        raise


def runs_here(directory: Path) -> bool:
    """Whether the cluster's coordinator runs on this machine, so that its nodes are this machine's to start and stop."""
    return any(record.name == COORDINATOR and is_running(record) for record in read_records(directory))


def start_nodes(
    cluster: Cluster,
    names: Sequence[str],
    topology_path: Path,
    directory: Path,
    say: Say = lambda line: None,
) -> LocalCluster:
    """Start further nodes of a cluster that runs here; `down` of its file stops them too.

    topology_path  the file that has them; directory: of the running cluster's records
    say            is told how they are held, where the others are held to the file's `memory` and `cpu_share`
    """
    local = LocalCluster(directory, {})
    spawner = Spawner(say)
    is_shaped = (directory / SHAPED).exists()
    try:
        with _all_or_none(spawner, directory):
            for name in names:
                local.processes[name] = _start(spawner, name, topology_path, directory, is_shaped=is_shaped)
            if (directory / LIMITED).exists():
                _hold(local, cluster, say)
    except OSError as error:
        raise _unwritable(directory, error) from error
    return local


def _hold(local: LocalCluster, cluster: Cluster, say: Say) -> None:
    """Hold the nodes among these processes to the file's `memory` and `cpu_share`."""
    group = limits.group_of(local.directory)
    for node in cluster.nodes:
        if node.name in local.processes:
            pid = local.processes[node.name].pid
            memory = node.memory_bytes if node.device == "cpu" else None  # a GPU's is no group's to hold
            say(limits.hold(pid, group, node.name, memory, node.cpu_share))


def await_end(
    directory: Path, names: Sequence[str], clock: Clock, report: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Wait for recorded processes that were told to stop, and stop those that do not. Names of those that ran."""
    records = [record for record in read_records(directory) if record.name in names]
    stopped = [record.name for record in records if is_running(record)]
    _wait_for_end(records, clock, report)
    _end(records, directory, clock, report)
    return stopped


def _start(
    spawner: Spawner, name: str, topology_path: Path, directory: Path, *, is_shaped: bool = False
) -> Spawned:
    words = [COORDINATOR] if name == COORDINATOR else ["node", name]
    log_path(directory, name).write_bytes(b"")
    env = {STATE_VARIABLE: str(directory.parent), **({SHAPE_VARIABLE: "1"} if is_shaped else {})}
    process = spawner.start([*words, "--topology", str(topology_path)], log_path(directory, name), env)
    write_record(directory, record_process(name, process.pid))
    return process


def leave_record(topology_path: Path, name: str) -> None:
    """Record this very process, so that `down` finds a daemon started by hand as well.

    Comes after the daemon has its port: a second one of that name never gets so far. The record outlives the process: one
    that has ended its work takes seconds more to give its memory back, and `down` has to wait for it. Whoever reads
    records asks whether that process still runs. Without a folder to write to, the daemon runs unrecorded.
    """
    directory = state_dir(topology_path)
    try:
        write_record(directory, record_process(name, os.getpid()))
    except OSError as error:
        log.warning(
            "not recorded in %s (%s): `edge-runtime down` will not find this process", directory, error
        )


def wait_ready(
    local: LocalCluster,
    connect: Callable[[], Client],
    clock: Clock,
    timeout_s: float,
    report: Callable[[str], None],
) -> None:
    """Return when every node serves. Raises ClusterError when a process ends, a node fails, or time is over.

    report  is told how far it is, as often as `Reminder` says
    """
    give_up = clock.now() + timeout_s
    reminder = Reminder(clock.now())
    waiting_for = "the coordinator to start"
    client: Client | None = None
    try:
        while True:
            ended = local.exited()
            if ended is not None:
                name, code, line = ended
                kind = UserError if code == EXIT_USER else ClusterError
                raise kind(_ended_line(local, name, code, line))
            if client is None:
                client = _try_connect(connect)
            else:
                body = client.status()
                if body["coordinator"]["pid"] != local.processes[COORDINATOR].pid:
                    # Another one's: ours is about to end since its port is in use, and says so better than we could.
                    client.close()
                    client = None
                elif body["ready"]:
                    return
                else:
                    failed = [node for node in body["nodes"] if node["state"] == "failed"]
                    if failed:
                        kind = UserError if failed[0]["whose_fault"] == "user" else ClusterError
                        raise kind(f"node {failed[0]['name']} cannot serve: {failed[0]['fault']}")
                    waiting_for = body["waiting_for"]
            if clock.now() > give_up:
                raise ClusterError(f"not ready after {timeout_s:.0f} s, waiting for {waiting_for}")
            if reminder.is_due(clock.now(), waiting_for):
                report(f"waiting for {waiting_for}, {clock.now() - reminder.began_s:.0f} s")
            clock.sleep(POLL_S)
    finally:
        if client is not None:
            client.close()


def watch(local: LocalCluster, clock: Clock, report: Callable[[str], None]) -> None:
    """Tell of each process that ends, until all have: by themselves (ClusterError), or stopped from elsewhere.

    Else it ends by the signal that ends the command.
    """
    told: dict[str, int] = {}
    while True:
        for name, process in local.processes.items():
            code = process.poll()
            if code is not None and name not in told:
                told[name] = code
                line = last_log_line(log_path(local.directory, name))
                report(_ended_line(local, name, code, line) if code else f"{name} has stopped")
        if len(told) == len(local.processes):
            if not any(code for code in told.values() if code != CODE_UNKNOWN):
                return
            raise ClusterError(f"every process of the cluster has ended; the logs are in {local.directory}")
        clock.sleep(POLL_S)


def _ended_line(local: LocalCluster, name: str, code: int, line: str) -> str:
    if code == CODE_UNKNOWN:
        return f"{name} ended; how is not known, since the process that forked it ended before"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said = line.removeprefix("error: ") if line else f"its log {log_path(local.directory, name)} is empty"
    return f"{name} {how}: {said}"


def _try_connect(connect: Callable[[], Client]) -> Client | None:
    client = connect()
    try:
        client.connect(0.5)
    except (PeerError, Refusal):  # a refusal is another cluster's, whose port ours wants: ours will say so
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

    The coordinator goes first, so that it does not mend what is being stopped. Nothing that was started by `up` is left
    when this returns; a process it may not kill is a ClusterError.
    """
    directory = state_dir(topology_path)
    records = [record for record in read_records(directory) if is_running(record)]
    for first in (True, False):
        asked = [record for record in records if (record.name == COORDINATOR) is first]
        for record in asked:
            _signal(record.pid, END_CLUSTER if first else signal.SIGTERM)
            _signal(record.pid, signal.SIGCONT)  # one that was frozen can only now be asked
        _wait_for_end(asked, clock, report)
    _end(records, directory, clock, report)
    deadline, group = clock.now() + GROUPS_END_S, limits.group_of(directory)
    while not limits.release(group) and clock.now() < deadline:
        clock.sleep(POLL_S)
    for record in read_records(directory):
        remove_record(directory, record.name)
    for marker in (SHAPED, LIMITED):
        (directory / marker).unlink(missing_ok=True)
    forget_snapshot(directory)
    return [record.name for record in records]


def _wait_for_end(records: Sequence[ProcessRecord], clock: Clock, report: Callable[[str], None]) -> None:
    """Until all have ended, 10 s at most."""
    deadline, reminder = clock.now() + STOP_DEADLINE_S, Reminder(clock.now())
    while left := [record for record in records if is_running(record)]:
        if clock.now() >= deadline:
            return
        if reminder.is_due(clock.now(), _names(left)):
            report(f"waiting for {_names(left)} to stop")
        clock.sleep(POLL_S)


def _end(
    records: Sequence[ProcessRecord], directory: Path, clock: Clock, report: Callable[[str], None]
) -> None:
    """Kill what still runs, and forget all of them."""
    for record in records:
        if is_running(record):
            report(f"{record.name} (pid {record.pid}) did not stop within {STOP_DEADLINE_S:.0f} s: killed")
            _signal(record.pid, signal.SIGKILL)
    deadline = clock.now() + STOP_DEADLINE_S
    while any(is_running(record) for record in records):
        if clock.now() > deadline:
            raise ClusterError(f"{_names(records)} cannot be killed; look at {directory}")
        clock.sleep(POLL_S)
    for record in records:
        remove_record(directory, record.name)


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
