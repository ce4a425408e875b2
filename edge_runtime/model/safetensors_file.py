"""One safetensors file: its header, checked against the file's size before anything is read, and its bytes, mapped.

Format: 8 bytes little-endian length n, n bytes of JSON (name -> dtype, shape, data_offsets), then the data.
Knows no model; only `checkpoint.py` uses it.
"""

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edge_runtime.errors import CheckpointError
from edge_runtime.model.json_file import refuse_stand_in, size_of
from topology.errors import why_unread

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
TORCH_DTYPES = FLOAT_DTYPES | {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
BEGINS_BYTES = 64  # enough to see what else it may be
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library


class Extent(NamedTuple):
    """Where one tensor lies, as the header says."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file
    end: int  # one past the last byte


class SafetensorsFile:
    """A file whose every extent is known to lie inside it. Mapped at the first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.num_bytes = size_of(path)
            with path.open("rb") as file:
                refuse_stand_in(path, file.read(BEGINS_BYTES))
                file.seek(0)
                self.header_bytes, header = _read_header(path, file.read(8), self.num_bytes, file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.extents = _extents(path, header, len(self.header_bytes), self.num_bytes)
        self._map: mmap.mmap | None = None

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file: read it, do not keep it, then call `drop_pages`."""
        extent = self.extents[name]
        dtype = TORCH_DTYPES[extent.dtype]
        count = (extent.end - extent.start) // dtype.itemsize
        buffer: mmap.mmap | bytearray = self._mapped()
        offset = extent.start
        if (
            offset % dtype.itemsize
        ):  # a header that is not padded: kernels want whole items at whole addresses
            buffer, offset = bytearray(buffer[extent.start : extent.end]), 0
        view = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset)
        return view.view(extent.shape)

    def drop_pages(self) -> None:
        """Let go of every page read so far: they stay in the system's cache, not in this process."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def chunks(self, start: int, end: int, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
        """Bytes [start, end) by plain reads, a chunk at a time, for hashing and comparing."""
        with self.path.open("rb") as file:
            file.seek(start)
            while start < end and (chunk := file.read(min(chunk_bytes, end - start))):
                yield chunk
                start += len(chunk)

    def _mapped(self) -> mmap.mmap:
        # Private and writable: torch refuses to look at read-only memory quietly. Nothing writes to it, so no page
        # is ever copied, and without a reserve the kernel does not count it as memory we may come to need.
        if self._map is None:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
                self._map = mmap.mmap(descriptor, self.num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
            finally:
                os.close(descriptor)
        return self._map


def _read_header(path: Path, length: bytes, num_bytes: int, file: Any) -> tuple[bytes, dict[str, Any]]:
    header_size = int.from_bytes(length, "little")
    if len(length) < 8 or header_size > min(num_bytes - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path} is not a whole safetensors file: it has {num_bytes} bytes and its header claims {header_size}; "
            "copy the file again"
        )
    header_bytes = file.read(header_size)
    try:
        header = json.loads(header_bytes)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is not JSON ({why_unread(error)}); copy the file again"
        ) from error
    return header_bytes, header


def _extents(path: Path, header: dict[str, Any], header_size: int, num_bytes: int) -> dict[str, Extent]:
    data_start = 8 + header_size
    extents: dict[str, Extent] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        extents[name] = extent = _extent(path, name, entry, data_start)
        if extent.end > num_bytes:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} needs bytes {extent.start} to {extent.end}, "
                f"the file has {num_bytes}; copy the file again"
            )
    # The format allows no gap and no overlap, so a damaged header shows even where sizes happen to fit.
    at = data_start
    for name, extent in sorted(extents.items(), key=lambda item: (item[1].start, item[1].end)):
        if extent.start != at:
            raise CheckpointError(
                f"{path}: tensor {name} starts at byte {extent.start}, expected {at} where the one before it ends; "
                "copy the file again"
            )
        at = extent.end
    if at != num_bytes:
        raise CheckpointError(f"{path} has {num_bytes} bytes, its header describes {at}; copy the file again")
    return extents


def _extent(path: Path, name: str, entry: Any, data_start: int) -> Extent:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers) or dtype not in ITEM_BYTES:
            raise ValueError
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: tensor {name} has a malformed header entry {str(entry)[:200]}; copy the file again"
        ) from None
    size = ITEM_BYTES[dtype]
    for n in shape:
        size *= n
    if end - start != size:
        raise CheckpointError(
            f"{path}: tensor {name} is {dtype} {list(shape)}, which is {size} bytes, "
            f"but its header gives it {end - start}; copy the file again"
        )
    return Extent(dtype, tuple(shape), data_start + start, data_start + end)
