"""An engine on an encoder-decoder: the prompt is the encoder's input, and answers are those of transformers' generate."""

import pytest
import torch

from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams, encoder_prompt
from edge_runtime.engine.scheduler import share_rows
from edge_runtime.errors import RequestError
from edge_runtime.model.moe import LocalExperts
from tests.support.encoder_decoders import START, Seq2SeqReference, write_tiny_switch
from tests.support.engines import Lacking, engine_of, pipeline_of, placed_experts, run_to_end, whole_model

NUM_TOKENS = 20


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 509, (count,), generator=generator).tolist()


PROMPTS = {f"r{n}": tokens(n, seed=n) for n in (1, 16, 40, 23, 9)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_switch(
        tmp_path_factory.mktemp("switch"), num_decoder_layers=3, tie_word_embeddings=False, expert_capacity=5
    )


@pytest.fixture(scope="module")
def whole(folder):
    return whole_model(folder)


@pytest.fixture(scope="module")
def expected(folder):
    """What generate answers to each prompt alone."""
    reference = Seq2SeqReference(folder)
    return {name: reference.greedy(ids, NUM_TOKENS) for name, ids in PROMPTS.items()}


def request_of(name: str, input_ids: list[int], **options) -> Request:
    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True} | options)
    return Request(name, encoder_prompt(input_ids, START), params, 0.0, encoder_tokens=len(input_ids))


def answers(engine: Engine, prompts=PROMPTS):
    for name, input_ids in prompts.items():
        engine.submit(request_of(name, input_ids))
    return run_to_end(engine)


@pytest.mark.parametrize("cuts", [[2], [3], [1, 4]])
def test_stages_that_hand_steps_on_answer_alike_wherever_the_layers_are_cut(whole, cuts):
    """In the encoder, between the halves, and in both."""
    expected = {name: end.request.output_ids for name, end in answers(engine_of(whole)).items()}
    found = answers(pipeline_of(whole, cuts))
    assert {name: end.request.output_ids for name, end in found.items()} == expected


def test_requests_together_are_answered_as_generate_answers_each(whole, expected):
    ended = answers(engine_of(whole))
    assert {name: end.request.output_ids for name, end in ended.items()} == expected
    for name, end in ended.items():
        assert end.finish_reason == "length" and end.bill["exact_here"] == 1.0
        assert end.request.num_prompt_tokens == len(PROMPTS[name])


def test_preemption_and_small_steps_change_no_token(whole, expected):
    for options in ({"num_blocks": 13}, {"max_rows": 55}, {"max_running": 2}):
        engine = engine_of(whole, **options)
        found = {name: end.request.output_ids for name, end in answers(engine).items()}
        assert found == expected, options
        if "num_blocks" in options:
            assert engine.scheduler.num_preemptions, "13 blocks are too few for all at once"


def test_the_same_input_is_encoded_once(whole, expected):
    engine = engine_of(whole)
    first = answers(engine, {"r40": PROMPTS["r40"]})["r40"]
    rows = engine.runner.times.rows_computed
    again = answers(engine, {"r40": PROMPTS["r40"]})["r40"]
    assert first.request.output_ids == again.request.output_ids == expected["r40"]
    assert (first.request.num_cached, again.request.num_cached) == (0, 40)
    assert engine.runner.times.rows_computed == rows + NUM_TOKENS
    # Two at a time: the one waits for what the other encodes.
    engine = engine_of(whole)
    together = answers(engine, {"a": PROMPTS["r40"], "b": PROMPTS["r40"]})
    assert sorted(end.request.num_cached for end in together.values()) == [0, 40]
    assert all(end.request.output_ids == expected["r40"] for end in together.values())


def test_nothing_is_shared_by_inputs_that_only_begin_alike(whole):
    longer = [*PROMPTS["r40"], 7]
    padded = [*PROMPTS["r40"], START, START]  # what filler looks like
    for other in (longer, padded, PROMPTS["r40"][:39]):
        alone = answers(engine_of(whole), {"x": other})["x"].request.output_ids
        engine = engine_of(whole)
        answers(engine, {"r40": PROMPTS["r40"]})
        found = answers(engine, {"x": other})["x"].request
        assert found.num_cached == 0 and found.output_ids == alone


def test_an_input_too_long_for_one_step_is_refused(whole):
    engine = engine_of(whole, max_rows=64, max_running=8)
    engine.submit(request_of("fits", tokens(48, seed=1)))
    with pytest.raises(RequestError, match="the prompt has 49 tokens, .* one step of at most 57 rows"):
        engine.submit(request_of("long", tokens(49, seed=1)))
    run_to_end(engine)


def test_an_expert_that_does_not_come_fails_only_who_asked_for_it(whole, expected):
    asked: dict[str, set[tuple[int, int]]] = {}

    class Watched(LocalExperts):
        def run(self, layer, x, expert_ids, out, beside=None):
            asked.setdefault(self.name, set()).update((layer, i) for i in expert_ids.view(-1).tolist())
            return super().run(layer, x, expert_ids, out, beside)

        def add_here(self, *arguments):
            return None

        def begin_step(self): ...
        def served_by(self): ...
        def may_be_replaced(self):
            return False

    for name, ids in PROMPTS.items():
        port = Watched(whole.store, "n1")
        port.name = name
        answers(engine_of(whole, port=port), {name: ids})
    layer, expert = sorted(set.union(*asked.values()) - set.intersection(*asked.values()))[0]
    ended = answers(engine_of(whole, port=Lacking(placed_experts(whole), layer, expert)))
    for name, end in ended.items():
        if (layer, expert) in asked[name]:
            assert end.finish_reason == "error" and f"layer {layer} expert {expert}" in end.detail
        else:
            assert end.request.output_ids == expected[name]


def test_rows_are_shared_so_that_who_needs_many_at_once_has_them():
    assert share_rows([33, 20, 5], 40, [32, 16, 0]) == [35 - 2, 0, 5]
    assert share_rows([33, 20, 5], 64, [32, 16, 0]) == [33, 20, 5]
    assert share_rows([33, 20], 20, [32, 16]) == [0, 20]
    assert share_rows([40, 20], 32, [0, 16]) == [16, 16]
