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

TOPOLOGY_VARIABLE = "EDGE_RUNTIME_TOPOLOGY"
STATE_VARIABLE = "EDGE_RUNTIME_STATE"
DEFAULT_TOPOLOGY = Path("topology.toml")

# `create_time - boot_time` is steady but for the second to which the kernel rounds its boot time.
_START_TOLERANCE_S = 1.5


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
    variable = os.environ.get(STATE_VARIABLE)
    base = Path(variable).absolute() if variable else topology_path.absolute().parent / ".edge-runtime"
    return base / _folder_name(_cluster_name(topology_path))


def record_process(name: str, pid: int) -> ProcessRecord:
    """Describe a running process of ours. Raises `psutil.NoSuchProcess` if it is gone already."""
    process = psutil.Process(pid)
    return ProcessRecord(name, pid, _start_after_boot_s(process), tuple(process.cmdline()))


def write_record(directory: Path, record: ProcessRecord) -> Path:
    """Write `<directory>/<name>.json` so that a reader sees the old file or the new one, never half of it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{_folder_name(record.name)}.json"
    text = msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".record-", delete=False) as scratch:
        scratch.write(text)
    os.replace(scratch.name, path)
    return path


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
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"topology file {topology_path} cannot be read: {error}") from error
    cluster = table.get("cluster")
    name = cluster.get("name") if isinstance(cluster, dict) else None
    return name if isinstance(name, str) and name else topology_path.stem


def _folder_name(name: str) -> str:
    """Return `name` as one plain path component: letters, digits, `-`, `_` and inner dots stay."""
    return re.sub(r"[^A-Za-z0-9._-]|^\.", "_", name)
