"""Gives memory of this process back to the system while its address stays valid. Linux only; elsewhere it does nothing.

Knows addresses; what lies there, and whether anybody still wants it, is the caller's to know.
"""

import ctypes
import mmap
import sys

from torch import Tensor

_MADV_DONTNEED = 4


def drop(start: int, end: int) -> None:
    """Drop the whole pages in [start, end). Those of a file are read again when wanted; others are zeros then."""
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if sys.platform == "linux" and start < end:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)


def drop_tensor(tensor: Tensor) -> None:
    """Drop what lies behind a contiguous tensor on the host: nobody may want its numbers any more."""
    if tensor.device.type == "cpu":
        drop(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
