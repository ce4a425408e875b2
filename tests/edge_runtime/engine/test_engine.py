"""A real engine on the demo model: the same tokens however the work is cut, and every end takes only its own request."""

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from edge_runtime.clock import SystemClock
from edge_runtime.engine.engine import Engine, EngineThread, Output
from edge_runtime.engine.scheduler import Scheduler
from edge_runtime.model.sampling import Sampler
from tests.support.engines import (
    Lacking,
    answers_of,
    assert_nothing_left,
    engine_of,
    pipeline_of,
    placed_experts,
    request_of,
    run_to_end,
)
from tests.support.tiny_models import Reference

SOON_S = 10.0
CLOSE = 1e-3  # two best logits nearer than this may change places
EOS = 2


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Prompts of unequal length; `d` begins as `c` does, for three blocks."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(10, 8000, (200,), generator=generator).tolist()
    return {"a": ids[:1], "b": ids[1:24], "c": ids[30:100], "d": ids[30:78] + ids[120:150], "e": ids[150:167]}


@pytest.fixture(scope="module")
def expected(whole, prompts) -> dict[str, list[int]]:
    """Each prompt alone, 16 tokens."""
    return {name: answers_of(engine_of(whole), {name: ids})[name] for name, ids in prompts.items()}


def test_greedy_tokens_are_those_of_transformers(demo_model, whole):
    reference = Reference(demo_model)
    tokenizer_ids = {"x": [17, 250, 991, 4000, 7, 55], "y": list(range(300, 340)), "z": [5000]}
    ours = answers_of(engine_of(whole), tokenizer_ids, max_tokens=20)
    for name, prompt in tokenizer_ids.items():
        logits = reference.logits(prompt + ours[name])  # one pass: row i must choose token i + 1
        for position, token in enumerate(ours[name]):
            row = logits[len(prompt) - 1 + position]
            best, second = row.topk(2).values.tolist()
            if best - second < CLOSE:
                break
            assert token == int(row.argmax()), f"{name}: token {position}"


def test_a_batch_gives_each_request_the_tokens_it_has_alone(whole, prompts, expected):
    assert answers_of(engine_of(whole), prompts) == expected


@pytest.mark.parametrize("max_rows", [1, 3, 7, 16])
def test_prompts_computed_in_small_chunks_give_the_same_tokens(whole, prompts, expected, max_rows):
    engine = engine_of(whole, max_rows=max_rows, max_running=min(max_rows, 5))
    assert answers_of(engine, prompts) == expected


def test_the_logits_of_a_chunked_prompt_are_the_same_bits(whole, prompts):
    def first_logits(max_rows: int) -> torch.Tensor:
        engine = engine_of(whole, max_rows=max_rows, max_running=1)
        engine.submit(request_of("c", prompts["c"]))
        while True:
            plan = engine.scheduler.plan_step(0.0)
            assert plan is not None
            result = engine.runner.run(plan)
            if result.logits is not None:
                return result.logits.clone()
            engine.scheduler.complete(plan, {}, 0.0)

    whole_prompt = first_logits(512)
    for max_rows in (5, 16, 33):
        assert torch.equal(first_logits(max_rows), whole_prompt)


def test_requests_that_give_way_for_want_of_blocks_get_the_same_tokens(whole, prompts, expected):
    prompts = {name: prompts[name] for name in "abe"}
    engine = engine_of(whole, num_blocks=8)
    crowded = answers_of(engine, prompts, max_tokens=60)
    for name, ids in prompts.items():
        assert crowded[name] == answers_of(engine_of(whole), {name: ids}, max_tokens=60)[name]
        assert crowded[name][:16] == expected[name]
    assert engine.scheduler.num_preemptions > 0, "the case did not come up"


def test_a_prefix_found_in_the_cache_changes_no_token(whole, prompts, expected):
    engine = engine_of(whole)
    assert answers_of(engine, {"c": prompts["c"]}) == {"c": expected["c"]}
    engine.submit(request_of("d", prompts["d"]))
    [ended] = run_to_end(engine).values()
    assert ended.request.output_ids == expected["d"]
    assert ended.request.num_cached == 48


def test_an_engine_refuses_to_run_a_part_of_the_model(whole):
    engine, part = engine_of(whole), pipeline_of(whole, [3]).runner
    with pytest.raises(ValueError, match=r"runs all 6 layers, not \[0, 3\)"):
        Engine(engine.scheduler, part, engine.sampler, engine.clock)


# How a request ends.


def test_an_answer_ends_with_length_at_its_own_limit(whole, prompts, expected):
    engine = engine_of(whole)
    engine.submit(request_of("b", prompts["b"], max_tokens=5))
    ended = run_to_end(engine)["b"]
    assert (ended.finish_reason, ended.request.output_ids) == ("length", expected["b"][:5])
    assert ended.bill["exact_here"] == 1.0
    rows, layers, columns = len(prompts["b"]) + 4, 6, 4
    assert ended.slots == {"n1": rows * layers * columns}


def test_an_answer_ends_with_length_at_the_end_of_the_context(whole, prompts, expected):
    engine = engine_of(whole, context_tokens=32)
    engine.submit(request_of("b", prompts["b"], max_tokens=500))
    ended = run_to_end(engine)["b"]
    assert (ended.finish_reason, ended.request.output_ids) == ("length", expected["b"][:9])


def test_an_answer_ends_with_the_models_end_token_unless_that_is_ignored(whole, prompts, expected):
    token = expected["b"][3]
    until = expected["b"].index(token) + 1
    engine = engine_of(whole, eos_ids=(token,))
    engine.submit(request_of("stops", prompts["b"], ignore_eos=False))
    engine.submit(request_of("goes on", prompts["b"]))
    ended = run_to_end(engine)
    assert (ended["stops"].finish_reason, ended["stops"].request.output_ids) == (
        "stop",
        expected["b"][:until],
    )
    assert (ended["goes on"].finish_reason, ended["goes on"].request.output_ids) == ("length", expected["b"])


def test_an_answer_ends_with_a_stop_id_even_where_end_tokens_are_ignored(whole, prompts, expected):
    token = expected["c"][2]
    engine = engine_of(whole)
    engine.submit(request_of("c", prompts["c"], stop_token_ids=(token,)))
    ended = run_to_end(engine)["c"]
    until = expected["c"].index(token) + 1
    assert (ended.finish_reason, ended.request.output_ids) == ("stop", expected["c"][:until])


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_the_blocks_at_once_and_leaves_the_others_alone(whole, prompts, expected, steps):
    engine = engine_of(whole, max_rows=32)
    engine.submit(request_of("c", prompts["c"]))
    engine.submit(request_of("b", prompts["b"]))
    for _ in range(steps):
        engine.step()
    before = engine.scheduler.free_blocks
    held = len(engine.scheduler.get("c").block_table)
    output = engine.abort("c")
    assert output is not None and output.ended is not None and output.ended.finish_reason == "abort"
    assert engine.scheduler.free_blocks == before + held
    assert engine.abort("c") is None
    assert run_to_end(engine)["b"].request.output_ids == expected["b"]


def test_an_abort_while_it_waits_or_after_giving_way_leaves_no_account(whole, prompts):
    engine = engine_of(whole, num_blocks=8, max_running=3)
    for name, ids in prompts.items():
        engine.submit(request_of(name, ids, max_tokens=40))
    while engine.scheduler.num_preemptions == 0:
        engine.step()
    for name in prompts:
        engine.abort(name)
    assert_nothing_left(engine)


def test_every_token_is_told_once_and_the_last_with_the_end(whole, prompts, expected):
    seen: list[Output] = []
    engine = engine_of(whole)
    for name, ids in prompts.items():
        engine.submit(request_of(name, ids, logprobs=2))
    run_to_end(engine, seen)
    for name in prompts:
        mine = [output for output in seen if output.request_id == name]
        assert [output.token_id for output in mine] == expected[name]
        assert [output.ended is not None for output in mine] == [False] * 15 + [True]
        assert all(output.logprobs.top_ids[0] == output.token_id for output in mine)


# What fails.


@pytest.mark.parametrize("from_step", [1, 6])
def test_missing_experts_fail_only_the_requests_that_need_them(whole, prompts, expected, from_step):
    def ends(port: object) -> dict:
        engine = engine_of(whole, port=port)
        for name, ids in prompts.items():
            engine.submit(request_of(name, ids))
        return run_to_end(engine)

    outcomes = set()
    for expert in range(0, 32, 5):
        port = Lacking(placed_experts(whole), layer=2, expert=expert, from_step=from_step)
        ended = ends(port)
        for name, end in ended.items():
            outcomes.add(end.finish_reason)
            tokens = end.request.output_ids
            if end.finish_reason == "error":
                assert end.detail == port.why and not end.is_users_fault
                assert tokens == expected[name][: len(tokens)]
            else:
                assert (end.finish_reason, tokens) == ("length", expected[name])
    assert outcomes == {"error", "length"}, "the case did not come up"


def test_what_a_failed_request_computed_is_not_found_by_the_next(whole, prompts, expected):
    engine = engine_of(whole)
    engine.runner.port = Lacking(engine.runner.port, layer=1, expert=0)
    engine.submit(request_of("c", prompts["c"]))
    assert run_to_end(engine)["c"].finish_reason == "error"
    engine.runner.port = placed_experts(whole)
    engine.submit(request_of("again", prompts["c"]))
    ended = run_to_end(engine)["again"]
    assert (ended.request.num_cached, ended.request.output_ids) == (0, expected["c"])


class Spoiling(Sampler):
    """Samples as ever, from logits of which one row has turned to no number."""

    def __init__(self, sampler: Sampler, request_id: str, value: float) -> None:
        super().__init__(sampler.vocab_size)
        self._request_id, self._value = request_id, value

    def sample(self, logits, requests):
        for row, request in enumerate(requests):
            if request.request_id == self._request_id and len(request.output_ids) == 3:
                logits[row, 77] = self._value
        return super().sample(logits, requests)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_only_their_request(whole, prompts, expected, value):
    engine = engine_of(whole)
    engine.sampler = Spoiling(engine.sampler, "c", value)
    for name, ids in prompts.items():
        engine.submit(request_of(name, ids))
    ended = run_to_end(engine)
    failed = ended.pop("c")
    assert failed.finish_reason == "error" and "not finite" in failed.detail
    assert failed.request.output_ids == expected["c"][:3]
    assert {name: end.request.output_ids for name, end in ended.items()} == {
        name: tokens for name, tokens in expected.items() if name != "c"
    }


# The thread.


class Listener:
    """Takes what an EngineThread says, and waits for ends."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.died = threading.Event()
        self._changed = threading.Condition()

    def outputs_ready(self, outputs: list[Output]) -> None:
        with self._changed:
            self.outputs += outputs
            self._changed.notify_all()

    def tokens(self, request_id: str) -> list[int]:
        return [o.token_id for o in self.outputs if o.request_id == request_id and o.token_id is not None]

    def end(self, request_id: str):
        def found():
            return next((o.ended for o in self.outputs if o.request_id == request_id and o.ended), None)

        with self._changed:
            assert self._changed.wait_for(found, SOON_S), f"{request_id} did not end"
            return found()

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.tokens(request_id)) >= count, SOON_S)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def thread(whole, listener) -> Iterator[EngineThread]:
    engine = engine_of(whole, clock=SystemClock())
    thread = EngineThread(engine, listener.outputs_ready, listener.died.set)
    thread.start()
    yield thread
    thread.stop()
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_requests_of_other_threads_are_answered_as_alone(thread, listener, prompts, expected):
    submitters = [
        threading.Thread(target=thread.submit, args=(request_of(name, ids),)) for name, ids in prompts.items()
    ]
    for submitter in submitters:
        submitter.start()
    for submitter in submitters:
        submitter.join()
    for name in prompts:
        assert listener.end(name).finish_reason == "length"
        assert listener.tokens(name) == expected[name]


def test_a_thread_that_sleeps_keeps_nothing_of_its_last_order(thread):
    class Share:
        """Large."""

    known, gone = Share(), threading.Event()
    weakref.finalize(known, gone.set)
    thread.call(lambda engine, known=known: None)
    del known
    assert gone.wait(SOON_S)


def test_a_request_that_cannot_run_comes_back_as_its_users_fault(thread, listener):
    thread.submit(request_of("empty", []))
    ended = listener.end("empty")
    assert ended.finish_reason == "error" and ended.is_users_fault and "empty" in ended.detail
    assert not ended.bill and not ended.slots


def test_a_draining_engine_refuses_and_that_is_not_the_users_fault(thread, listener, prompts):
    thread.call(lambda engine: engine.scheduler.drain())
    thread.submit(request_of("late", prompts["a"]))
    ended = listener.end("late")
    assert ended.finish_reason == "error" and not ended.is_users_fault and "stopping" in ended.detail


def test_an_abort_from_another_thread_ends_the_request_in_the_middle(thread, listener, prompts, expected):
    thread.submit(request_of("b", prompts["b"], max_tokens=400))
    listener.wait_for_tokens("b", 2)
    thread.abort("b")
    ended = listener.end("b")
    assert ended.finish_reason == "abort" and 2 <= len(ended.request.output_ids) < 400
    left: list[bool] = []
    done = threading.Event()
    thread.call(lambda engine: (left.append(engine.is_idle), done.set()))
    assert done.wait(SOON_S) and left == [True]
    assert_nothing_left(thread.engine)
    thread.abort("nobody")  # unknown: nothing happens
    thread.submit(request_of("e", prompts["e"]))
    assert listener.end("e").request.output_ids == expected["e"]


def test_a_thread_that_was_told_to_stop_ends_between_two_steps(thread, listener, prompts):
    thread.submit(request_of("b", prompts["b"], max_tokens=400))
    listener.wait_for_tokens("b", 1)
    thread.stop()
    thread.join(SOON_S)
    assert not thread.is_alive() and thread.fault is None and not listener.died.is_set()
    thread.engine.scheduler.check()


def test_an_idle_engine_sleeps(whole, listener):
    class Counting(Scheduler):
        plans = 0

        def plan_step(self, now):
            Counting.plans += 1
            return super().plan_step(now)

    engine = engine_of(whole)
    engine.scheduler.__class__ = Counting
    thread = EngineThread(engine, listener.outputs_ready, listener.died.set)
    thread.start()
    passed = threading.Event()
    thread.call(lambda engine: passed.set())
    assert passed.wait(SOON_S)
    thread.stop()
    thread.join(SOON_S)
    assert Counting.plans <= 1  # one at most after the order, and no loop


def test_a_fault_of_ours_ends_the_thread_and_is_kept_and_told(thread, listener, caplog):
    def wrong(engine: Engine) -> None:
        raise ZeroDivisionError("ours")

    thread.call(wrong)
    assert listener.died.wait(SOON_S)
    thread.join(SOON_S)
    assert isinstance(thread.fault, ZeroDivisionError)
    assert "fault of its own" in caplog.text


def test_a_fault_in_whoever_takes_the_outputs_is_kept_too(whole, prompts):
    def refuse(outputs: list[Output]) -> None:
        raise RuntimeError("no room")

    died = threading.Event()
    thread = EngineThread(engine_of(whole), refuse, died.set)
    thread.start()
    thread.submit(request_of("a", prompts["a"]))
    assert died.wait(SOON_S)
    thread.join(SOON_S)
    assert isinstance(thread.fault, RuntimeError)
