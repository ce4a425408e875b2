"""A change of placement between two steps: the same tokens, one bill over both, nothing left in what was before."""

from collections.abc import Callable

import pytest

from edge_runtime.engine.engine import Engine
from tests.support.engines import (
    Whole,
    answers_of,
    assert_nothing_left,
    engine_of,
    placed_experts,
    request_of,
    run_to_end,
)

PROMPTS = {"a": [17], "b": list(range(300, 340)), "c": list(range(40, 160)), "d": [5, 900, 41]}


@pytest.fixture(scope="module")
def expected(whole) -> dict[str, list[int]]:
    return answers_of(engine_of(whole), PROMPTS)


def started(whole: Whole, steps: int, **options: object) -> tuple[Engine, dict[str, list[int]]]:
    engine = engine_of(whole, max_rows=32, **options)
    for name, prompt_ids in PROMPTS.items():
        engine.submit(request_of(name, prompt_ids))
    told: dict[str, list[int]] = {}
    for _ in range(steps):
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output.token_id)
    return engine, told


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
@pytest.mark.parametrize("num_blocks", [40, 128])
def test_another_engine_goes_on_with_the_same_tokens_and_tells_none_twice(whole, expected, steps, num_blocks):
    old, told = started(whole, steps)
    new = engine_of(whole, num_blocks=num_blocks, max_rows=48)
    assert new.take_over(old) == []
    seen: list = []
    ended = run_to_end(new, seen)
    for output in seen:
        if output.token_id is not None:
            told.setdefault(output.request_id, []).append(output.token_id)
    assert told == expected
    for name, end in ended.items():
        assert end.request.output_ids == expected[name]
        assert end.bill["exact_here"] == pytest.approx(1.0)
    assert_nothing_left(new)


def test_what_cannot_go_on_ends_with_its_reason_and_the_others_go_on(whole, expected):
    old, _ = started(whole, 3)
    new = engine_of(whole, num_blocks=5, max_rows=48)  # 80 tokens: too few for `c`
    outputs = new.take_over(old)
    assert [output.request_id for output in outputs] == ["c"]
    assert outputs[0].ended.finish_reason == "error" and outputs[0].ended.detail
    ended = run_to_end(new)
    assert {name: end.request.output_ids for name, end in ended.items()} == {
        name: tokens for name, tokens in expected.items() if name != "c"
    }


def test_an_engine_that_others_followed_shows_no_block_to_anybody(whole, expected):
    old = engine_of(whole, max_rows=48)
    assert answers_of(old, PROMPTS) == expected and old.scheduler.pool.num_cached > 0
    old.close()
    assert old.is_closed and old.scheduler.pool.num_cached == 0


def switch_twice(whole: Whole) -> Callable[[Engine], None]:
    def switch(engine: Engine) -> None:
        engine.switch_port(engine.runner, placed_experts(whole, "n1", epoch=2))
        engine.switch_port(engine.runner, placed_experts(whole, "n1", epoch=3))

    return switch


def test_another_placement_under_the_same_engine_changes_no_token_and_adds_to_one_bill(whole, expected):
    engine, told = started(whole, 5)
    switch_twice(whole)(engine)
    seen: list = []
    ended = run_to_end(engine, seen)
    for output in seen:
        if output.token_id is not None:
            told.setdefault(output.request_id, []).append(output.token_id)
    assert told == expected
    undisturbed, _ = started(whole, 0)
    whole_bill = run_to_end(undisturbed)
    for name, end in ended.items():
        assert end.slots == whole_bill[name].slots
        assert end.bill == pytest.approx(whole_bill[name].bill)
