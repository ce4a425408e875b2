"""Turn messages into frames and frames into messages. The only module that knows bytes.

    frame 0   magic "EDGE" | u16 version | u32 crc32 of what follows | header (MessagePack)
    header    [tag, call id, epoch, seconds left or nil, [[dtype, shape], ...], body]   body: a packed map of fields
              on an emulated link followed by ["link", release, source]: readers ignore what they do not know
    frame 1.. one per tensor, raw, little endian, C order

Bytes from outside are never trusted: every length is checked before anything of that length is made, and whatever is
wrong is a `BadMessage` of one sentence. Nothing here knows sockets, peers or what a message is for.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy
from numpy.typing import NDArray

from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import hot
from edge_runtime.protocol.hot import MAGIC, MAX_DIM, MAX_TTL_S
from edge_runtime.protocol.messages import MESSAGES, PROTOCOL_VERSION, ExpertCall, ExpertReply, Message

MAX_TENSORS = 8
MAX_FRAME_BYTES = 128 << 20  # 4096 rows of 8192 float32
MAX_BODY_BYTES = max(cls.max_body_bytes for cls in MESSAGES.values())
MAX_HEADER_BYTES = MAX_BODY_BYTES + 1024

_PREFIX = struct.Struct("<4sHI")
_PREFIX_BYTES = _PREFIX.size
_ARRAY_OF_6 = 0x96  # MessagePack's first byte of a list of six
_STAMP = "link"
_SAFE_BODY_BYTES = 512  # so short that false lengths inside it cannot cost memory

_DTYPES: dict[str, numpy.dtype[Any]] = {
    "float32": numpy.dtype("<f4"),
    "bfloat16": numpy.dtype("<u2"),  # numpy has no bfloat16: its 16 bits travel as uint16
    "float16": numpy.dtype("<f2"),
    "int8": numpy.dtype("i1"),
    "uint8": numpy.dtype("u1"),
    "int16": numpy.dtype("<i2"),
    "int32": numpy.dtype("<i4"),
    "int64": numpy.dtype("<i8"),
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Frame = bytes | memoryview
Array = NDArray[Any]


class _Wire(NamedTuple):
    """How one type of message travels. dtypes: by tensor, the numpy dtype of each dtype name allowed."""

    cls: type[Message]
    max_body_bytes: int
    dtypes: tuple[dict[str, numpy.dtype[Any]], ...]


_WIRES = {
    tag: _Wire(cls, cls.max_body_bytes, tuple({n: _DTYPES[n] for n in spec.dtypes} for spec in cls.tensors))
    for tag, cls in MESSAGES.items()
}


_HOT_ENCODERS: dict[type[Message], Any] = {ExpertCall: hot.encode_call, ExpertReply: hot.encode_reply}
_HOT_DECODERS: dict[int, Any] = {4: hot.decode_call, 2: hot.decode_reply}  # by number of frames


class BadMessage(ProtocolError):
    """Bytes that are no message of ours. kind: one word to count by, such as "magic", "crc" or "tensor"."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


class VersionMismatch(BadMessage):
    """A message of ours, but of another protocol version, which `found` tells so that it can be answered."""

    def __init__(self, found: int) -> None:
        super().__init__(
            "version", f"the message is of protocol version {found}, expected {PROTOCOL_VERSION}"
        )
        self.found = found


class Stamp(NamedTuple):
    """On an emulated link: when the message may be seen, in the clock shared by one machine's processes, and of whom."""

    release_s: float
    source: str


class Envelope(NamedTuple):
    """A message and what travels with it.

    call_id  pairs a reply with its call; 0 if nobody waits
    epoch    of the placement the sender works with
    ttl_s    seconds the sender will still wait, None for ever; a length, since clocks differ between machines
    tensors  arrays over the frames' own memory (bfloat16 as uint16), in the order of the message's `tensors`
    stamp    of an emulated link, None without one
    """

    message: Message
    call_id: int = 0
    epoch: int = 0
    ttl_s: float | None = None
    tensors: tuple[Array, ...] = ()
    stamp: Stamp | None = None


def encode(
    message: Message,
    *,
    call_id: int = 0,
    epoch: int = 0,
    ttl_s: float | None = None,
    tensors: Sequence[Array] = (),
) -> list[Frame]:
    """Frames of a message. Tensor frames are views of the arrays, not copies.

    Arrays are numpy's or anything that numpy sees without a copy, such as a float32 CPU tensor of torch; bfloat16 is
    given as uint16. What cannot travel (too long, text that is not Unicode) is a BadMessage.
    """
    kind = type(message)
    if len(tensors) != len(kind.tensors):
        raise ValueError(f"{kind.__name__} carries {len(kind.tensors)} tensors, given {len(tensors)}")
    write_hot = _HOT_ENCODERS.get(kind)
    if write_hot and (hot := write_hot(message, call_id, epoch, ttl_s, tensors)):
        return hot
    return _encode(message, call_id, epoch, ttl_s, tensors)


def _encode(
    message: Message, call_id: int, epoch: int, ttl_s: float | None, tensors: Sequence[Array]
) -> list[Frame]:
    """The plain version of `encode`, for every message."""
    kind = type(message)
    described: list[tuple[str, tuple[int, ...]]] = []
    frames: list[Frame] = [b""]
    for spec, tensor in zip(kind.tensors, tensors, strict=True):
        array = tensor if type(tensor) is numpy.ndarray else numpy.asarray(tensor)
        name, shape = _DTYPE_NAMES.get(array.dtype, ""), array.shape
        if name not in spec.dtypes or len(shape) != spec.ndim:
            raise ValueError(f"{kind.__name__}.{spec.name} is {array.dtype} {shape}, expected {spec}")
        if array.nbytes > MAX_FRAME_BYTES:
            raise BadMessage(
                "size", f"{spec.name} has {array.nbytes} bytes, at most {MAX_FRAME_BYTES} can be sent"
            )
        described.append((name, shape))
        frames.append((array if array.flags.c_contiguous else numpy.ascontiguousarray(array)).data)
    fields = msgspec.to_builtins(message)
    tag = fields.pop("type")
    try:
        body = msgpack.packb(fields)
    except (OverflowError, ValueError) as error:  # an integer of more than 64 bits, half of a surrogate pair
        raise BadMessage("body", f"{tag} holds a value that cannot be sent: {error}") from error
    if len(body) > kind.max_body_bytes:
        raise BadMessage(
            "size", f"{tag} would be {len(body)} bytes long, at most {kind.max_body_bytes} can be sent"
        )
    header = msgpack.packb((tag, call_id, epoch, ttl_s, described, body))
    frames[0] = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, zlib.crc32(header)) + header
    return frames


def stamped(frames: Sequence[Frame], stamp: Stamp) -> list[Frame]:
    """Frames of a message as `encode` made them, with a stamp."""
    header = memoryview(frames[0])[_PREFIX_BYTES:]
    assert header[0] == _ARRAY_OF_6, "the message has a stamp already"
    longer = bytes((_ARRAY_OF_6 + 1,)) + header[1:] + msgpack.packb((_STAMP, stamp.release_s, stamp.source))
    return [_PREFIX.pack(MAGIC, PROTOCOL_VERSION, zlib.crc32(longer)) + longer, *frames[1:]]


def decode(frames: Sequence[Frame]) -> Envelope:
    """The message in `frames`; BadMessage for anything else, VersionMismatch for another version of ours."""
    if not 1 <= len(frames) <= 1 + MAX_TENSORS:
        raise BadMessage("frames", f"a message has 1 to {1 + MAX_TENSORS} frames, found {len(frames)}")
    read_hot = _HOT_DECODERS.get(len(frames))
    if read_hot and (hot := read_hot(frames)):
        return Envelope(*hot)
    return _decode(frames)


def _decode(frames: Sequence[Frame]) -> Envelope:
    """The plain version of `decode`, for every message."""
    tag, call_id, epoch, ttl_s, described, body, *more = _open_header(memoryview(frames[0]))
    wire = _WIRES.get(tag)
    if wire is None:
        raise BadMessage("type", f"unknown message type {tag!r}; is the other side newer?")
    if len(body) > wire.max_body_bytes:
        raise BadMessage(
            "size", f"{tag} is {len(body)} bytes long, at most {wire.max_body_bytes} are allowed"
        )
    if not len(described) == len(frames) - 1 == len(wire.dtypes):
        raise BadMessage(
            "tensor",
            f"{tag} has {len(wire.dtypes)} tensors, found {len(described)} in {len(frames) - 1} frames",
        )
    arrays = [_open_tensor(wire, index, two, frames[index + 1]) for index, two in enumerate(described)]
    if tag == "expert_call" and arrays[1].shape != arrays[2].shape:
        raise BadMessage("tensor", f"{tag} has {arrays[1].size} pair rows but {arrays[2].size} pair experts")
    try:
        message = msgspec.convert(_unpack_body(tag, body, wire.cls.max_containers), wire.cls)
    except msgspec.ValidationError as error:
        raise BadMessage("body", f"{tag} is not as expected: {error}") from error
    return Envelope(message, call_id, epoch, ttl_s, tuple(arrays), _open_stamp(more[0]) if more else None)


def _open_header(frame: memoryview) -> list[Any]:
    size = frame.nbytes
    if not _PREFIX_BYTES < size <= MAX_HEADER_BYTES or frame.ndim != 1 or frame.itemsize != 1:
        raise BadMessage(
            "size", f"a header has {_PREFIX_BYTES + 1} to {MAX_HEADER_BYTES} bytes, found {size}"
        )
    magic, version, crc = _PREFIX.unpack_from(frame)
    if magic != MAGIC:
        raise BadMessage("magic", f"a message starts with {MAGIC!r}, found {magic!r}")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(version)
    rest = frame[_PREFIX_BYTES:]
    if zlib.crc32(rest) != crc:
        raise BadMessage("crc", "the header was damaged on the way: its checksum differs")
    try:
        header = msgpack.unpackb(
            rest, max_array_len=16, max_map_len=0, max_str_len=64, max_bin_len=MAX_BODY_BYTES, max_ext_len=0
        )
    except Exception as error:  # msgpack raises many unrelated kinds, all of them about these bytes
        raise BadMessage("header", f"the header is not the MessagePack expected: {error}") from error
    if type(header) is not list or len(header) < 6:
        raise BadMessage("header", "the header is not a list of at least 6 values")
    tag, call_id, epoch, ttl_s, described, body = header[:6]
    if (
        type(tag) is not str
        or type(call_id) is not int
        or type(epoch) is not int
        or call_id < 0
        or epoch < 0
        or type(described) is not list
        or type(body) is not bytes
    ):
        raise BadMessage("header", "the header's values are not [tag, call id, epoch, ttl, tensors, body]")
    if ttl_s is not None and not (type(ttl_s) in (float, int) and 0 <= ttl_s <= MAX_TTL_S):
        raise BadMessage(
            "header", f"the time left is {ttl_s!r}, expected 0 to {MAX_TTL_S} seconds or nothing"
        )
    return header


def _open_stamp(found: Any) -> Stamp | None:
    """A stamp, or nothing for whatever else a newer writer may have put there."""
    match found:
        case [tag, float(release_s), str(source)] if tag == _STAMP and math.isfinite(release_s):
            return Stamp(release_s, source)
    return None


def _open_tensor(wire: _Wire, index: int, described: Any, frame: Frame) -> Array:
    """An array over the frame's memory, once dtype, shape and length agree."""
    spec = wire.cls.tensors[index]
    if type(described) is not list or len(described) != 2 or type(described[1]) is not list:
        raise BadMessage("tensor", f"{spec.name} is not described as [dtype, shape]")
    name, shape = described
    dtype = wire.dtypes[index].get(name) if type(name) is str else None
    if dtype is None:
        raise BadMessage("tensor", f"{spec.name} is {name!r}, expected one of {', '.join(spec.dtypes)}")
    if len(shape) != spec.ndim:
        raise BadMessage("tensor", f"{spec.name} has {len(shape)} dimensions, expected {spec.ndim}")
    expected = dtype.itemsize
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= MAX_DIM:
            raise BadMessage("tensor", f"{spec.name} has a dimension of {dim!r}, expected 0 to {MAX_DIM}")
        expected *= dim  # Python's integers do not overflow
    size = frame.nbytes if type(frame) is memoryview else len(frame)
    if size != expected or size > MAX_FRAME_BYTES:
        raise BadMessage("tensor", f"{spec.name} of shape {shape} needs {expected} bytes, found {size}")
    try:
        array: Array = numpy.ndarray(shape, dtype, frame)
    except ValueError as error:  # no rows of more bytes than an address has
        raise BadMessage("tensor", f"{spec.name} of shape {shape} cannot be: {error}") from error
    return (
        array if array.flags.aligned else array.copy()
    )  # a short frame lies anywhere in ZeroMQ's receive buffer


def _unpack_body(tag: str, body: bytes, max_containers: int) -> Any:
    """The map in `body`. A false length would make msgpack set aside 8 bytes per element claimed, at each depth."""
    try:
        if len(body) > _SAFE_BODY_BYTES:
            scan = msgpack.Unpacker(None, max_buffer_size=len(body), max_ext_len=0)
            scan.feed(body)
            scan.skip()  # walks the whole value without making any of it
        if len(body) <= max_containers:  # each takes at least a byte
            return msgpack.unpackb(body, max_ext_len=0)
        count = _Counting(max_containers)
        return msgpack.unpackb(body, max_ext_len=0, list_hook=count, object_hook=count)
    except Exception as error:  # msgpack raises many unrelated kinds, all of them about these bytes
        raise BadMessage("body", f"{tag} does not hold the MessagePack expected: {error}") from error


class _Counting:
    """Is shown every list and map as it is made, and ends it all when there are too many."""

    def __init__(self, allowed: int) -> None:
        self._allowed = self._left = allowed

    def __call__(self, container: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {self._allowed} lists and maps")
        return container
