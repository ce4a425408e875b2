"""The table that follows running requests against rows built anew from each plan."""

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.cache.block_pool import BLOCK_TOKENS, BlockPool
from edge_runtime.engine.plan import StepPlan, StepSlice
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable, StepRows
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings

VOCABULARY = 50


def plain_rows(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(token id, position, slot, slice) of every row, one after another."""
    rows = []
    for index, piece in enumerate(plan.slices):
        for position in range(piece.start, piece.start + piece.count):
            block = piece.request.block_table[position // BLOCK_TOKENS]
            slot = block * BLOCK_TOKENS + position % BLOCK_TOKENS
            rows.append((piece.request.tokens[position], position, slot, index))
    return rows


def assert_same(rows: StepRows, plan: StepPlan) -> None:
    parts = (rows.token_ids, rows.positions, rows.slots, rows.row_request)
    assert all(part.dtype == torch.int32 and part.is_contiguous() for part in (*parts, rows.block_tables))
    assert list(zip(*(part.tolist() for part in parts), strict=True)) == plain_rows(plan)
    last, expected = -1, []
    for index, piece in enumerate(plan.slices):
        last += piece.count
        if piece.samples:
            expected.append(last)
        used = -(-(piece.start + piece.count) // BLOCK_TOKENS)
        assert rows.block_tables[index, :used].tolist() == piece.request.block_table[:used]
    assert rows.sampled_rows.tolist() == expected
    longest = max(piece.start + piece.count for piece in plan.slices)
    assert rows.block_tables.shape == (len(plan.slices), -(-longest // BLOCK_TOKENS))


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(7, 24),
    max_rows=st.integers(3, 40),
    max_running=st.integers(1, 3),
)
def test_rows_are_those_of_a_plain_construction_whatever_the_requests_do(
    seed, num_blocks, max_rows, max_running
):
    """Requests come, grow, give way, are aborted and take each other's seats; every step is laid out both ways."""
    draw = random.Random(seed)
    settings = SchedulerSettings(
        vocab_size=VOCABULARY, context_tokens=100, max_rows=max_rows, max_running=max_running
    )
    scheduler = Scheduler(settings, BlockPool(num_blocks), model_hash="m", tokenizer_hash="t")
    table = RequestTable(max_running, 100)
    alive: list[str] = []
    for step in range(60):
        while len(alive) < 5:
            prompt = [draw.randrange(3) for _ in range(draw.randint(1, 60))]  # prefixes meet
            name = f"r{step}.{len(alive)}"
            params = SamplingParams(max_tokens=draw.randint(1, 40), ignore_eos=True)
            scheduler.add(Request(name, prompt, params, float(step)))
            alive.append(name)
        plan = scheduler.plan_step(float(step))
        assert plan is not None
        assert_same(table.rows(plan), plan)
        tokens = {p.request.request_id: draw.randrange(VOCABULARY) for p in plan.slices if p.samples}
        for done in scheduler.complete(plan, tokens, float(step)):
            alive.remove(done.request_id)
        if draw.random() < 0.2:
            name = draw.choice(alive) if alive else ""
            if scheduler.abort(name) is not None:
                alive.remove(name)
    scheduler.check()


def test_a_request_that_takes_anothers_seat_shows_nothing_of_it():
    table = RequestTable(1, 64)
    first = Request("first", list(range(40)), SamplingParams(), 0.0)
    first.seat, first.version, first.block_table = 0, 1, [5, 6, 7]
    second = Request("second", [9, 8, 7], SamplingParams(), 0.0)
    second.seat, second.version, second.block_table = 0, 2, [2]
    table.rows(StepPlan((StepSlice(first, 0, 40, True),), 40))
    plan = StepPlan((StepSlice(second, 0, 3, True),), 3)
    rows = table.rows(plan)
    assert_same(rows, plan)
    assert rows.block_tables.tolist() == [[2]]
