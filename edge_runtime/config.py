"""Where the runtime finds its topology file and keeps what must outlive one command: pid files and logs.

Knows nothing of what a node or a coordinator does; a process is a name, a pid and the moment it started.
"""

import os
import re
import tempfile
import tomllib
from pathlib import Path

import msgspec
import psutil

from edge_runtime.errors import ConfigError
from topology.errors import why_unread

TOPOLOGY_VARIABLE = "EDGE_RUNTIME_TOPOLOGY"
SHAPE_VARIABLE = "EDGE_SHAPE"
STATE_VARIABLE = "EDGE_RUNTIME_STATE"
DEFAULT_TOPOLOGY = Path("topology.toml")

# `create_time - boot_time` is steady but for the second to which the kernel rounds its boot time.
_START_TOLERANCE_S = 1.5


LAST_GOOD = "topology.good"
SNAPSHOT = "coordinator.snapshot"


class LastGood(msgspec.Struct, frozen=True):
    """The topology file that a coordinator was started with, or that was applied since: its path and all of its text."""

    source: str
    text: str


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process of ours: enough to find it again and never to mistake another one for it.

    name         what it runs: a node's name, or `coordinator`
    pid          its process id, which the machine may give to another process later
    create_time  seconds from the machine's boot to the start of the process; setting the clock does not move it
    command      its command line, for people who read the file
    """

    name: str
    pid: int
    create_time: float
    command: tuple[str, ...] = ()


def resolve_topology_path(flag: str | Path | None) -> Path:
    """Return the topology file to use: the flag, else $EDGE_RUNTIME_TOPOLOGY, else ./topology.toml.

    The first of the three that is set decides; what it names must exist. The path comes back absolute.
    """
    variable = os.environ.get(TOPOLOGY_VARIABLE)
    if flag is not None:
        path, origin = Path(flag), "--topology"
    elif variable:
        path, origin = Path(variable), TOPOLOGY_VARIABLE
    else:
        path, origin = DEFAULT_TOPOLOGY, "the default"
    if path.is_file():
        return path.absolute()
    what = "is a folder" if path.is_dir() else "does not exist"
    raise ConfigError(
        f"topology file {path} ({origin}) {what}: give --topology FILE, set {TOPOLOGY_VARIABLE}, "
        f"or run where ./{DEFAULT_TOPOLOGY} is"
    )


def state_dir(topology_path: Path) -> Path:
    """Return the folder that holds one cluster's pid files (`*.json`) and logs (`*.log`) on this machine.

    `<base>/<cluster name>`, where base is $EDGE_RUNTIME_STATE or `.edge-runtime` beside the topology file.
    The folder need not exist: whoever writes there makes it.
    """
    base = _state_base(topology_path)
    try:
        named = base / _folder_name(_cluster_name(topology_path))
    except ConfigError:
        running = _folder_of_running(base, topology_path)
        if running is None:
            raise
        return running  # edited into something that is no TOML, while its cluster runs
    if not named.is_dir():  # or to another name
        return _folder_of_running(base, topology_path) or named
    return named


def remember_good(topology_path: Path, text: str) -> None:
    """Keep the text of a file that a cluster runs by, so that commands reach it however the file is edited."""
    write_whole(
        state_dir(topology_path) / LAST_GOOD,
        msgspec.json.encode(LastGood(str(topology_path.absolute()), text)),
    )


def last_good_text(topology_path: Path) -> str | None:
    """The text of that file as a coordinator of this machine last ran by it; None if that is not known."""
    try:
        found = _read_good(state_dir(topology_path))
    except ConfigError:
        return None
    return found.text if found is not None and found.source == str(topology_path.absolute()) else None


def _read_good(folder: Path) -> LastGood | None:
    try:
        return msgspec.json.decode((folder / LAST_GOOD).read_bytes(), type=LastGood)
    except (OSError, msgspec.DecodeError):
        return None


def _state_base(topology_path: Path) -> Path:
    variable = os.environ.get(STATE_VARIABLE)
    return Path(variable).absolute() if variable else topology_path.absolute().parent / ".edge-runtime"


def _folder_of_running(base: Path, topology_path: Path) -> Path | None:
    """Where processes are recorded that run by this file as it was."""
    source = str(topology_path.absolute())
    for path in sorted(base.glob(f"*/{LAST_GOOD}")):
        found = _read_good(path.parent)
        if found is not None and found.source == source and any(map(is_running, read_records(path.parent))):
            return path.parent
    return None


def record_process(name: str, pid: int) -> ProcessRecord:
    """Describe a running process of ours. Raises `psutil.NoSuchProcess` if it is gone already."""
    process = psutil.Process(pid)
    return ProcessRecord(name, pid, _start_after_boot_s(process), tuple(process.cmdline()))


def write_record(directory: Path, record: ProcessRecord) -> Path:
    """Write `<directory>/<name>.json` so that a reader sees the old file or the new one, never half of it."""
    path = directory / f"{_folder_name(record.name)}.json"
    write_whole(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".record-", delete=False) as scratch:
        try:
            scratch.write(content)
            scratch.flush()
            os.replace(scratch.name, path)
        except OSError:
            os.unlink(scratch.name)
            raise


def read_record(path: Path) -> ProcessRecord | None:
    """Return the record in `path`, None if there is no such file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(text, type=ProcessRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} is not a process record ({error}): stop that process by hand and remove it"
        ) from error


def read_records(directory: Path) -> tuple[ProcessRecord, ...]:
    """Return every record in the folder, by name; none if the folder does not exist."""
    records = (read_record(path) for path in directory.glob("*.json"))
    return tuple(sorted((record for record in records if record is not None), key=lambda r: r.name))


def remove_record(directory: Path, name: str) -> None:
    """Forget a process. Forgetting it twice is the same as once."""
    (directory / f"{_folder_name(name)}.json").unlink(missing_ok=True)


def is_running(record: ProcessRecord) -> bool:
    """Say whether that very process still runs: not one that got its pid later, not a zombie."""
    try:
        process = psutil.Process(record.pid)
        same = abs(_start_after_boot_s(process) - record.create_time) <= _START_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def log_path(directory: Path, name: str) -> Path:
    """Return where the process called `name` writes its log."""
    return directory / f"{_folder_name(name)}.log"


def _start_after_boot_s(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def _cluster_name(topology_path: Path) -> str:
    try:
        with topology_path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"topology file {topology_path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"topology file {topology_path} is not valid TOML: {why_unread(error)}") from error
    cluster = table.get("cluster")
    name = cluster.get("name") if isinstance(cluster, dict) else None
    return name if isinstance(name, str) and name else topology_path.stem


def _folder_name(name: str) -> str:
    """Return `name` as one plain path component: letters, digits, `-`, `_` and inner dots stay."""
    return re.sub(r"[^A-Za-z0-9._-]|^\.", "_", name)


def write_snapshot(topology_path: Path, content: bytes) -> None:
    """Keep what the next coordinator of that file goes on with."""
    write_whole(state_dir(topology_path) / SNAPSHOT, content)


def read_snapshot(topology_path: Path) -> bytes | None:
    """What the coordinator before left; None if there is nothing."""
    try:
        return (state_dir(topology_path) / SNAPSHOT).read_bytes()
    except OSError:
        return None


def forget_snapshot(directory: Path) -> None:
    """A cluster that is started or stopped as a whole begins with its file."""
    (directory / SNAPSHOT).unlink(missing_ok=True)
