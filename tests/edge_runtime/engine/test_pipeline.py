"""Stages that hand a step from one to the next give the very answers of one engine, whatever is lost on the way."""

import random
from collections.abc import Callable

import pytest

from edge_runtime.clock import ManualClock
from edge_runtime.engine.engine import Ended, Engine
from edge_runtime.engine.later_stage import LaterStage
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.engine.request import Request
from tests.support.engines import (
    Lacking,
    Whole,
    assert_nothing_left,
    engine_of,
    pipeline_of,
    placed_experts,
    request_of,
    run_to_end,
    turn,
    whole_model,
)
from tests.support.tiny_models import write_tiny_qwen3_moe

CUTS = [[1], [3], [1, 2, 3]]
SHARED = [(5 * i + 3) % 400 for i in range(40)]


@pytest.fixture(scope="module", params=[True, False], ids=["weights sum to 1", "weights sum to less"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Four layers, the second of them dense."""
    folder = write_tiny_qwen3_moe(
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=4,
        mlp_only_layers=[1],
        norm_topk_prob=request.param,
    )
    return whole_model(folder)


def mixed_requests(count: int = 20) -> list[Request]:
    """Greedy and drawn, with penalties and log probabilities, short and long prompts, some with one beginning."""
    draw, found = random.Random(7), []
    for index in range(count):
        prompt = [draw.randrange(400) for _ in range(draw.choice((1, 9, 30, 70)))]
        if index % 3 == 0:
            prompt = SHARED + prompt
        options = {"max_tokens": draw.choice((3, 12, 20))}
        if index % 2:
            options |= {"temperature": 0.9, "seed": index, "top_k": draw.choice((0, 7)), "top_p": 0.9}
        if index % 5 == 0:
            options |= {"repetition_penalty": 1.3}
        if index % 4 == 0:
            options |= {"logprobs": index % 3}
        found.append(request_of(f"r{index}", prompt, **options))
    return found


def answers(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[object]]]:
    """Token ids and log probabilities of each request, all of them at once."""
    for request in requests:
        engine.submit(request)
    seen = []
    ended = run_to_end(engine, seen)
    details = {name: [each.logprobs for each in seen if each.request_id == name] for name in ended}
    return {name: (done.request.output_ids, details[name]) for name, done in ended.items()}


@pytest.mark.parametrize("cuts", CUTS)
def test_every_answer_has_the_tokens_and_bits_of_one_engine(whole: Whole, cuts: list[int]) -> None:
    expected = answers(engine_of(whole), mixed_requests())
    engine = pipeline_of(whole, cuts)
    assert answers(engine, mixed_requests()) == expected
    assert engine.scheduler.num_cached_tokens > 0
    assert len(engine.stage_times.by_stage) == len(cuts) + 1


def test_as_many_steps_are_under_way_as_there_are_stages_and_share_the_requests(whole: Whole) -> None:
    engine = pipeline_of(whole, [1, 2])
    for index in range(6):
        engine.submit(request_of(f"r{index}", [index + 1]))
    most = 0
    sizes = []
    while not engine.is_idle:
        turn(engine)
        most = max(most, engine.num_under_way)
        sizes.append(len(engine.stages.sent[-1][1][1]))
    assert most == 3
    assert sizes[-1] == 2, "two of six in each of three steps"
    assert_nothing_left(engine)


def test_one_request_alone_has_one_step_under_way(whole: Whole) -> None:
    engine = pipeline_of(whole, [1, 2])
    engine.submit(request_of("r", [1, 2, 3]))
    while not engine.is_idle:
        turn(engine)
        assert engine.num_under_way <= 1


def test_a_preempted_request_goes_on_with_the_same_answer(whole: Whole) -> None:
    def growing() -> list[Request]:
        return [request_of(f"r{index}", [index + 1] * 3, max_tokens=60) for index in range(4)]

    expected = answers(engine_of(whole), growing())
    engine = pipeline_of(whole, [2], num_blocks=8)
    assert answers(engine, growing()) == expected
    assert engine.scheduler.num_preemptions > 0


def test_rows_that_do_not_sample_never_reach_the_head(whole: Whole) -> None:
    engine = pipeline_of(whole, [2], max_rows=32)
    engine.submit(request_of("r", SHARED * 2, max_tokens=1))
    decoder = engine.stages.stages[-1].runner.decoder
    seen = []
    head = decoder.head
    decoder.head = lambda hidden: seen.append(len(hidden)) or head(hidden)
    run_to_end(engine)
    assert len(engine.stages.sent) == 3 and seen == [1]


def test_an_aborted_request_frees_its_blocks_when_its_step_is_back(whole: Whole) -> None:
    engine = pipeline_of(whole, [1, 2])
    for name in ("a", "b"):
        engine.submit(request_of(name, SHARED, max_tokens=100))
    for _ in range(9):
        turn(engine)
    assert engine.num_under_way
    assert engine.abort("a").ended.finish_reason == "abort"
    assert engine.abort("b").ended.finish_reason == "abort"
    while engine.num_under_way:
        assert turn(engine) == []
    assert_nothing_left(engine)


# What is lost on the way.


def test_a_step_whose_result_never_comes_gives_its_requests_back_when_patience_ends(whole: Whole) -> None:
    clock = ManualClock()
    engine = pipeline_of(whole, [2], clock=clock, patience_s=5.0)
    engine.stages.lose = set(range(4, 1000))
    engine.submit(request_of("r", SHARED))
    for _ in range(20):
        turn(engine)
    assert engine.num_under_way == 1
    clock.advance(9.9)
    assert engine.step() == [], "each of two stages has 5 s"
    clock.advance(0.2)
    [output] = engine.step()
    assert output.ended.finish_reason == "error" and output.ended.cause == "stage"
    assert "n2" in output.ended.detail and "10 s" in output.ended.detail
    assert_nothing_left(engine)


def test_a_cut_link_holds_steps_and_they_go_on_when_it_is_back(whole: Whole) -> None:
    clock = ManualClock()
    expected = answers(engine_of(whole), mixed_requests(4))
    engine = pipeline_of(whole, [2], clock=clock, patience_s=5.0)
    for request in mixed_requests(4):
        engine.submit(request)
    ended = {}
    for number in range(400):
        engine.stages.cut = "n2 is gone" if 5 <= number < 15 else ""
        if number == 5:
            engine.stages.results.clear()
        clock.advance(0.1)
        ended |= {each.request_id: each.ended for each in turn(engine) if each.ended}
    assert {name: done.request.output_ids for name, done in ended.items()} == {
        name: tokens for name, (tokens, _) in expected.items()
    }
    assert_nothing_left(engine)


def test_a_link_that_stays_cut_gives_every_request_back(whole: Whole) -> None:
    clock = ManualClock()
    engine = pipeline_of(whole, [2], clock=clock, patience_s=5.0)
    for name in ("a", "b"):
        engine.submit(request_of(name, SHARED))
    engine.stages.cut = "n2 is gone: its connection ended"
    outputs = []
    for _ in range(60):
        clock.advance(0.1)
        outputs += engine.step()
        assert engine.rest_s() in (None, 0.02)
    assert sorted(output.request_id for output in outputs) == ["a", "b"]
    assert {output.ended.detail for output in outputs} == {"n2 is gone: its connection ended"}
    assert_nothing_left(engine)


def answers_despite(
    engine: Engine, requests: list[Request], trouble: Callable[[int, Engine], Engine]
) -> dict[str, Ended]:
    """Turn until all is answered; before turn n `trouble` does something, and says which engine goes on."""
    for request in requests:
        engine.submit(request)
    ended: dict[str, Ended] = {}
    for number in range(2000):
        engine = trouble(number, engine)
        ended |= {each.request_id: each.ended for each in turn(engine) if each.ended}
        if engine.is_idle:
            break
    assert_nothing_left(engine)
    return ended


def tokens_of(ended: dict[str, Ended]) -> dict[str, list[int]]:
    return {name: done.request.output_ids for name, done in ended.items()}


def test_a_stage_that_lost_its_blocks_makes_the_first_compute_everything_again(whole: Whole) -> None:
    def another_process(number: int, engine: Engine) -> Engine:
        if number in (7, 60, 61):
            old = engine.stages.stages[-1]
            engine.stages.stages[-1] = LaterStage(old.runner, old._sampler, old._clock, old._limits)
            for layer in old.runner.decoder._layers.values():
                layer.pages[0].fill_(float("nan"))
        return engine

    expected = answers(engine_of(whole), mixed_requests())
    found = tokens_of(answers_despite(pipeline_of(whole, [1, 2]), mixed_requests(), another_process))
    assert found == {name: tokens for name, (tokens, _) in expected.items()}


def test_a_step_that_was_given_up_and_comes_late_writes_into_nobodys_blocks(whole: Whole) -> None:
    engine = pipeline_of(whole, [2], num_blocks=8)
    engine.stages.lose = {2}
    engine.submit(request_of("a", SHARED, max_tokens=30))
    for _ in range(6):
        turn(engine)
    [late] = [sent for sent in engine.stages.sent if sent[0].step == 2]
    engine.abort("a")
    engine.abandon_all()
    [expected] = answers(engine_of(whole), [request_of("b", SHARED[::-1])]).values()
    engine.submit(request_of("b", SHARED[::-1]))
    outputs = []
    for number in range(100):
        outputs += turn(engine)
        if number == 6:
            engine.stages.run(*late)
    ended = [output.ended for output in outputs if output.ended]
    assert ended[-1].request.output_ids == expected[0]
    assert_nothing_left(engine)


def test_results_of_another_run_or_of_no_step_are_nothing(whole: Whole) -> None:
    engine = pipeline_of(whole, [2])
    engine.submit(request_of("a", SHARED, max_tokens=2))
    while not engine.stages.results:
        engine.step()
    result, *tensors = engine.stages.results[0]
    assert engine.take(type(result)(run="another", step=result.step), *tensors) == []
    assert engine.take(type(result)(run=result.run, step=999), *tensors) == []
    assert engine.num_under_way == 1
    wrong = type(result)(run=result.run, step=result.step, token_ids=[3, 4])
    assert engine.take(wrong, *tensors) == [] and engine.num_under_way == 0
    assert len(run_to_end(engine)["a"].request.output_ids) == 2


def test_requests_whose_experts_are_missing_at_a_later_stage_fail_and_the_others_do_not(whole: Whole) -> None:
    def port(name: str):
        own = placed_experts(whole, name)
        return Lacking(own, layer=3, expert=5) if name == "n2" else own

    def served(engine: Engine) -> dict[str, str]:
        for request in mixed_requests():
            engine.submit(request)
        return {name: done.finish_reason for name, done in run_to_end(engine).items()}

    staged = served(pipeline_of(whole, [2], port=port))
    assert staged == served(engine_of(whole, port=Lacking(placed_experts(whole), layer=3, expert=5)))
    assert set(staged.values()) == {"error", "length"}


def test_a_later_stage_that_waits_for_experts_holds_the_step_and_nothing_is_charged_twice(
    whole: Whole,
) -> None:
    class Patient(Lacking):
        is_here = False

        def may_be_replaced(self) -> bool:
            return not self.is_here

        def run(self, layer, x, expert_ids, out, beside=None):
            if self.is_here:
                self._from_step = 10**9
            return super().run(layer, x, expert_ids, out, beside)

    late = Patient(placed_experts(whole, "n2"), layer=3, expert=5)
    engine = pipeline_of(whole, [2], port=lambda name: late if name == "n2" else placed_experts(whole, name))
    for request in mixed_requests(6):
        engine.submit(request)
    for _ in range(30):
        turn(engine)
    late.is_here = True
    ended = run_to_end(engine)
    plain = pipeline_of(whole, [2])
    for request in mixed_requests(6):
        plain.submit(request)
    for name, done in run_to_end(plain).items():
        assert ended[name].request.output_ids == done.request.output_ids
        assert ended[name].slots == done.slots


def test_the_bill_says_where_every_layer_was_served(whole: Whole) -> None:
    one, staged = engine_of(whole), pipeline_of(whole, [1, 3])
    bills = []
    for engine in (one, staged):
        engine.submit(request_of("r", SHARED, max_tokens=5))
        bills.append(run_to_end(engine)["r"])
    assert bills[0].bill == {
        **bills[1].bill,
        "exact_here": pytest.approx(1.0),
        "exact_elsewhere": pytest.approx(0),
    }
    [slots] = bills[0].slots.values()
    assert bills[1].slots == {"n1": slots // 3, "n2": slots // 3, "n3": slots // 3}


def test_a_request_that_fails_in_several_stages_is_told_of_the_first(whole: Whole) -> None:
    layers = {"n1": 0, "n2": 3}
    ports = {
        name: Lacking(placed_experts(whole, name), layer=layer, expert=5) for name, layer in layers.items()
    }
    engine = pipeline_of(whole, [2], port=ports.__getitem__)
    engine.submit(request_of("r", list(range(60))))
    assert run_to_end(engine)["r"].detail == ports["n1"].why


# Changes of placement.


def test_another_engine_takes_over_what_a_pipeline_began_and_the_other_way_round(whole: Whole) -> None:
    ways = {
        9: lambda: engine_of(whole),
        20: lambda: pipeline_of(whole, [1, 3]),
        31: lambda: pipeline_of(whole, [3]),
    }

    def change(number: int, engine: Engine) -> Engine:
        if number not in ways:
            return engine
        following = ways[number]()
        assert following.take_over(engine) == []
        engine.close()
        return following

    expected = answers(engine_of(whole), mixed_requests())
    found = tokens_of(answers_despite(pipeline_of(whole, [2]), mixed_requests(), change))
    assert found == {name: tokens for name, (tokens, _) in expected.items()}


def test_a_placement_that_leaves_the_stages_as_they_are_keeps_their_blocks(whole: Whole) -> None:
    def change(number: int, engine: Engine) -> Engine:
        if number == 9:
            engine.switch_stages(engine.runner, placed_experts(whole), engine.stages)
        return engine

    expected = answers(engine_of(whole), mixed_requests())
    ended = answers_despite(pipeline_of(whole, [2]), mixed_requests(), change)
    assert tokens_of(ended) == {name: tokens for name, (tokens, _) in expected.items()}
    assert not any(done.request.num_preemptions for done in ended.values())


def test_a_first_stage_has_the_first_layers_and_not_the_last(whole: Whole) -> None:
    engine = engine_of(whole)
    with pytest.raises(ValueError, match=r"found \[0, 4\)"):
        PipelineEngine(engine.scheduler, engine.runner, pipeline_of(whole, [2]).stages, engine.clock, 1.0)
