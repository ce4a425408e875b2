"""Gives back memory that starting took and serving does not need. Linux only; elsewhere it does nothing.

Importing torch touches some 120 MB of library code that never runs again here, and reading a model leaves holes in the
heap. Both count as this process's resident memory until the system is told.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_MADV_DONTNEED = (
    4  # of a library's code: the next instruction that needs a page reads it again from the page cache
)
_LIBRARIES = ("libtorch",)


def give_back() -> None:
    """Return free heap, and the pages of torch's code, to the system."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    for start, end in _code_of(maps.read_text(), _LIBRARIES):
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def _code_of(maps: str, libraries: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Address ranges of the mapped code of these libraries: read and run, never written, backed by a file."""
    for line in maps.splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[1] == "r-xp" and os.path.basename(parts[5]).startswith(libraries):
            start, _, end = parts[0].partition("-")
            yield int(start, 16), int(end, 16)
