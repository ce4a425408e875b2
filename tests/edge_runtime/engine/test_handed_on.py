"""Two engines, one that computes prompts and one that answers: blocks by content, and the tokens of one engine alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.bill import Account
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams
from tests.support.engines import answers_of, engine_of, run_to_end

IDS = torch.randint(10, 8000, (300,), generator=torch.Generator().manual_seed(4)).tolist()
NUM_TOKENS = 12
ELSEWHERE = np.array([[2.5, 4.0], [10.0, 3.0]])  # gate weight and slots


@pytest.fixture(scope="module")
def alone(whole):
    known: dict[int, list[int]] = {}

    def tokens(length: int) -> list[int]:
        if length not in known:
            known[length] = answers_of(engine_of(whole), {"a": IDS[:length]}, max_tokens=NUM_TOKENS)["a"]
        return known[length]

    return tokens


def request(name: str, length: int, max_tokens: int, output_ids: list[int] | None = None, **more) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, IDS[:length], params, 0.0, output_ids=output_ids or [], **more)


def hand_on(source: Engine, target: Engine, asked: Request, chunk: int, most: int) -> int:
    """Blocks of a prompt, a chunk at a time and at most so many of them; how many the target has now."""
    hashes = target.scheduler.prompt_hashes(asked)[:most]
    for first in range(0, len(hashes), chunk):
        blocks = source.blocks.read(hashes[first : first + chunk])
        assert blocks.is_sound
        target.blocks.take(hashes[first : first + chunk], blocks)
    return target.blocks.missing(target.scheduler.prompt_hashes(asked))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 150), st.integers(1, 5), st.integers(0, 12), st.booleans())
def test_an_answer_that_was_handed_on_is_that_of_one_engine_bit_for_bit(
    whole, alone, length, chunk, most, crowded
):
    worker, home = engine_of(whole, max_rows=48), engine_of(whole, num_blocks=24 if crowded else 128)
    if crowded:  # the home has its own work, and few blocks
        home.submit(Request("busy", IDS[150:290], SamplingParams(max_tokens=20, ignore_eos=True), 0.0))
        home.step()
    first = request("r", length, 1, wants_counts=True)
    worker.submit(first)
    run_to_end(worker)
    going_on = request("r", length, NUM_TOKENS, first.output_ids)
    came = hand_on(worker, home, going_on, chunk, most)
    assert came <= min(most, length // 16) and (crowded or came == min(most, length // 16))
    home.submit(going_on, Account(ELSEWHERE, ["worker", "lender"]))
    ended = run_to_end(home)
    assert ended["r"].request.output_ids == alone(length)
    if not crowded:
        assert ended["r"].request.num_cached == 16 * came
    for engine in (worker, home):
        engine.scheduler.check()
        assert engine.scheduler.free_blocks == engine.scheduler.pool.num_blocks


def test_what_a_prompt_cost_elsewhere_is_on_its_bill(whole):
    home = engine_of(whole)
    home.submit(request("r", 20, 3), Account(ELSEWHERE, ["worker", "lender"]))
    ended = run_to_end(home)["r"]
    assert (ended.slots["worker"], ended.slots["lender"]) == (10, 3)
    total = 22 * 6 + 6.5  # gate weights of a row's layer sum to 1
    assert ended.bill["exact_elsewhere"] == pytest.approx(4.0 / total)
    assert home._carried == {}


def test_counts_that_came_with_blocks_are_those_of_computing_them_here(whole):
    worker, other = engine_of(whole), engine_of(whole)
    first = request("r", 90, 1, wants_counts=True)
    worker.submit(first)
    run_to_end(worker)
    again = request("r", 90, 1, wants_counts=True)
    assert hand_on(worker, other, again, 2, 9) == 5
    other.submit(again)
    run_to_end(other)
    assert again.num_cached == 80
    assert (again.prompt_counts == first.prompt_counts).all()
