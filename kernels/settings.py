"""What the environment may ask of the kernels, and the one error for what it cannot. No torch, so any command may import it."""

import os
from collections.abc import Mapping

KERNELS_VARIABLE = "EDGE_KERNELS"
ISA_VARIABLE = "EDGE_CPU_ISA"
THREADS_VARIABLE = "EDGE_THREADS"
GRAPHS_VARIABLE = "EDGE_GRAPHS"
"""`off`: nodes on a GPU launch each kernel by itself."""
COMPILE_VARIABLE = "EDGE_COMPILE"
"""Nodes whose kernels are plain torch compile what they repeat. `--compile` sets it."""

BACKENDS = ("native", "torch", "reference", "triton")
ISAS = ("amx", "avx512vnni", "avx512", "avx2", "portable")
ON, OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")
THREADS_PER_CORE = (
    4  # beyond a few, threads only wait for one another: 1000 on two cores stood still for minutes
)
THREADS_ANYWHERE = 8


class SettingError(ValueError):
    """A variable, a flag or a key asks the kernels for what they cannot do here; one sentence that says what they can."""


def most_threads() -> int:
    """What arithmetic may be shared between on this machine."""
    return max(THREADS_ANYWHERE, THREADS_PER_CORE * (os.cpu_count() or 1))


def checked_threads(found: int | str, what: str = "threads") -> int:
    """A number of threads that this machine can be asked for. what: who asked, as it is called where it stands."""
    number = found if isinstance(found, int) else int(found) if found.isdecimal() else 0
    if not 1 <= number <= most_threads():
        raise SettingError(
            f"{what}: found {found!r}, expected a whole number from 1 to {most_threads()} on this machine, "
            f"which has {os.cpu_count()} processors"
        )
    return number


def is_on(environment: Mapping[str, str], variable: str, *, unset: bool = False) -> bool:
    """Whether a variable switches something on; `unset` where it is not set or empty."""
    found = environment.get(variable, "")
    if not found:
        return unset
    if found.lower() not in (*ON, *OFF):
        raise SettingError(f"{variable}: found {found!r}, expected {' or '.join((ON[2], OFF[2]))}")
    return found.lower() in ON


def one_of(environment: Mapping[str, str], variable: str, known: tuple[str, ...]) -> str:
    """A variable's value, which is one of those known; empty where it is not set."""
    found = environment.get(variable, "")
    if found and found not in known:
        raise SettingError(f"{variable}: found {found!r}, expected one of {', '.join(known)}, or not set")
    return found
