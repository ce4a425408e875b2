"""A prompt computed by one engine and answered by another: nothing is computed twice, and nothing is left over."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.engine import Engine, Output
from edge_runtime.engine.request import Request, SamplingParams, encoder_prompt
from tests.support.encoder_decoders import START, write_tiny_switch
from tests.support.engines import engine_of, run_to_end, whole_model

IDS = torch.randint(10, 8000, (400,), generator=torch.Generator().manual_seed(9)).tolist()
NUM_TOKENS = 6


def asked(name: str, prompt: Sequence[int], max_tokens: int, **options: object) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), 0.0, **options)


def prefilled(engine: Engine, name: str, prompt: Sequence[int], **options: object) -> list[Output]:
    """Compute a prompt and its first token, for another engine to go on with."""
    outputs: list[Output] = []
    engine.submit(asked(name, prompt, 1, is_handed_on=True, **options))
    run_to_end(engine, outputs)
    return outputs


def hand_over(source: Engine, target: Engine, request: Request) -> int:
    """Move what there is of a prompt's blocks; how many are there then."""
    names = target.scheduler.prompt_hashes(request)
    blocks = source.blocks.read(names)
    target.blocks.take(names[: len(blocks.rows)], blocks)
    return target.blocks.missing(names)


def rows_computed(engine: Engine) -> int:
    return engine.runner.times.rows_computed


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 90), st.sampled_from([16, 23, 64]))
def test_the_home_computes_no_token_of_the_prompt_again(whole, length, max_rows):
    prompt = IDS[:length]
    alone = engine_of(whole)
    alone.submit(asked("r", prompt, NUM_TOKENS))
    expected = run_to_end(alone)["r"].request.output_ids

    worker, home = engine_of(whole, max_rows=max_rows), engine_of(whole)
    outputs = prefilled(worker, "r", prompt, wants_counts=True)
    first = outputs[-1].token_id
    request = asked("r", prompt, NUM_TOKENS, output_ids=[first])
    assert hand_over(worker, home, request) == -(-length // 16)
    home.submit(request)
    ended = run_to_end(home)["r"]
    assert ended.request.output_ids == expected and expected[0] == first
    assert ended.request.num_cached == length
    assert rows_computed(home) == NUM_TOKENS - 1, "one row for each token, and none of the prompt"


def test_a_prompt_in_parts_tells_of_its_full_blocks_as_they_come(whole):
    worker = engine_of(whole, max_rows=32)
    outputs = prefilled(worker, "r", IDS[:90], wants_counts=True)
    parts = [output.part for output in outputs if output.part is not None]
    assert [len(part.hashes) for part in parts] == [2, 4]
    names = worker.scheduler.prompt_hashes(asked("r", IDS[:90], 1))
    assert parts[-1].hashes == tuple(names[:4]) and len(names) == 6
    counted = [part.counts.sum(axis=1).tolist() for part in parts]
    assert counted == [[32 * 4] * 6, [64 * 4] * 6]
    assert not any(output.part for output in prefilled(worker, "s", IDS[100:130])), "it came at one go"


def test_whoever_goes_on_where_the_prompt_was_computed_computes_none_of_it_either(whole):
    engine = engine_of(whole)
    first = prefilled(engine, "r", IDS[:37])[-1].token_id
    before = rows_computed(engine)
    engine.submit(asked("r", IDS[:37], NUM_TOKENS, output_ids=[first]))
    run_to_end(engine)
    assert rows_computed(engine) - before == NUM_TOKENS - 1


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_what_did_not_come_is_computed_and_changes_no_token(whole, lost):
    worker, home = engine_of(whole), engine_of(whole)
    first = prefilled(worker, "r", IDS[:40])[-1].token_id
    request = asked("r", IDS[:40], NUM_TOKENS, output_ids=[first])
    names = home.scheduler.prompt_hashes(request)
    worker.blocks.pool.forget(worker.blocks.pool.look(names[lost])[0])
    assert hand_over(worker, home, request) == lost
    home.submit(request)
    found = run_to_end(home)["r"].request
    alone = engine_of(whole)
    alone.submit(asked("r", IDS[:40], NUM_TOKENS))
    assert found.output_ids == run_to_end(alone)["r"].request.output_ids
    assert found.num_cached == 16 * lost


def test_a_last_block_is_written_on_by_one_request_alone(whole):
    """Two answers go on after one prompt: one adopts its last block, the other computes it anew."""
    worker, home = engine_of(whole), engine_of(whole)
    first = prefilled(worker, "r", IDS[:20])[-1].token_id
    requests = [asked(name, IDS[:20], NUM_TOKENS, output_ids=[first]) for name in ("a", "b")]
    hand_over(worker, home, requests[0])
    for request in requests:
        home.submit(request)
    ended = run_to_end(home)
    assert ended["a"].request.output_ids == ended["b"].request.output_ids
    assert sorted(end.request.num_cached for end in ended.values()) == [16, 20]
    later = engine_of(whole)
    assert hand_over(worker, later, requests[0]) == 2, "the worker has it still"
    assert hand_over(home, engine_of(whole), requests[0]) == 1, (
        "where somebody wrote on in it, nobody finds it"
    )


def test_blocks_that_came_go_like_any_cached_ones_when_memory_is_short(whole):
    worker, home = engine_of(whole), engine_of(whole, num_blocks=12)
    first = prefilled(worker, "r", IDS[:75])[-1].token_id
    request = asked("r", IDS[:75], NUM_TOKENS, output_ids=[first])
    hand_over(worker, home, request)
    home.submit(asked("other", IDS[200:370], 4))  # needs nearly all there are
    run_to_end(home)
    home.scheduler.pool.check([])
    home.submit(request)
    alone = engine_of(whole)
    alone.submit(asked("r", IDS[:75], NUM_TOKENS))
    assert run_to_end(home)["r"].request.output_ids == run_to_end(alone)["r"].request.output_ids


def test_an_abort_between_the_parts_of_a_prompt_leaves_no_block_in_use(whole):
    worker = engine_of(whole, max_rows=16)
    worker.submit(asked("r", IDS[:70], 1, is_handed_on=True))
    outputs = worker.step() + worker.step()
    assert sum(output.part is not None for output in outputs) == 2
    assert worker.abort("r").ended.finish_reason == "abort"
    worker.scheduler.pool.check([])
    assert worker.scheduler.pool.num_free == worker.scheduler.pool.num_blocks


def test_a_handed_on_prompt_counts_as_its_own_in_what_follows(whole):
    """What is decoded goes on counting in the block that came, as if all had been computed here."""
    worker, home, cold = engine_of(whole), engine_of(whole), engine_of(whole)
    first = prefilled(worker, "r", IDS[:40], wants_counts=True)[-1].token_id
    request = asked("r", IDS[:40], 30, output_ids=[first])
    hand_over(worker, home, request)
    home.submit(request)
    run_to_end(home)
    again = [asked(name, request.tokens + IDS[90:93], 1, wants_counts=True) for name in ("s", "t")]
    home.submit(again[0])
    cold.submit(again[1])
    run_to_end(home), run_to_end(cold)
    assert again[0].num_cached == 64, "four blocks, two of them with decoded tokens"
    assert (again[0].prompt_counts == again[1].prompt_counts).all()


@pytest.mark.parametrize("length", [1, 16, 23])
def test_an_encoder_decoder_is_handed_on_with_what_its_encoder_made(tmp_path_factory, length):
    """Its prompt is the encoder's input and the decoder's first token; nobody counts its experts."""
    folder = write_tiny_switch(tmp_path_factory.mktemp("switch"), expert_capacity=5)
    switch = whole_model(folder)
    ids = np.random.default_rng(length).integers(3, 509, length).tolist()
    options = {"encoder_tokens": length}
    prompt = encoder_prompt(ids, START)
    alone = engine_of(switch)
    alone.submit(asked("r", prompt, NUM_TOKENS, **options))
    expected = run_to_end(alone)["r"].request.output_ids
    worker, home = engine_of(switch), engine_of(switch)
    first = prefilled(worker, "r", prompt, **options)[-1].token_id
    request = asked("r", prompt, NUM_TOKENS, output_ids=[first], **options)
    assert hand_over(worker, home, request) == -(-length // 16) + 1
    home.submit(request)
    assert run_to_end(home)["r"].request.output_ids == expected
    assert rows_computed(home) == NUM_TOKENS - 1
