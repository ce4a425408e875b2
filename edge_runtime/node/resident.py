"""What memory this process has and may have, and how it gives back what starting took and serving does not need. Giving
back is for Linux only; elsewhere it does nothing.

Importing torch touches some 120 MB of library code that never runs again here, and reading a model leaves holes in the
heap. Both count as this process's resident memory until the system is told.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from kernels import backends, host_pages
from topology.cluster import GPU_RESERVE_BYTES

_NO_LIMIT = 1 << 60
_LIBRARIES = ("libtorch",)


def give_back() -> None:
    """Return free heap, and the pages of torch's code, to the system."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    trim_heap()
    for start, end in _code_of(maps.read_text(), _LIBRARIES):
        host_pages.drop(start, end)  # the next instruction that needs a page reads it from the page cache


def trim_heap() -> None:
    """Return free heap to the system; allocators keep what was freed between things that are still there."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def resident_bytes() -> int:
    """What this process has resident where it computes: of the machine's memory, or of its GPU's with what CUDA takes."""
    on_gpu = backends.resident_bytes()
    return psutil.Process().memory_info().rss if on_gpu is None else on_gpu + GPU_RESERVE_BYTES


def available_bytes() -> tuple[int, str]:
    """What it can still get there, and where that is, in words."""
    free = backends.free_bytes()
    if free is not None:
        return free, f"on {backends.device()}"
    available, room = psutil.virtual_memory().available, memory_room()
    if room is not None and room < available:
        return room, "in its control group"
    return available, "on this machine"


def memory_room(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that the control groups of this process still let it have; None if they set no limit.

    Cached pages of files count as room: they go when something else is wanted.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, cached = groups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used, cached = (
                groups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = base / path.lstrip("/")
        while True:  # a limit of any group above counts too; inside a container its own is the root
            room = _room_of(group, limit, used, cached)
            rooms += [room] if room is not None else []
            if group == base:
                break
            group = group.parent
    return min(rooms, default=None)


def _room_of(group: Path, limit: str, used: str, cached: str) -> int | None:
    try:
        allowed = (group / limit).read_text().strip()
        if not allowed.isdigit() or int(allowed) >= _NO_LIMIT:
            return None
        taken = int((group / used).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(allowed) - taken + int(counts.get(cached, 0)))
    except (OSError, ValueError):
        return None


def _code_of(maps: str, libraries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Address ranges of the mapped code of these libraries: read and run, never written, backed by a file."""
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[1] == "r-xp" and os.path.basename(parts[5]).startswith(libraries):
            start, _, end = parts[0].partition("-")
            yield int(start, 16), int(end, 16)
