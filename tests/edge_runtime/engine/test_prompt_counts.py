"""Whatever happens to a prompt's blocks, its counts are those of computing it alone, once, at one go."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.runner import HostedExperts
from edge_runtime.model.moe import Beside, Missing
from edge_runtime.routing.signature import check_conservation
from tests.support.engines import (
    Whole,
    engine_of,
    pipeline_of,
    placed_experts,
    run_to_end,
    turn,
)

IDS = torch.randint(10, 8000, (400,), generator=torch.Generator().manual_seed(9)).tolist()


@pytest.fixture(scope="module")
def cold(whole):
    """Counts of a prompt computed alone in an empty cache; each prompt once."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def counts(prompt: Sequence[int]) -> np.ndarray:
        if tuple(prompt) not in known:
            engine = engine_of(whole, max_rows=256)
            asked = request("cold", prompt, 1)
            engine.submit(asked)
            run_to_end(engine)
            known[tuple(prompt)] = asked.prompt_counts
        return known[tuple(prompt)]

    return counts


def built(whole: Whole, cuts: Sequence[int], port: HostedExperts | None = None, **options: int) -> Engine:
    """One engine over all layers, or the first stage of several."""
    if not cuts:
        return engine_of(whole, port=port, **options)
    return pipeline_of(whole, cuts, port=None if port is None else lambda name: port, **options)


def request(name: str, prompt: Sequence[int], max_tokens: int, output_ids: Sequence[int] = ()) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, params, 0.0, output_ids=output_ids, wants_counts=True)


class Recording:
    """An ExpertPort that notes what every layer's rows chose."""

    def __init__(self, port: HostedExperts) -> None:
        self.host_names = port.host_names
        self.chosen: list[tuple[int, np.ndarray]] = []
        self._port = port

    def begin_step(self) -> None:
        self._port.begin_step()

    def may_be_replaced(self) -> bool:
        return False

    def served_by(self) -> object:
        return self._port.served_by()

    def add_here(self, *arguments: object) -> None:
        """Never all in one: `run` is to see it."""

    def run(
        self, layer: int, x: torch.Tensor, expert_ids: torch.Tensor, out: torch.Tensor, beside: Beside = None
    ) -> Missing | None:
        self.chosen.append((layer, expert_ids.numpy().copy()))
        return self._port.run(layer, x, expert_ids, out, beside)


class Faltering(Recording):
    """In certain steps the experts of one layer do not come, but may soon: the step is tried again."""

    def __init__(self, port: HostedExperts, layer: int, steps: Sequence[int]) -> None:
        super().__init__(port)
        self.host_names = [*port.host_names, "elsewhere"]
        self.times_failed = 0
        self._layer, self._steps, self._step = layer, set(steps), 0

    def begin_step(self) -> None:
        super().begin_step()
        self._step += 1

    def may_be_replaced(self) -> bool:
        return self._step in self._steps

    def run(self, layer: int, x: torch.Tensor, *arguments: object) -> Missing | None:
        missing = super().run(layer, x, *arguments)
        if layer == self._layer and self._step in self._steps:
            self.times_failed += 1
            return Missing(torch.arange(arguments[0].numel()), "nobody holds them now")
        return missing


def test_counts_are_of_what_the_gate_chose_for_prompt_tokens_alone(whole):
    port = Recording(placed_experts(whole))
    engine = engine_of(whole, port=port, max_rows=32)
    asked = request("a", IDS[:75], 20)
    engine.submit(asked)
    run_to_end(engine)
    expected = np.zeros((6, 32), dtype=np.int64)
    for layer, ids in port.chosen:
        if len(ids) > 1:  # a chunk of the prompt; a decode step has one row
            expected[layer] += np.bincount(ids.ravel(), minlength=32)
    assert (asked.prompt_counts == expected).all() and asked.prompt_counts.dtype == np.int16
    check_conservation(asked.prompt_counts, 75, [4] * 6)


prompts = st.tuples(st.integers(0, 2), st.integers(1, 70)).map(lambda two: IDS[100 * two[0] :][: two[1]])
asked = st.tuples(prompts, st.integers(1, 24), st.sampled_from(["new", "moved", "goes on"]))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(asked, min_size=2, max_size=6),
    st.sampled_from([16, 23, 48]),
    st.integers(9, 20),
    st.sampled_from([(), (3,), (1, 4)]),
)
def test_hits_evictions_chunks_preemptions_and_moves_change_no_count(
    whole, cold, wanted, max_rows, num_blocks, cuts
):
    """Prompts begin alike; some contain an earlier answer; some come with a part of their answer."""
    engine = built(whole, cuts, num_blocks=num_blocks, max_rows=max_rows, max_running=4, context_tokens=144)
    done: list[Request] = []
    for index, (prompt, max_tokens, kind) in enumerate(wanted):
        output_ids: list[int] = []
        earlier = done[index // 2] if done else None
        if kind == "goes on" and earlier is not None:
            prompt = (earlier.tokens + prompt)[:110]
        elif kind == "moved" and earlier is not None:
            prompt, output_ids = earlier.prompt_ids, earlier.output_ids
            max_tokens += len(output_ids)
        each = request(str(index), prompt, max_tokens, output_ids)
        engine.submit(each)
        for _ in range(index % 3 * 4):
            turn(engine)
            engine.scheduler.check()
        done.append(each)
    run_to_end(engine)
    for each in done:
        assert (each.prompt_counts == cold(each.prompt_ids)).all(), each
        check_conservation(each.prompt_counts, len(each.prompt_ids), [4] * 6)


def test_a_preempted_request_is_counted_as_if_it_had_not_been(whole, cold):
    engine = engine_of(whole, num_blocks=11, max_rows=40, max_running=4, context_tokens=144)
    for name, start in (("a", 0), ("b", 100), ("c", 200)):
        engine.submit(request(name, IDS[start : start + 20], 50))
    everybody = engine.scheduler.requests()
    run_to_end(engine)
    assert engine.scheduler.num_preemptions > 0
    for each in everybody:
        assert (each.prompt_counts == cold(each.prompt_ids)).all()


@pytest.mark.parametrize("cuts", [(), (2,), (4,), (1, 3)])
def test_a_step_that_is_tried_again_counts_once(whole, cold, cuts):
    port = Faltering(placed_experts(whole), layer=4, steps=[2, 3, 6, 9])
    engine = built(whole, cuts, port, max_rows=24)
    first, second = request("a", IDS[:61], 6), request("b", IDS[:37] + IDS[300:321], 6)
    for each in (first, second):
        engine.submit(each)
    run_to_end(engine)
    assert port.times_failed
    for each in (first, second):
        assert (each.prompt_counts == cold(each.prompt_ids)).all()


def test_steps_that_stages_have_computed_and_the_first_has_not_heard_of_count_once(whole, cold):
    engine = built(whole, (2, 4), max_rows=24)
    requests = [request("a", IDS[:61], 6), request("b", IDS[:37] + IDS[300:321], 6)]
    for each in requests:
        engine.submit(each)
    number = 0
    while not engine.is_idle:
        turn(engine)
        number += 1
        if number % 4 == 0:  # results are on their way: they never come
            engine.stages.results.clear()
            engine.abandon_all()
    for each in requests:
        assert (each.prompt_counts == cold(each.prompt_ids)).all()


def test_a_prompt_that_goes_on_after_an_answer_counts_decoded_tokens_as_its_own(whole, cold):
    engine = engine_of(whole)
    first = request("a", IDS[:40], 30)
    engine.submit(first)
    run_to_end(engine)
    second = request("b", first.tokens + IDS[200:210], 4)
    engine.submit(second)
    run_to_end(engine)
    assert second.num_cached == 64  # four blocks, of which the last two hold decoded tokens
    assert (second.prompt_counts == cold(second.prompt_ids)).all()


def counts_wanted(engine: Engine) -> list[Request]:
    return [each for each in engine.scheduler.requests() if each.wants_counts]


def test_an_engine_that_takes_over_owes_what_is_still_to_be_counted(whole, cold):
    engine, other = engine_of(whole, max_rows=16), engine_of(whole, max_rows=64)
    counted, uncounted = request("a", IDS[:10], 8), request("b", IDS[100:170], 8)
    engine.submit(counted)
    engine.step()
    engine.submit(uncounted)
    engine.step()
    assert counts_wanted(engine) == [uncounted]
    other.take_over(engine)
    ended = run_to_end(other)
    for each in ended.values():
        assert (each.request.prompt_counts == cold(each.request.prompt_ids)).all()
