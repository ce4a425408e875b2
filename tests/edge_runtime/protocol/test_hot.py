"""The fast reading and writing of the token path must equal the plain one."""

import struct
import zlib

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import ExpertCall, ExpertReply, codec, decode, encode, hot
from tests.support.messages import expert_call, expert_reply, messages

FLOATS = st.sampled_from([0.0, 0.25, 1e9, float("inf"), float("nan")]) | st.floats(0, 1e6)


def fast(frames):
    return {2: hot.decode_reply, 4: hot.decode_call}[len(frames)](frames)


def same(one, other):
    assert one[:4] == other[:4]
    assert [(a.dtype, a.shape, a.tobytes()) for a in one[4]] == [
        (a.dtype, a.shape, a.tobytes()) for a in other[4]
    ]


@given(
    messages(ExpertCall, ExpertReply), st.integers(0, 2**62), st.none() | FLOATS.filter(lambda s: s <= 1e6)
)
def test_both_ways_of_writing_read_the_same_in_both_ways_of_reading(pair, call_id, ttl_s):
    message, tensors = pair
    for frames in (
        encode(message, call_id=call_id, ttl_s=ttl_s, tensors=tensors),
        codec._encode(message, call_id, 0, ttl_s, tensors),
    ):
        frames = [bytes(frame) for frame in frames]
        same(decode(frames), codec._decode(frames))


@pytest.mark.parametrize(("made", "ttl_s"), [(expert_call(), 0.25), (expert_reply(), None)])
def test_the_usual_message_takes_the_fast_way(made, ttl_s):
    message, tensors = made
    for dtype in (numpy.float32, numpy.uint16):
        frames = encode(
            message, call_id=9, epoch=2, ttl_s=ttl_s, tensors=(tensors[0].astype(dtype), *tensors[1:])
        )
        assert fast([bytes(frame) for frame in frames]) is not None


@given(st.booleans(), st.integers(0, 2**32), st.integers(0, 255))
def test_what_the_fast_way_accepts_the_plain_way_accepts_alike(is_call, position, value):
    message, tensors = expert_call() if is_call else expert_reply()
    frames = [bytes(f) for f in encode(message, call_id=9, ttl_s=0.25 if is_call else None, tensors=tensors)]
    header = bytearray(frames[0])
    header[position % len(header)] = value
    header[6:10] = struct.pack("<I", zlib.crc32(header[10:]))
    frames[0] = bytes(header)
    if (read := fast(frames)) is not None:
        same(read, codec._decode(frames))


@pytest.mark.parametrize("is_call", [True, False])
def test_numbers_at_their_limits_are_judged_alike(is_call):
    message, tensors = expert_call() if is_call else expert_reply()
    frames = [bytes(f) for f in encode(message, call_id=9, ttl_s=0.25 if is_call else None, tensors=tensors)]
    accepted = 0
    for start in range(10, len(frames[0]) - 8):
        for number in (
            bytes(4),
            b"\x7f\xff\xff\xff",
            b"\xff" * 4,
            b"\xff" * 8,
            struct.pack(">d", 1e300),
            struct.pack(">d", float("nan")),
        ):
            header = bytearray(frames[0])
            header[start : start + len(number)] = number
            header[6:10] = struct.pack("<I", zlib.crc32(header[10:]))
            broken = [bytes(header), *frames[1:]]
            if (read := fast(broken)) is not None:
                accepted += 1
                same(read, codec._decode(broken))
            else:
                try:
                    codec._decode(broken)
                except ProtocolError:
                    pass
    assert accepted
