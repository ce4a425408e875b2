"""Throws mutated messages at the decoder: `python -m testbed.fuzz --inputs 1000000 --seed 1`.

Every input begins as a true message of some type with random fields. A third is damaged blindly; a third in its
structure (header values, fields, tensor descriptions, lengths that lie, depth), under a right checksum; a third in
both ways. The decoder may answer with a message or with BadMessage, and may allocate no more than it announces.
Knows no socket; what strangers do to sockets is tested with the transport.
"""

import argparse
import random
import sys
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import msgspec
import numpy

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.protocol import (
    MAX_TENSORS,
    MESSAGES,
    BadMessage,
    Envelope,
    Message,
    Stamp,
    VersionMismatch,
    decode,
    encode,
    stamped,
)

PREFIX_BYTES = 10  # magic, version, checksum: the rest of frame 0 is MessagePack
BASE_BYTES = 256 << 10  # allowed for each decode, whatever it is given
BYTES_PER_BYTE = (
    32  # and for each byte of frame 0: a string of one character and three bytes is an object of 80
)
BYTES_PER_CONTAINER = 264  # and for each list or map that a message of this type may hold
SAMPLE = (
    997  # one input of so many is decoded under tracemalloc; a prime, so that no kind of input is left out
)
SAMPLE_OF_LONG, LONG_BYTES = 19, 1000
NUM_SEEDS = 40  # true messages of each type
SHOWN_BYTES = 2000

_NUMPY = {
    "float32": numpy.dtype("<f4"),
    "bfloat16": numpy.dtype("<u2"),
    "float16": numpy.dtype("<f2"),
    "int8": numpy.dtype("i1"),
    "uint8": numpy.dtype("u1"),
    "int16": numpy.dtype("<i2"),
    "int32": numpy.dtype("<i4"),
    "int64": numpy.dtype("<i8"),
}
_NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, -(2**63),
    0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), 1e308, "", "x" * 300, "\x00", "\u20ac" * 40, "float32",
    "bfloat16", "int32", "expert_call", b"", b"\xff" * 20, [], [[]], [0] * 20, {}, {"type": "stop"}, {"": {}}, [None] * 9,
)  # fmt: skip
_SMALL: tuple[Any, ...] = ([], {}, {0: 0}, "\u0101", -128, 1.5, [[]], "ab")
_LYING = tuple(
    mark + length.to_bytes(4, "big") for mark in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")
    for length in (2**16, 2**24, 2**32 - 1)
)  # fmt: skip

Frames = list[bytes]
Decode = Callable[[Sequence[bytes]], Envelope]


@dataclass
class Report:
    """What came of a run.

    outcomes  "message", or the kind of each refusal
    worst     most bytes allocated in one decode, and that as a share of what is allowed
    fault     what was wrong with the first input that was, None if none was
    """

    inputs: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    measured: int = 0
    worst_bytes: int = 0
    worst_share: float = 0.0
    fault: str | None = None

    def __str__(self) -> str:
        rate = self.inputs / self.seconds if self.seconds else 0.0
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.most_common())
        return (
            f"{self.inputs} inputs in {self.seconds:.1f} s, {rate:.0f} per second: {kinds}\n"
            f"most allocated in one of {self.measured} decodes: {self.worst_bytes} bytes, "
            f"{self.worst_share:.1%} of what is allowed"
        )


def fuzz(
    inputs: int,
    seed: int,
    clock: Clock,
    *,
    decode: Decode = decode,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Decode `inputs` damaged messages, the same for the same seed, up to the first that is not answered as it must."""
    seeded = random.Random(seed)
    seeds = true_messages(seeded)
    report, began = Report(), clock.now()
    for index in range(inputs):
        frames = damaged(seeds, seeded)
        report.inputs += 1
        is_long = bool(frames) and len(frames[0]) > LONG_BYTES
        if index % (SAMPLE_OF_LONG if is_long else SAMPLE) == 0:
            fault = _decode_measured(decode, frames, report)
        else:
            fault = _decode_checked(decode, frames, report.outcomes)
        if fault is not None:
            shown = [frame[:SHOWN_BYTES].hex() for frame in frames]
            report.fault = f"input {index} of seed {seed}: {fault}; its frames in hex: {shown}"
            break
        if (index + 1) % 100_000 == 0:
            say(f"{index + 1} inputs, {(index + 1) / (clock.now() - began):.0f} per second")
    report.seconds = clock.now() - began
    return report


def _decode_checked(decode: Decode, frames: Frames, outcomes: Counter[str]) -> str | None:
    """Why the answer to these frames is wrong, None if it is right."""
    try:
        envelope = decode(frames)
    except VersionMismatch:
        outcomes["version"] += 1
    except BadMessage as error:
        outcomes[error.kind] += 1
        if "\n" in str(error):
            return f"a refusal of more than one line: {error}"
    except Exception as error:  # noqa: BLE001 - to find these is what this is for
        return f"{type(error).__name__}: {error}"
    else:
        outcomes["message"] += 1
        return _fault_of(envelope, frames)
    return None


def _fault_of(envelope: Envelope, frames: Frames) -> str | None:
    cls = type(envelope.message)
    if cls not in MESSAGES.values():
        return f"an answer of type {cls.__name__}"
    if [array.nbytes for array in envelope.tensors] != [len(frame) for frame in frames[1:]]:
        return "tensors that are not their frames"
    if any(array.ndim != spec.ndim for array, spec in zip(envelope.tensors, cls.tensors, strict=True)):
        return "a tensor with other dimensions than its message says"
    return None


def _decode_measured(decode: Decode, frames: Frames, report: Report) -> str | None:
    first = frames[0] if frames else b""
    allowed = BASE_BYTES + BYTES_PER_BYTE * len(first) + BYTES_PER_CONTAINER * _containers(first)
    allowed += sum(map(len, frames[1:]))  # a frame that lies badly in memory is copied
    tracemalloc.start()
    try:
        fault = _decode_checked(decode, frames, report.outcomes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    report.measured += 1
    report.worst_bytes = max(report.worst_bytes, peak)
    report.worst_share = max(report.worst_share, peak / allowed)
    if fault is None and peak > allowed:
        return f"{peak} bytes were allocated, {allowed} are allowed"
    return fault


def _containers(frame: bytes) -> int:
    """How many lists and maps a message of the type that this frame names may hold; all, if it is short."""
    named = [cls.max_containers for tag, cls in MESSAGES.items() if tag.encode() in frame[:100]]
    return min(len(frame), max(named, default=0))


# True messages.


def true_messages(seeded: random.Random) -> list[Frames]:
    """Frames of messages of every type, with random fields and tensors; some bear a stamp."""
    found = []
    for cls in MESSAGES.values():
        for _ in range(NUM_SEEDS):
            message = _value(msgspec.inspect.type_info(cls), seeded)
            frames = encode(
                message,
                call_id=seeded.randrange(2**32),
                epoch=seeded.randrange(9),
                ttl_s=seeded.choice((None, 0.5)),
                tensors=_tensors(cls, seeded),
            )
            if seeded.random() < 0.1:
                frames = stamped(frames, Stamp(seeded.random() * 1e4, "n1"))
            found.append([bytes(frame) for frame in frames])
    return found


def _value(info: Any, seeded: random.Random) -> Any:
    """A random value of a msgspec type description."""
    kind = msgspec.inspect
    match info:
        case kind.AnyType():
            return seeded.choice(({"a": [1, None, "x"]}, [], 7, "text", None, 1.5))
        case kind.NoneType():
            return None
        case kind.BoolType():
            return seeded.random() < 0.5
        case kind.IntType():
            least, most = info.ge or 0, min(2**31 if info.le is None else info.le, 2**62)
            return seeded.choice([n for n in (least, 1, 300, most) if least <= n <= most])
        case kind.FloatType():
            return seeded.random() * 0.9 + 0.05
        case kind.StrType():
            return seeded.choice(("", "n1", "Once upon a time", "\u00e9\u20ac", "y" * 200))
        case kind.LiteralType():
            return seeded.choice(info.values)
        case kind.UnionType():
            return _value(seeded.choice(info.types), seeded)
        case kind.ListType():
            return [_value(info.item_type, seeded) for _ in range(seeded.randrange(4))]
        case kind.TupleType():
            return tuple(_value(each, seeded) for each in info.item_types)
        case kind.DictType():
            pairs = [(info.key_type, info.value_type)] * seeded.randrange(3)
            return {_value(key, seeded): _value(value, seeded) for key, value in pairs}
        case kind.StructType() | kind.DataclassType():
            return info.cls(**{each.name: _value(each.type, seeded) for each in info.fields})
    raise AssertionError(f"no random value of {info}")


def _tensors(cls: type[Message], seeded: random.Random) -> list[Any]:
    num_rows, num_pairs, width = (seeded.randrange(1, 5) for _ in range(3))
    shapes = {1: (num_pairs,), 2: (num_rows, width), 3: (num_rows, num_pairs, width)}
    return [numpy.zeros(shapes[spec.ndim], _NUMPY[seeded.choice(spec.dtypes)]) for spec in cls.tensors]


# Damage.


def damaged(seeds: list[Frames], seeded: random.Random) -> Frames:
    """One input."""
    frames = list(seeded.choice(seeds))
    how = seeded.randrange(3)
    if how != 0:
        frames = _damage_structure(frames, seeds, seeded)
    if how != 1:
        frames = _damage_blindly(frames, seeds, seeded)
    return frames


def _sealed(frame: bytes, header: bytes) -> bytes:
    """Frame 0 with this header and its right checksum."""
    return frame[:6] + zlib.crc32(header).to_bytes(4, "little") + header


def _damage_blindly(frames: Frames, seeds: list[Frames], seeded: random.Random) -> Frames:
    """Bytes and frames changed, without a look at what they mean; half of the results get past the checksum."""
    broken = [bytearray(frame) for frame in frames]
    for _ in range(seeded.randint(1, 4)):
        frame = seeded.choice(broken) if broken else bytearray()
        at = seeded.randint(0, len(frame))
        match seeded.randrange(10):
            case 0 | 1 | 2 if at < len(frame):
                frame[at] = seeded.choice(
                    (seeded.randrange(256), frame[at] ^ 1 << seeded.randrange(8), 0, 255)
                )
            case 3:
                frame.insert(at, seeded.randrange(256))
            case 4:
                del frame[at:]
            case 5:
                del frame[at : at + seeded.randrange(9)]
            case 6:
                other = seeded.choice(seeded.choice(seeds))
                frame[at:] = other[seeded.randint(0, len(other)) :]
            case 7:
                broken.insert(
                    seeded.randint(0, len(broken)), bytearray(seeded.randbytes(seeded.randrange(40)))
                )
            case 8 if broken:
                del broken[seeded.randrange(len(broken))]
            case _:
                frame[at:at] = seeded.choice(_LYING)
    if broken and len(broken[0]) > PREFIX_BYTES and seeded.random() < 0.5:
        broken[0] = bytearray(_sealed(bytes(broken[0]), bytes(broken[0][PREFIX_BYTES:])))
    return [bytes(frame) for frame in broken]


def _damage_structure(frames: Frames, seeds: list[Frames], seeded: random.Random) -> Frames:
    """A header that is MessagePack with a right checksum, and says something else."""
    header = msgpack.unpackb(frames[0][PREFIX_BYTES:])
    body = msgpack.unpackb(header[5])
    match seeded.randrange(9):
        case 0 | 1 if body:
            body[seeded.choice(list(body))] = _nasty(seeded)
        case 2 if body:
            del body[seeded.choice(list(body))]
        case 3:
            body[seeded.choice(("", "request_id", "type", "more"))] = _nasty(seeded)
        case 4:
            header[seeded.randrange(len(header))] = _nasty(seeded)
        case 5:
            header.insert(seeded.randint(0, len(header)), _nasty(seeded))
        case 6:
            other = seeded.choice(seeds)
            header[0] = msgpack.unpackb(other[0][PREFIX_BYTES:])[0]
        case 7 if header[4]:
            described = seeded.choice(header[4])
            if seeded.random() < 0.3:
                described[0] = _nasty(seeded)
            else:
                described[1] = [
                    seeded.choice((0, 1, -1, 3, 2**31, 2**62, 2**63)) for _ in range(seeded.randrange(4))
                ]
        case _:
            del header[seeded.randrange(len(header)) :]
    try:
        if len(header) > 5 and isinstance(header[5], bytes):
            header[5] = msgpack.packb(body)
            if seeded.random() < 0.15:
                header[5] = _lie(header[5], seeded)
        packed = msgpack.packb(header)
    except (OverflowError, ValueError):  # too deep or too large to be written at all
        return frames
    if seeded.random() < 0.1:
        packed = _lie(packed, seeded)
    return [_sealed(frames[0], packed), *frames[1:]]


def _nasty(seeded: random.Random) -> Any:
    value = seeded.choice(_NASTY)
    match seeded.randrange(12):
        case 0:
            for _ in range(seeded.choice((1, 5, 50, 400))):
                value = [value]
        case 1:
            for _ in range(seeded.choice((1, 5, 50, 400))):
                value = {"a": value}
        case 2:
            return [value] * seeded.choice((10, 1000, 5000))
        case 3 if seeded.random() < 0.2:  # as many small things as a long body holds
            return [seeded.choice(_SMALL)] * seeded.choice((20_000, 200_000, 400_000))
    return value


def _lie(packed: bytes, seeded: random.Random) -> bytes:
    """A false length somewhere, once or many times inside itself."""
    at = seeded.randint(0, len(packed))
    return packed[:at] + seeded.choice(_LYING) * seeded.choice((1, 1, 3, 400)) + packed[at:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(
        f"{len(MESSAGES)} types of messages, {MAX_TENSORS} tensors at most, seed {options.seed}", flush=True
    )
    report = fuzz(
        options.inputs, options.seed, SystemClock(), say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(report)
    if report.fault is not None:
        sys.exit(report.fault)


if __name__ == "__main__":
    main()
