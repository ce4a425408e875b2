"""Makes processes of one machine as unequal as a topology file says: memory and processor time by control groups.

Where groups may not be made, a process gets its share of the processor by niceness, which only counts when others want
it too, and its memory is what the plan keeps it to. Knows pids and amounts; what runs there is the caller's.
"""

import contextlib
import hashlib
import math
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
NICE_STEP = 1.25  # Linux gives a process this much less time per step, beside others
MAX_NICE = 19


def group_of(directory: Path) -> str:
    """The name of the group for the processes that are recorded in a folder."""
    digest = hashlib.blake2b(str(directory.absolute()).encode(), digest_size=6).hexdigest()
    return f"edge-runtime-{digest}"


def hold(
    pid: int, group: str, name: str, memory_bytes: int | None, cpu_share: float | None, *, root: Path = ROOT
) -> str:
    """Limit a process, and say how, for people.

    memory_bytes  all that it may have; more ends it
    cpu_share     seconds of processor time in each second; None: as much as it can get
    """
    said = []
    if memory_bytes is not None:
        try:
            _hold_memory(pid, Path(group) / name, memory_bytes, root)
            said.append(f"memory {memory_bytes / 2**20:.0f} MiB by control group")
        except OSError as error:
            said.append(f"memory not limited ({error.strerror})")
    if cpu_share is not None:
        try:
            _hold_cpu(pid, Path(group) / name, cpu_share, root)
            said.append(f"{cpu_share:g} of a processor by control group")
        except OSError:
            nice = niceness(cpu_share)
            os.setpriority(os.PRIO_PROCESS, pid, max(nice, os.getpriority(os.PRIO_PROCESS, pid)))
            said.append(f"niceness {nice} for {cpu_share:g} of a processor")
    return f"{name}: {', '.join(said) or 'not limited'}"


def release(group: str, *, root: Path = ROOT) -> bool:
    """Remove the groups of processes that have ended. False while one is there of a process that has not quite."""
    for base in (root / "memory", root / "cpu", root):
        found = base / group
        for path in [*(child for child in found.glob("*") if child.is_dir()), found]:
            with contextlib.suppress(OSError):
                path.rmdir()
    return not any((base / group).exists() for base in (root / "memory", root / "cpu", root))


def niceness(cpu_share: float) -> int:
    """How nice a process must be to get that share of what one beside it gets."""
    return max(0, min(MAX_NICE, round(math.log(1 / cpu_share) / math.log(NICE_STEP))))


def _is_unified(root: Path) -> bool:
    """Whether one tree of groups has all controllers."""
    return (root / "cgroup.controllers").exists()


def _hold_memory(pid: int, group: Path, memory_bytes: int, root: Path) -> None:
    if _is_unified(root):
        _enter(pid, _unified(root, group, "+memory"), "memory.max", str(memory_bytes))
    else:
        _enter(pid, _made(root / "memory", group), "memory.limit_in_bytes", str(memory_bytes))


def _hold_cpu(pid: int, group: Path, cpu_share: float, root: Path) -> None:
    quota_us = max(1000, round(cpu_share * PERIOD_US))
    if _is_unified(root):
        _enter(pid, _unified(root, group, "+cpu"), "cpu.max", f"{quota_us} {PERIOD_US}")
    else:
        _enter(pid, _made(root / "cpu", group), "cpu.cfs_quota_us", str(quota_us))


def _made(base: Path, group: Path) -> Path:
    if not base.is_dir():
        raise FileNotFoundError(2, f"no control groups at {base}")
    (base / group).mkdir(parents=True, exist_ok=True)
    return base / group


def _unified(root: Path, group: Path, controller: str) -> Path:
    made = _made(root, group)
    for parent in (root, made.parent):
        (parent / "cgroup.subtree_control").write_text(controller)
    return made


def _enter(pid: int, group: Path, file: str, amount: str) -> None:
    (group / file).write_text(amount)
    (group / "cgroup.procs").write_text(str(pid))
