import random
import struct
import tracemalloc
import zlib

import msgpack
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import ProtocolError
from edge_runtime.protocol import (
    MAX_TENSORS,
    MESSAGES,
    PROTOCOL_VERSION,
    Abort,
    BadMessage,
    Deploy,
    ExpertCall,
    ExpertReply,
    Generate,
    Hello,
    PeerAddress,
    Share,
    Stamp,
    StatusReply,
    Stop,
    TokenLogprobs,
    Tokens,
    VersionMismatch,
    decode,
    encode,
    stamped,
)
from edge_runtime.protocol.codec import MAGIC
from tests.support.messages import expert_call, expert_reply, messages


def as_bytes(frames):
    return [bytes(frame) for frame in frames]


def sealed(header, version=PROTOCOL_VERSION):
    """A frame 0 with a right checksum around any header."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return MAGIC + struct.pack("<HI", version, zlib.crc32(packed)) + packed


def hand_made(tag, body=None, tensors=(), call_id=1, epoch=1, ttl_s=None):
    return sealed([tag, call_id, epoch, ttl_s, list(tensors), msgpack.packb(body or {})])


@given(messages(), st.integers(0, 2**62), st.integers(0, 2**31), st.none() | st.floats(0, 1e6))
def test_every_message_comes_back_as_it_went(pair, call_id, epoch, ttl_s):
    message, tensors = pair
    frames = as_bytes(encode(message, call_id=call_id, epoch=epoch, ttl_s=ttl_s, tensors=tensors))
    envelope = decode(frames)
    assert envelope.message == message
    assert (envelope.call_id, envelope.epoch, envelope.ttl_s) == (call_id, epoch, ttl_s)
    assert [(a.shape, a.dtype, a.tobytes()) for a in envelope.tensors] == [
        (a.shape, a.dtype, a.tobytes()) for a in tensors
    ]


@given(messages(), st.data())
def test_every_message_is_refused_when_cut_at_any_byte_of_any_frame(pair, data):
    message, tensors = pair
    frames = as_bytes(encode(message, call_id=1, tensors=tensors))
    for index, frame in enumerate(frames):
        cuts = (
            range(len(frame))
            if len(frame) < 60
            else data.draw(st.sets(st.integers(0, len(frame) - 1), max_size=30))
        )
        for cut in cuts:
            with pytest.raises(ProtocolError):
                decode([*frames[:index], frame[:cut], *frames[index + 1 :]])


@pytest.mark.parametrize("made", [expert_call(), expert_reply()])
def test_a_hot_message_is_refused_when_cut_at_every_byte(made):
    message, tensors = made
    frames = as_bytes(encode(message, call_id=1, ttl_s=0.5, tensors=tensors))
    for index, frame in enumerate(frames):
        for cut in range(len(frame)):
            with pytest.raises(ProtocolError):
                decode([*frames[:index], frame[:cut], *frames[index + 1 :]])


@given(messages())
def test_every_message_is_refused_when_a_frame_is_missing_or_one_too_many(pair):
    message, tensors = pair
    frames = as_bytes(encode(message, tensors=tensors))
    for wrong in ([], frames[:-1], [*frames, b""], [*frames, b"1234"], frames + [b""] * MAX_TENSORS):
        with pytest.raises(ProtocolError):
            decode(wrong)


@given(messages(), st.integers(0, 2**32), st.integers(1, 255))
def test_a_flipped_byte_in_the_header_is_always_noticed(pair, position, flip):
    message, tensors = pair
    frames = as_bytes(encode(message, tensors=tensors))
    broken = bytearray(frames[0])
    broken[position % len(broken)] ^= flip
    with pytest.raises(ProtocolError):
        decode([bytes(broken), *frames[1:]])


@given(messages(), st.integers(0, 2**32), st.integers(1, 255))
def test_a_flipped_byte_under_a_right_checksum_is_a_message_or_a_protocol_error(pair, position, flip):
    message, tensors = pair
    frames = as_bytes(encode(message, ttl_s=1.0, tensors=tensors))
    broken = bytearray(frames[0][10:])
    broken[position % len(broken)] ^= flip
    try:
        decode([sealed(bytes(broken)), *frames[1:]])
    except ProtocolError:
        pass


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_random_frames_are_a_protocol_error(frames):
    with pytest.raises(ProtocolError):
        decode(frames)


@given(st.binary(max_size=80), st.lists(st.binary(max_size=20), max_size=4))
def test_random_headers_under_a_right_checksum_are_a_protocol_error(header, frames):
    with pytest.raises(ProtocolError):
        decode([sealed(header), *frames])


def test_twenty_thousand_mutated_messages_raise_nothing_but_protocol_errors():
    seeded = random.Random(7)
    seeds = [
        as_bytes(encode(message, call_id=5, epoch=2, ttl_s=ttl_s, tensors=tensors))
        for message, tensors, ttl_s in [
            (*expert_call(), 0.5),
            (*expert_reply(), None),
            (Hello("n1", model_hash="abc"), (), 1.0),
            (Generate("r", prompt="once", sampling={"temperature": 0.5, "stop": ["x"]}), (), None),
            (Deploy(3, Share(0, 2, [[0, 1], [5]], 64), hosts=[[[0], [1, 2]]]), (), None),
        ]
    ]
    refused = 0
    for turn in range(20_000):
        frames = [bytearray(frame) for frame in seeded.choice(seeds)]
        for _ in range(seeded.randint(1, 4)):
            frame = seeded.choice(frames)
            match seeded.randrange(4):
                case 0 if frame:
                    frame[seeded.randrange(len(frame))] = seeded.randrange(256)
                case 1:
                    frame.insert(seeded.randint(0, len(frame)), seeded.randrange(256))
                case 2 if frame:
                    del frame[seeded.randrange(len(frame)) :]
                case 3:
                    frames.append(bytearray(seeded.randbytes(seeded.randrange(12))))
        if turn % 2 and len(frames[0]) > 10:  # half of them get past the checksum
            frames[0][6:10] = struct.pack("<I", zlib.crc32(frames[0][10:]))
        try:
            decode([bytes(frame) for frame in frames])
        except ProtocolError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 15_000


def test_another_version_is_told_with_both_numbers():
    with pytest.raises(VersionMismatch, match=f"version 9, expected {PROTOCOL_VERSION}") as caught:
        decode([sealed(b"anything", version=9)])
    assert caught.value.found == 9


def test_an_unknown_type_is_named():
    with pytest.raises(ProtocolError, match="'pang'"):
        decode([hand_made("pang")])


def test_fields_and_header_values_of_a_newer_writer_are_ignored():
    newer = sealed(["stop", 1, 1, None, [], msgpack.packb({"reason": "x", "how": {"soon": 1}}), "more", 5])
    assert decode([newer]).message == Stop("x")


@given(messages(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=16))
def test_a_stamp_travels_with_any_message_and_changes_nothing_else(pair, release_s, source):
    message, tensors = pair
    frames = encode(message, call_id=3, epoch=2, ttl_s=0.5, tensors=tensors)
    envelope = decode(as_bytes(stamped(frames, Stamp(release_s, source))))
    assert envelope.stamp == Stamp(release_s, source)
    plain = decode(as_bytes(frames))
    assert plain.stamp is None
    assert envelope[:4] == plain[:4]
    assert [a.tobytes() for a in envelope.tensors] == [a.tobytes() for a in plain.tensors]


@pytest.mark.parametrize(
    "more",
    [
        "link",
        ["link"],
        ["link", "soon", "n1"],
        ["link", 1, "n1"],
        ["link", float("nan"), "n1"],
        ["link", float("inf"), "n1"],
        ["link", 1.0, None],
        ["link", 1.0, "n1", 2],
        ["other", 1.0, "n1"],
        None,
    ],
)
def test_what_is_no_stamp_is_ignored(more):
    envelope = decode([sealed(["stop", 1, 1, None, [], msgpack.packb({}), more])])
    assert (envelope.message, envelope.stamp) == (Stop(), None)


def test_a_missing_field_takes_its_default_and_a_missing_name_is_refused():
    assert decode([hand_made("stop")]).message == Stop("")
    with pytest.raises(ProtocolError, match="request_id"):
        decode([hand_made("abort")])


@pytest.mark.parametrize("value", [7, None, ["x"], {"a": 1}, b"bytes", 2**64 - 1, 1.5, True])
def test_a_field_of_another_type_is_refused(value):
    with pytest.raises(ProtocolError, match="abort"):
        decode([hand_made("abort", {"request_id": value})])


@pytest.mark.parametrize(
    "described",
    [
        ["float32", []],
        ["float32", [2]],
        ["float32", [2, 8, 1]],
        ["float32", [1] * 40],
        ["float32", [2**63, 0]],
        ["float32", [0, 2**63]],
        ["float32", [2**32, 2**32]],
        ["float32", [2**62, 4]],
        ["float32", [-2, -8]],
        ["float32", [-1, 16]],
        ["float32", [2, 9]],
        ["float32", [2, 8.0]],
        ["float32", [True, 16]],
        ["float32", [None, 16]],
        ["float32", "28"],
        ["float64", [2, 4]],
        ["object", [2, 4]],
        ["O", [2, 4]],
        [["float32"], [2, 8]],
        [None, [2, 8]],
        ["float32"],
        "float32",
        [],
        None,
        7,
    ],
)
def test_a_false_shape_or_dtype_is_refused(described):
    pairs = ["int32", [1]]
    frames = [
        hand_made("expert_call", {"layer": 0}, [described, pairs, pairs]),
        bytes(64),
        bytes(4),
        bytes(4),
    ]
    with pytest.raises(ProtocolError):
        decode(frames)


def test_a_call_without_rows_is_as_good_as_any():
    nothing = numpy.zeros(0, numpy.int32)
    envelope = decode(
        as_bytes(encode(ExpertCall(0), tensors=(numpy.zeros((0, 8), numpy.float32), nothing, nothing)))
    )
    assert [array.shape for array in envelope.tensors] == [(0, 8), (0,), (0,)]


def test_pairs_of_unequal_length_are_refused():
    message, (rows, pair_rows, pair_experts) = expert_call()
    frames = as_bytes(encode(message, ttl_s=1.0, tensors=(rows, pair_rows, pair_experts[:-1])))
    with pytest.raises(ProtocolError, match="3 pair rows but 2 pair experts"):
        decode(frames)


def test_a_message_may_not_bring_tensors_of_its_own():
    with pytest.raises(ProtocolError, match="0 tensors"):
        decode([hand_made("stop", {}, [["int8", [1]]]), b"1"])


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), float("inf"), 1e300, "1", True, [1]])
def test_a_time_left_that_is_none_is_refused(ttl_s):
    with pytest.raises(ProtocolError, match="time left"):
        decode([hand_made("stop", ttl_s=ttl_s)])


@pytest.mark.parametrize(
    "changes", [{"call_id": -1}, {"call_id": 1.0}, {"epoch": None}, {"epoch": "1"}, {"tag": 3}, {"tag": None}]
)
def test_a_header_value_of_another_type_is_refused(changes):
    with pytest.raises(ProtocolError):
        decode([hand_made(**{"tag": "stop", **changes})])


def peak_bytes_while_refusing(frames):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frames)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"])
@pytest.mark.parametrize("claimed", [2**16, 2**20, 2**32 - 1])
def test_lengths_that_lie_cost_no_memory(kind, claimed):
    lie = kind + claimed.to_bytes(4, "big")
    nested = (b"\xdd" + min(claimed, 60_000).to_bytes(4, "big")) * 400
    for header in (lie, b"\x96" + lie, nested):
        assert peak_bytes_while_refusing([sealed(header)]) < 1 << 20
    for body in (lie, b"\x81\xa6reason" + lie, nested, nested * 20, lie + bytes(60_000)):
        frame = sealed(msgpack.packb(["stop", 1, 1, None, [], body]))
        assert peak_bytes_while_refusing([frame]) < 1 << 20


@pytest.mark.parametrize("tag", ["deploy", "ranges_query", "status_reply", "submit"])
@pytest.mark.parametrize(
    "small", [b"\x90", b"\x80", b"\x81\xa0\xc0", b"\x91\x90"], ids=["list", "map", "pair", "nested"]
)
def test_a_body_of_many_small_containers_takes_no_more_memory_than_its_type_announces(tag, small):
    """An empty list of one byte is an object of 56 in a list of 8: a body of 2 MiB would take 150 MB and more."""
    cls = MESSAGES[tag]
    count = (cls.max_body_bytes - 100) // len(small)
    body = b"\x81\xa4more\xdd" + count.to_bytes(4, "big") + small * count
    frames = [sealed([tag, 1, 1, None, [], body])]
    assert peak_bytes_while_refusing(frames) < 20 * len(body) + 264 * cls.max_containers
    with pytest.raises(BadMessage, match=f"more than {cls.max_containers} lists and maps"):
        decode(frames)


def test_what_the_largest_clusters_say_is_within_that():
    hosts = [[[expert % 8, 9] for expert in range(256)] for _ in range(61)]
    names = [PeerAddress(f"n{i}", "10.0.0.1:5551", "k" * 40) for i in range(512)]
    share = Share(0, 61, [list(range(256))] * 61, 1000)
    chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}] * 3000
    numbers = {f"number_{i}": 1.5 for i in range(60)}
    nodes = [{"name": f"n{i}", "roles": ["decode"], "report": {"numbers": numbers}} for i in range(512)]
    logprobs = [TokenLogprobs(1, -1.0, [(i, -2.0) for i in range(20)])] * 4096
    for message in (
        Deploy(1, share, hosts, names),
        Generate("r", messages=chat),
        StatusReply({"nodes": nodes}),
        Tokens("r", 0, [1] * 4096, "x", logprobs),
    ):
        assert decode(encode(message)).message == message


def test_deep_nesting_is_refused():
    for depth in (200, 2_000, 30_000):
        body = b"\x81\xa4body" + b"\x91" * depth + b"\xc0"
        with pytest.raises(ProtocolError):
            decode([sealed(msgpack.packb(["stop", 1, 1, None, [], b"\x91" * depth]))])
        try:
            decode([sealed(msgpack.packb(["status_reply", 1, 1, None, [], body]))])
        except ProtocolError:
            pass


def test_a_header_longer_than_its_type_allows_is_refused():
    assert decode([hand_made("stop", {"reason": "x" * 60_000})])
    with pytest.raises(ProtocolError, match="65536 are allowed"):
        decode([hand_made("stop", {"reason": "x" * 70_000})])
    with pytest.raises(ProtocolError, match="header has"):
        decode([bytes(10_000_000)])


def test_a_prompt_too_long_to_send_is_told_to_the_sender():
    with pytest.raises(BadMessage, match="generate would be"):
        encode(Generate("r", prompt="x" * (3 << 20)))


def test_text_that_is_not_unicode_is_told_to_the_sender():
    with pytest.raises(BadMessage, match="abort"):
        encode(Abort("\udcff"))


def test_tensors_are_not_copied_on_the_way_out_or_in():
    message, (rows, pair_rows, pair_experts) = expert_call()
    frames = encode(message, ttl_s=1.0, tensors=(rows, pair_rows, pair_experts))
    rows[0, 0] = 42
    assert numpy.frombuffer(frames[1], numpy.float32)[0] == 42
    received = [memoryview(bytearray(frame)) for frame in frames]
    tensors = decode(received).tensors
    received[1][0:4] = struct.pack("<f", 7.0)
    assert tensors[0][0, 0] == 7
    assert tensors[0].flags.writeable


def test_unaligned_frames_become_aligned_arrays():
    message, tensors = expert_call()
    frames = [
        memoryview(bytearray(b"!" + bytes(frame)))[1:]
        for frame in encode(message, ttl_s=1.0, tensors=tensors)
    ]
    received = decode(frames).tensors
    assert all(array.flags.aligned for array in received)
    assert (received[0] == tensors[0]).all()


def test_a_strided_tensor_is_sent_in_order():
    wide = numpy.arange(24, dtype=numpy.float32).reshape(4, 6)
    envelope = decode(as_bytes(encode(ExpertReply(0), tensors=(wide[:, ::2],))))
    assert (envelope.tensors[0] == wide[:, ::2]).all()


def test_a_tensor_that_its_message_does_not_carry_is_our_own_fault():
    message, (rows, pair_rows, pair_experts) = expert_call()
    for wrong in ((rows,), (rows[0], pair_rows, pair_experts), (rows, pair_rows.astype("i8"), pair_experts)):
        with pytest.raises(ValueError, match="ExpertCall"):
            encode(message, tensors=wrong)


def test_bytes_of_pickle_are_refused_and_do_nothing(tmp_path):
    target = tmp_path / "touched"
    attack = b"cos\nsystem\n(S'touch " + str(target).encode() + b"'\ntR."
    for frames in ([attack], [sealed(attack)], [hand_made("stop", {"reason": attack})]):
        with pytest.raises(ProtocolError):
            decode(frames)
    assert not target.exists()


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(MESSAGES)),
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=5)),
)
def test_any_map_as_a_body_is_a_message_or_a_protocol_error(tag, body):
    try:
        packed = msgpack.packb(body)
    except OverflowError:
        return
    try:
        decode([sealed([tag, 1, 1, None, [], packed])])
    except ProtocolError:
        pass
