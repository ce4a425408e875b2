"""A step as it travels between stages: rows come out as they went in, and what is no step is refused in a sentence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.plan import StepPlan, StepSlice
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.stage_step import (
    StageLimits,
    own_logprobs,
    rows_of,
    sampled_rows,
    sent_step,
    wire_logprobs,
)
from edge_runtime.errors import Refusal
from edge_runtime.model.sampling import Sampled, TokenLogprobs

LIMITS = StageLimits(max_rows=64, num_blocks=40, context_tokens=128, vocab_size=500, has_encoder=False)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Requests somewhere in prompt or answer, with blocks that are nobody else's."""
    blocks = draw(st.permutations(range(LIMITS.num_blocks)))
    slices, used, rows_left = [], 0, LIMITS.max_rows
    for seat in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, 60))
        count = draw(st.integers(1, min(30, rows_left - (4 - seat))))
        rows_left -= count
        samples = draw(st.booleans())
        params = SamplingParams(
            temperature=draw(st.sampled_from((0.0, 0.7))),
            top_k=draw(st.integers(0, 20)),
            top_p=draw(st.sampled_from((0.5, 1.0))),
            repetition_penalty=draw(st.sampled_from((1.0, 1.4))),
            seed=draw(st.integers(-(2**63), 2**63 - 1)),
            logprobs=draw(st.sampled_from((None, 0, 5))),
        )
        length = start + count + (0 if samples else draw(st.integers(1, 20)))
        request = Request(f"r{seat}", [(7 * i + seat) % 500 for i in range(length)], params, 0.0)
        request.seat, request.version = seat, seat + 1
        needed = -(-length // 16)
        request.block_table, used = list(blocks[used : used + needed]), used + needed
        slices.append(StepSlice(request, start, count, samples))
    return StepPlan(tuple(slices), sum(piece.count for piece in slices), 1)


@given(plans())
def test_rows_and_samplers_come_out_as_they_went_in(plan: StepPlan) -> None:
    rows = RequestTable(8, LIMITS.context_tokens).rows(plan)
    sent = sent_step(plan, rows)
    found = rows_of(sent.slices, sent.blocks, plan.num_rows, LIMITS)
    for name in ("positions", "slots", "row_request"):
        assert torch.equal(getattr(found, name), getattr(rows, name)), name
    assert found.sampled_rows.tolist() == rows.sampled_rows.tolist()
    for index, piece in enumerate(plan.slices):
        used = -(-(piece.start + piece.count) // 16)
        assert found.block_tables[index, :used].tolist() == piece.request.block_table[:used]
    sampling = sampled_rows(sent.slices, sent.choices, sent.tokens, LIMITS)
    wanted = [piece.request for piece in plan.slices if piece.samples]
    for ours, theirs in zip(sampling, wanted, strict=True):
        assert len(ours.tokens) == len(theirs.tokens) and ours.encoder_end == theirs.encoder_end
        fields = ("temperature", "repetition_penalty", "logprobs")
        assert all(getattr(ours.params, name) == getattr(theirs.params, name) for name in fields)
        if theirs.params.temperature:
            assert (ours.params.seed, ours.params.top_k) == (theirs.params.seed, theirs.params.top_k)
        if theirs.params.repetition_penalty != 1:
            assert list(ours.tokens) == theirs.tokens


@settings(max_examples=200)
@given(plans(), st.data())
def test_any_change_of_a_number_gives_rows_within_the_limits_or_a_refusal(
    plan: StepPlan, data: st.DataObject
) -> None:
    sent = sent_step(plan, RequestTable(8, LIMITS.context_tokens).rows(plan))
    slices, blocks, tokens = sent.slices.copy(), sent.blocks.copy(), sent.tokens.copy()
    array = data.draw(st.sampled_from([part for part in (slices, blocks, tokens) if part.size]))
    place = data.draw(st.integers(0, array.size - 1))
    array.flat[place] = data.draw(st.sampled_from((-1, 0, 1, 39, 40, 499, 500, 2**31 - 1, -(2**31))))
    try:
        rows = rows_of(slices, blocks, plan.num_rows, LIMITS)
        sampling = sampled_rows(slices, sent.choices, tokens, LIMITS)
    except Refusal:
        return
    assert 0 <= int(rows.slots.min()) and int(rows.slots.max()) < LIMITS.num_blocks * 16
    assert 0 <= int(rows.positions.min()) and int(rows.positions.max()) < LIMITS.context_tokens
    assert int(rows.block_tables.min()) >= 0 and int(rows.block_tables.max()) < LIMITS.num_blocks
    assert len(rows.positions) == plan.num_rows and len(sampling) == len(rows.sampled_rows)
    for row in sampling:
        assert all(0 <= token < LIMITS.vocab_size for token in row.tokens[:5])


@pytest.mark.parametrize(
    ("slices", "blocks", "num_rows", "said"),
    [
        (np.zeros((0, 4), np.int32), [], 0, "at least 1"),
        (np.zeros((1, 3), np.int32), [], 0, "slices are"),
        ([[0, 65, 1, 0]], [0, 1, 2, 3, 4], 65, "at most 64 are taken"),
        ([[0, 3, 1, 0]], [0], 4, "slices of 3 rows, 4 came"),
        ([[126, 3, 1, 0]], [0] * 9, 3, "outside positions 0 to 127"),
        ([[0, 3, 2, 0]], [0], 3, "neither samples nor does not"),
        ([[0, 3, 1, 7]], [0], 3, "7 tokens of an encoder"),
        ([[0, 17, 1, 0]], [0], 17, "1 blocks came"),
        ([[0, 3, 1, 0]], [40], 3, "none of 0 to 39"),
    ],
)
def test_what_is_no_step_is_refused_with_what_was_found(slices, blocks, num_rows: int, said: str) -> None:
    with pytest.raises(Refusal, match=said):
        rows_of(np.array(slices, np.int32), np.array(blocks, np.int32), num_rows, LIMITS)


def test_log_probabilities_travel_bit_for_bit() -> None:
    details = (
        TokenLogprobs(-0.1234567890123, [3, 1], [-0.1234567890123, -2.5]),
        None,
        TokenLogprobs(-7e-9, [], []),
    )
    sampled = Sampled(torch.tensor([3, 4, 5]), details, ())
    assert own_logprobs(wire_logprobs(sampled)) == list(details)
    assert wire_logprobs(Sampled(torch.tensor([3]), (), ())) == []
