"""The fuzzer finds what is planted, repeats itself, and finds nothing in the decoder that we ship."""

import random

import pytest

from edge_runtime.clock import SystemClock
from edge_runtime.protocol import MESSAGES, Envelope, Stop, decode
from testbed.fuzz import damaged, fuzz, true_messages

CLOCK = SystemClock()


def test_eight_thousand_damaged_messages_raise_nothing_but_refusals():
    report = fuzz(8000, 7, CLOCK)
    assert report.fault is None
    assert report.inputs == sum(report.outcomes.values()) == 8000
    assert report.measured > 5
    for outcome in (
        "message",
        "frames",
        "magic",
        "version",
        "crc",
        "size",
        "header",
        "type",
        "body",
        "tensor",
    ):
        assert report.outcomes[outcome] > 10, f"hardly any input ends in {outcome}"


def test_the_same_seed_gives_the_same_inputs_and_another_one_others():
    def inputs(seed):
        seeded = random.Random(seed)
        seeds = true_messages(seeded)
        return [damaged(seeds, seeded) for _ in range(200)]

    assert inputs(1) == inputs(1) != inputs(2)


def test_true_messages_are_of_every_type_and_are_understood():
    found = [decode(frames) for frames in true_messages(random.Random(3))]
    assert {type(envelope.message) for envelope in found} == set(MESSAGES.values())
    assert any(envelope.stamp for envelope in found)


def planted(fault):
    """The decoder with a fault for messages of seven bytes of reason."""

    def faulty(frames):
        envelope = decode(frames)
        return fault() if len(frames) == 2 else envelope

    return faulty


def fail():
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (fail, "KeyError: 'planted'"),
        (lambda: Envelope(Stop()), "tensors that are not their frames"),
        (lambda: Envelope(7), "an answer of type int"),
    ],
)
def test_a_planted_fault_is_found_and_told_with_its_input(fault, expected):
    report = fuzz(20_000, 1, CLOCK, decode=planted(fault))
    assert expected in report.fault
    assert report.fault.startswith(f"input {report.inputs - 1} of seed 1")
    assert "45444745" in report.fault  # "EDGE", the start of frame 0


def test_a_decoder_that_allocates_too_much_is_found():
    report = fuzz(20_000, 1, CLOCK, decode=lambda frames: bytes(50_000_000) and decode(frames))
    assert "bytes were allocated" in report.fault
