"""The two messages of the token path, encoded and decoded without a MessagePack library.

Their headers are ordinary MessagePack in which every number has a fixed width, so one `struct` call writes or reads all
of it. `codec.py` is the definition: these bytes mean the same to it, and whatever is not plainly of this form is left
to it (None). Measured for decoding a call of 2 KB: 3.5 us instead of 7; 23 instead of 37 with caches as cold as a
process finds them that waited for its call.
"""

import struct
import zlib
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy

from edge_runtime.protocol.messages import PROTOCOL_VERSION, ExpertCall, ExpertReply

MAGIC = b"EDGE"
PREFIX_BYTES = 10  # magic, u16 version, u32 crc32 of the rest
MAX_TTL_S = 1e7
MAX_DIM = 2**31 - 1

FLOAT32, BFLOAT16, INT32 = numpy.dtype("<f4"), numpy.dtype("<u2"), numpy.dtype("<i4")
_U32, _U64, _F64 = b"\xce", b"\xcf", b"\xcb"  # MessagePack's marks of numbers of fixed width


class _Form:
    """A header of known length: constant pieces of bytes between values, given as struct formats."""

    def __init__(self, *pieces: bytes | str) -> None:
        joined: list[bytes | str] = []
        for piece in (MAGIC + struct.pack("<H", PROTOCOL_VERSION), "4s", *pieces):
            if isinstance(piece, bytes) and joined and isinstance(joined[-1], bytes):
                joined[-1] += piece
            else:
                joined.append(piece)
        self.layout = struct.Struct(
            ">" + "".join(f"{len(p)}s" if isinstance(p, bytes) else p for p in joined)
        )
        self.constants = tuple(p for p in joined if isinstance(p, bytes))
        self.pick_constants = itemgetter(*[i for i, p in enumerate(joined) if isinstance(p, bytes)])
        self.pick_values = itemgetter(*[i for i, p in enumerate(joined) if isinstance(p, str)])
        self._header = struct.Struct(">" + self.layout.format.removeprefix(">6s4s"))

    def write(self, *values: Any) -> bytes:
        """The frame with these values; each follows its constant."""
        pieces = [piece for pair in zip(self.constants[1:], values, strict=True) for piece in pair]
        header = self._header.pack(*pieces)
        return self.constants[0] + zlib.crc32(header).to_bytes(4, "little") + header


def _text(text: str) -> bytes:
    return bytes([0xA0 + len(text)]) + text.encode()


def _matrix(dtype: str) -> tuple[bytes | str, ...]:
    return b"\x92" + _text(dtype) + b"\x92" + _U32, "I", _U32, "I"


def _vector(dtype: str) -> tuple[bytes | str, ...]:
    return b"\x92" + _text(dtype) + b"\x91" + _U32, "I"


def _call_form(dtype: str) -> _Form:
    start = b"\x96" + _text("expert_call") + _U64, "Q", _U64, "Q", _F64, "d"
    tensors = b"\x93", *_matrix(dtype), *_vector("int32"), *_vector("int32")
    return _Form(*start, *tensors, b"\xc4\x0c\x81" + _text("layer") + _U32, "I")


def _reply_form(dtype: str) -> _Form:
    start = b"\x96" + _text("expert_reply") + _U64, "Q", _U64, "Q", b"\xc0"
    body = b"\xc4\x1f\x82" + _text("layer") + _U32, "I", _text("compute_s") + _F64, "d"
    return _Form(*start, b"\x91", *_matrix(dtype), *body)


_CALLS = {FLOAT32: _call_form("float32"), BFLOAT16: _call_form("bfloat16")}
_REPLIES = {FLOAT32: _reply_form("float32"), BFLOAT16: _reply_form("bfloat16")}
_CALL_SIZES: dict[int, tuple[_Form | None, Any]] = {
    form.layout.size: (form, dtype) for dtype, form in _CALLS.items()
}
_REPLY_SIZES: dict[int, tuple[_Form | None, Any]] = {
    form.layout.size: (form, dtype) for dtype, form in _REPLIES.items()
}


def encode_call(
    message: ExpertCall, call_id: int, epoch: int, ttl_s: float | None, tensors: Any
) -> list[Any] | None:
    """Frames of an ExpertCall, or None if this is not the usual kind."""
    rows, pair_rows, pair_experts = tensors
    if not (type(rows) is type(pair_rows) is type(pair_experts) is numpy.ndarray and type(ttl_s) is float):
        return None
    form = _CALLS.get(rows.dtype)
    shape = rows.shape
    if (
        form is None
        or len(shape) != 2
        or pair_rows.dtype != INT32
        or pair_experts.dtype != INT32
        or pair_rows.ndim != 1
        or pair_experts.ndim != 1
        or not (rows.flags.c_contiguous and pair_rows.flags.c_contiguous and pair_experts.flags.c_contiguous)
    ):
        return None
    first = form.write(call_id, epoch, ttl_s, *shape, len(pair_rows), len(pair_experts), message.layer)
    return [first, rows.data, pair_rows.data, pair_experts.data]


def encode_reply(
    message: ExpertReply, call_id: int, epoch: int, ttl_s: float | None, tensors: Any
) -> list[Any] | None:
    """Frames of an ExpertReply, or None if this is not the usual kind."""
    (outputs,) = tensors
    if type(outputs) is not numpy.ndarray or ttl_s is not None:
        return None
    form = _REPLIES.get(outputs.dtype)
    if form is None or outputs.ndim != 2 or not outputs.flags.c_contiguous:
        return None
    return [form.write(call_id, epoch, *outputs.shape, message.layer, message.compute_s), outputs.data]


def decode_call(frames: Sequence[Any]) -> tuple[ExpertCall, int, int, float, tuple[Any, ...]] | None:
    """An ExpertCall of exactly the form that `encode_call` writes; None for anything else."""
    first, rows, pair_rows, pair_experts = frames
    form, dtype = _CALL_SIZES.get(len(first), (None, FLOAT32))
    if form is None:
        return None
    fields = form.layout.unpack_from(first)
    crc, call_id, epoch, ttl_s, num_rows, width, num_pairs, num_experts, layer = form.pick_values(fields)
    if (
        form.pick_constants(fields) != form.constants
        or zlib.crc32(first[PREFIX_BYTES:]) != int.from_bytes(crc, "little")
        or not 0.0 <= ttl_s <= MAX_TTL_S
        or layer > MAX_DIM
        or not 0 < num_rows * width * dtype.itemsize == len(rows)
        or not 0 < num_pairs * 4 == len(pair_rows) == len(pair_experts)
        or num_experts != num_pairs
    ):
        return None
    tensors = (
        _array((num_rows, width), dtype, rows),
        _array(num_pairs, INT32, pair_rows),
        _array(num_pairs, INT32, pair_experts),
    )
    return ExpertCall(layer), call_id, epoch, ttl_s, tensors


def decode_reply(frames: Sequence[Any]) -> tuple[ExpertReply, int, int, None, tuple[Any, ...]] | None:
    """An ExpertReply of exactly the form that `encode_reply` writes; None for anything else."""
    first, outputs = frames
    form, dtype = _REPLY_SIZES.get(len(first), (None, FLOAT32))
    if form is None:
        return None
    fields = form.layout.unpack_from(first)
    crc, call_id, epoch, num_rows, width, layer, compute_s = form.pick_values(fields)
    if (
        form.pick_constants(fields) != form.constants
        or zlib.crc32(first[PREFIX_BYTES:]) != int.from_bytes(crc, "little")
        or layer > MAX_DIM
        or not 0.0 <= compute_s <= MAX_TTL_S
        or not 0 < num_rows * width * dtype.itemsize == len(outputs)
    ):
        return None
    return ExpertReply(layer, compute_s), call_id, epoch, None, (_array((num_rows, width), dtype, outputs),)


def _array(shape: Any, dtype: Any, frame: Any) -> Any:
    array = numpy.ndarray(shape, dtype, frame)
    return (
        array if array.flags.aligned else array.copy()
    )  # a short frame lies anywhere in ZeroMQ's receive buffer
