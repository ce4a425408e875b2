"""The scheduler: what a step holds, how a request ends, and who gives way when blocks run out."""

import sys

import pytest

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.engine.plan import Finished, StepPlan
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings, share_rows
from edge_runtime.errors import ConfigError, Refusal, RequestError

EOS = 2


def scheduler_of(num_blocks: int = 64, **changes: object) -> Scheduler:
    options = {"vocab_size": 1000, "context_tokens": 512, "eos_ids": (EOS,), "max_rows": 64, "max_running": 8}
    settings = SchedulerSettings(**(options | changes))  # type: ignore[arg-type]
    return Scheduler(settings, BlockPool(num_blocks), model_hash="model", tokenizer_hash="tokenizer")


def request_of(name: str, prompt: int | list[int], arrival_s: float = 0.0, **options: object) -> Request:
    """A prompt of given ids, or of so many ids that no other name's prompt begins with."""
    ids = (
        [10 + (sum(map(ord, name)) * 31 + i) % 900 for i in range(prompt)]
        if isinstance(prompt, int)
        else prompt
    )
    identity = {key: options.pop(key) for key in ("salt", "exactness", "output_ids") if key in options}
    return Request(name, ids, SamplingParams(**options), arrival_s, **identity)  # type: ignore[arg-type]


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    assert plan.num_rows == sum(piece.count for piece in plan.slices)
    return [(piece.request.request_id, piece.start, piece.count, piece.samples) for piece in plan.slices]


def step(scheduler: Scheduler, now: float = 0.0, token: int = 5) -> list[Finished]:
    """Plan, compute (every sampled token is `token`) and complete one step."""
    plan = scheduler.plan_step(now)
    assert plan is not None
    scheduler.check()
    sampled = {piece.request.request_id: token for piece in plan.slices if piece.samples}
    finished = scheduler.complete(plan, sampled, now)
    scheduler.check()
    return finished


def run_to_end(scheduler: Scheduler, now: float = 0.0) -> list[Finished]:
    finished = []
    while scheduler.num_running or scheduler.num_waiting:
        finished += step(scheduler, now)
    assert scheduler.is_idle and scheduler.free_blocks == scheduler.pool.num_blocks
    return finished


# What a step holds.


def test_a_prompt_is_computed_at_once_and_then_token_by_token():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, max_tokens=3))
    assert shape(scheduler.plan_step(0.0)) == [("a", 0, 20, True)]
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, max_tokens=3))
    step(scheduler)
    assert shape(scheduler.plan_step(0.0)) == [("a", 20, 1, True)]


def test_a_long_prompt_is_computed_in_chunks_of_whole_blocks_within_the_budget():
    scheduler = scheduler_of(max_rows=40)
    scheduler.add(request_of("a", 90))
    shapes = []
    for _ in range(3):
        plan = scheduler.plan_step(0.0)
        shapes += shape(plan)
        assert plan is not None
        scheduler.complete(plan, {"a": 5} if plan.slices[0].samples else {}, 0.0)
    assert shapes == [("a", 0, 32, False), ("a", 32, 32, False), ("a", 64, 26, True)]


def test_decode_rows_come_first_and_prefill_takes_the_rest():
    scheduler = scheduler_of(max_rows=33)
    scheduler.add(request_of("a", 8))
    step(scheduler)
    scheduler.add(request_of("b", 100))
    assert shape(scheduler.plan_step(0.0)) == [("a", 8, 1, True), ("b", 0, 32, False)]


def test_nothing_to_do_is_no_plan():
    scheduler = scheduler_of()
    assert scheduler.plan_step(0.0) is None and scheduler.is_idle
    scheduler.add(request_of("a", 8))
    scheduler.plan_step(0.0)
    assert scheduler.plan_step(0.0) is None and not scheduler.is_idle


def test_a_budget_smaller_than_a_block_still_gets_through():
    scheduler = scheduler_of(max_rows=3, max_running=3)
    for name in "abc":
        scheduler.add(request_of(name, 40, max_tokens=4))
    assert {done.reason for done in run_to_end(scheduler)} == {"length"}


@pytest.mark.parametrize(
    ("needs", "rows", "shares"),
    [
        ([], 10, []),
        ([100], 10, [10]),
        ([3], 10, [3]),
        ([100, 4, 2], 10, [5, 3, 2]),  # half to the oldest, the rest to the shortest first
        ([100, 4, 2], 20, [14, 4, 2]),  # what the short ones leave goes back to the oldest
        ([2, 100], 10, [2, 8]),  # what the oldest leaves goes to the others
        ([100, 5, 5], 10, [5, 5, 0]),  # older first among equals
        ([500, 500], 100, [64, 36]),  # halves of plenty are whole blocks
        ([9, 9], 1, [1, 0]),
    ],
)
def test_prefill_rows_are_shared_between_the_oldest_and_the_shortest(needs, rows, shares):
    assert share_rows(needs, rows) == shares


def test_a_seat_and_a_version_tell_the_runner_when_to_copy_a_block_table():
    scheduler = scheduler_of()
    a, b = request_of("a", 16, max_tokens=40), request_of("b", 16, max_tokens=40)
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler)
    assert {a.seat, b.seat} == {0, 1} and a.version != b.version
    versions = [a.version]
    for _ in range(32):
        step(scheduler)
        versions.append(a.version)
    assert len(set(versions)) == 3  # two blocks more in 32 tokens
    seat, seen = a.seat, set(versions)
    scheduler.abort("a")
    c = request_of("c", 16)
    scheduler.add(c)
    step(scheduler)
    assert c.seat == seat and c.version not in seen


# How a request ends.


@pytest.mark.parametrize(
    ("options", "token", "reason", "length"),
    [
        ({"max_tokens": 3}, 5, "length", 3),
        ({"max_tokens": 3}, EOS, "stop", 1),
        ({"max_tokens": 3, "ignore_eos": True}, EOS, "length", 3),
        ({"max_tokens": 3, "stop_token_ids": (5,)}, 5, "stop", 1),
        ({"max_tokens": 3, "ignore_eos": True, "stop_token_ids": (EOS,)}, EOS, "stop", 1),
        ({"max_tokens": 1}, EOS, "stop", 1),
        ({"max_tokens": 1000}, 5, "length", 512 - 20),  # the context ends it
    ],
)
def test_a_request_ends_with_its_reason(options, token, reason, length):
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, **options))
    finished = []
    while not finished:
        finished = step(scheduler, token=token)
    [done] = finished
    assert (done.request_id, done.reason, done.error) == ("a", reason, "")
    assert (done.prompt_tokens, done.completion_tokens) == (20, length)
    assert done.request.output_ids == [token] * length
    assert scheduler.is_idle and scheduler.free_blocks == 64


def test_the_first_token_is_timed():
    scheduler = scheduler_of(max_rows=16)
    request = request_of("a", 20, arrival_s=1.0)
    scheduler.add(request)
    for now in (2.0, 3.0, 4.0):
        step(scheduler, now)
    assert (request.first_planned_s, request.first_token_s) == (2.0, 3.0)


def test_a_failed_request_ends_with_its_sentence_and_the_others_go_on():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request_of(name, 20))
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    [done] = scheduler.complete(plan, {"b": 7}, 0.0, failed={"a": "node n3 lost expert 7 of layer 2"})
    scheduler.check()
    assert (done.request_id, done.reason, done.error) == ("a", "error", "node n3 lost expert 7 of layer 2")
    assert shape(scheduler.plan_step(0.0)) == [("b", 20, 1, True)]


def test_what_a_failed_request_cached_is_forgotten():
    scheduler = scheduler_of(max_rows=32)
    scheduler.add(request_of("a", list(range(10, 70))))
    step(scheduler)
    assert scheduler.pool.num_cached == 2
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    scheduler.complete(plan, {}, 0.0, failed={"a": "not finite"})
    assert scheduler.pool.num_cached == 0
    scheduler.check()


def test_an_abort_frees_blocks_and_seat_at_once_while_no_step_runs():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20))
    step(scheduler)
    done = scheduler.abort("a")
    assert done is not None and done.reason == "abort"
    assert scheduler.free_blocks == 64 and scheduler.is_idle
    assert scheduler.abort("a") is None and scheduler.abort("never seen") is None
    scheduler.check()


def test_a_waiting_request_can_be_aborted():
    scheduler = scheduler_of(max_running=1)
    for name in "abc":
        scheduler.add(request_of(name, 20))
    step(scheduler)
    assert scheduler.abort("b") is not None
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    scheduler.check()


def test_blocks_of_a_request_aborted_during_a_step_are_nobody_elses_until_the_step_is_done():
    scheduler = scheduler_of(num_blocks=2)
    scheduler.add(request_of("a", 20, max_tokens=5))
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    scheduler.abort("a")
    scheduler.check()
    scheduler.add(request_of("b", 20, max_tokens=5))
    assert scheduler.free_blocks == 0 and scheduler.plan_step(0.0) is None
    assert scheduler.complete(plan, {"a": 5}, 0.0) == []  # the row was computed and is dropped
    scheduler.check()
    assert scheduler.free_blocks == 2
    assert shape(scheduler.plan_step(0.0)) == [("b", 0, 20, True)]


def test_the_id_of_a_request_that_a_step_still_holds_is_not_free():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20))
    scheduler.plan_step(0.0)
    scheduler.abort("a")
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        scheduler.add(request_of("a", 20))


def test_a_stop_string_found_by_others_ends_a_request():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20))
    step(scheduler)
    done = scheduler.finish("a", "stop")
    assert done is not None and done.reason == "stop" and done.request.finish_reason == "stop"


def test_an_abandoned_step_is_planned_again():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request_of(name, 20, max_tokens=2))
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    scheduler.abort("b")
    scheduler.abandon(plan)
    scheduler.check()
    assert shape(scheduler.plan_step(0.0)) == [("a", 0, 20, True)]


def test_several_plans_can_be_in_flight_each_request_in_one():
    scheduler = scheduler_of(max_rows=16)
    scheduler.add(request_of("a", 16, max_tokens=2))
    first = scheduler.plan_step(0.0)
    scheduler.add(request_of("b", 16, max_tokens=2))
    second = scheduler.plan_step(0.0)
    assert first is not None and second is not None
    assert (shape(first), shape(second)) == ([("a", 0, 16, True)], [("b", 0, 16, True)])
    scheduler.check()
    scheduler.complete(second, {"b": 5}, 0.0)
    scheduler.complete(first, {"a": 5}, 0.0)
    scheduler.check()
    assert shape(scheduler.plan_step(0.0)) == [("a", 16, 1, True), ("b", 16, 1, True)]


def test_a_request_that_moves_here_goes_on_where_it_was():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, max_tokens=4, output_ids=[7, 8]))
    assert shape(scheduler.plan_step(0.0)) == [("a", 0, 22, True)]
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, max_tokens=4, output_ids=[7, 8]))
    [done] = run_to_end(scheduler)
    assert done.request.output_ids == [7, 8, 5, 5]


def test_draining_refuses_new_requests_and_serves_those_it_has():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", 20, max_tokens=2))
    scheduler.drain()
    with pytest.raises(Refusal) as refusal:
        scheduler.add(request_of("b", 20))
    assert refusal.value.reason == "draining"
    assert [done.request_id for done in run_to_end(scheduler)] == ["a"]


# What is refused.


def test_a_request_that_could_never_fit_alone_is_refused_with_numbers():
    scheduler = scheduler_of(num_blocks=4)
    scheduler.add(request_of("fits", 40, max_tokens=25))  # the 65th token needs no block
    with pytest.raises(RequestError, match=r"up to 66 tokens need 5 KV blocks.*has 4 in all.*to 65 tokens"):
        scheduler.add(request_of("large", 40, max_tokens=26))
    run_to_end(scheduler)


def test_a_prompt_longer_than_the_context_is_refused_with_numbers():
    with pytest.raises(RequestError, match="prompt has 512 tokens but the context holds 512"):
        scheduler_of().add(request_of("a", 512))


def test_wrong_options_and_known_ids_are_refused():
    scheduler = scheduler_of()
    with pytest.raises(RequestError, match="top_p is 2"):
        scheduler.add(request_of("a", 5, top_p=2))
    scheduler.add(request_of("a", 5))
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        scheduler.add(request_of("a", 5))
    with pytest.raises(RequestError, match="2 tokens of its answer, which ends after 2"):
        scheduler.add(request_of("b", 5, max_tokens=2, output_ids=[1, 1]))
    assert scheduler.num_waiting == 1


def test_a_full_queue_is_refused_as_busy():
    scheduler = scheduler_of(max_waiting=2)
    scheduler.add(request_of("a", 5))
    scheduler.add(request_of("b", 5))
    with pytest.raises(Refusal, match="2 requests wait already") as refusal:
        scheduler.add(request_of("c", 5))
    assert refusal.value.reason == "busy" and refusal.value.retry_after_s


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_running": 65}, "max_running is 65; allowed is 1 to max_rows, which is 64"),
        ({"max_running": 0}, "max_running is 0"),
        ({"context_tokens": 1}, "context_tokens is 1"),
        ({"max_waiting": 0}, "max_waiting is 0"),
        ({"ageing_rows_per_s": 0.0}, "ageing_rows_per_s is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        scheduler_of(**changes)


# Prefix reuse.


def test_a_prefix_seen_before_is_not_computed_again():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [*range(100, 140)], max_tokens=1))
    run_to_end(scheduler)
    b = request_of("b", [*range(100, 135), 7, 8], max_tokens=1)
    scheduler.add(b)
    assert shape(scheduler.plan_step(0.0)) == [("b", 32, 5, True)]
    assert b.num_cached == scheduler.num_cached_tokens == 32
    assert scheduler.pool.num_hits == 2


def test_the_last_token_is_computed_even_if_the_whole_prompt_is_cached():
    scheduler = scheduler_of()
    for name in "ab":
        scheduler.add(request_of(name, [*range(100, 132)], max_tokens=1))
        plan = scheduler.plan_step(0.0)
        assert shape(plan) == [(name, 0, 32, True)] if name == "a" else [(name, 16, 16, True)]
        assert plan is not None
        scheduler.complete(plan, {name: 5}, 0.0)
        scheduler.check()


@pytest.mark.parametrize("other", [{"salt": "theirs"}, {"exactness": "K=2"}])
def test_blocks_of_another_salt_or_exactness_are_never_reused(other):
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [*range(100, 140)], max_tokens=1))
    run_to_end(scheduler)
    scheduler.add(request_of("b", [*range(100, 140)], max_tokens=1, **other))
    assert shape(scheduler.plan_step(0.0)) == [("b", 0, 40, True)]


def test_a_block_is_reused_only_once_its_step_is_completed_and_not_computed_twice_meanwhile():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [*range(100, 140)]))
    plan = scheduler.plan_step(0.0)
    assert plan is not None
    scheduler.add(request_of("b", [*range(100, 140)]))
    assert scheduler.plan_step(0.0) is None
    scheduler.complete(plan, {"a": 5}, 0.0)
    assert shape(scheduler.plan_step(0.0)) == [("a", 40, 1, True), ("b", 32, 8, True)]


def test_a_twin_goes_on_alone_when_the_one_that_computed_for_it_is_gone():
    scheduler = scheduler_of(max_rows=32)
    for name in "ab":
        scheduler.add(request_of(name, [*range(100, 140)]))
    plan = scheduler.plan_step(0.0)
    assert plan is not None and shape(plan) == [("a", 0, 32, False)]
    scheduler.complete(plan, {}, 0.0, failed={"a": "lost"})
    assert shape(scheduler.plan_step(0.0)) == [("b", 0, 32, False)]


def test_requests_with_one_prefix_compute_it_once_even_if_they_come_together():
    scheduler = scheduler_of(max_rows=32)
    for name in "abcd":
        scheduler.add(request_of(name, [*range(100, 196), ord(name)], max_tokens=1))
    rows = 0
    while scheduler.num_running or scheduler.num_waiting:
        plan = scheduler.plan_step(0.0)
        assert plan is not None
        rows += plan.num_rows
        scheduler.complete(plan, {piece.request.request_id: 5 for piece in plan.slices if piece.samples}, 0.0)
        scheduler.check()
    assert rows == 97 + 3


def test_the_answer_can_be_reused_as_a_prefix_too():
    scheduler = scheduler_of()
    scheduler.add(request_of("a", [*range(100, 110)], max_tokens=30))
    run_to_end(scheduler)
    scheduler.add(request_of("b", [*range(100, 110), *[5] * 30], max_tokens=1))
    assert shape(scheduler.plan_step(0.0)) == [("b", 32, 8, True)]


# Blocks run out.


def test_the_youngest_gives_way_and_the_oldest_never():
    scheduler = scheduler_of(num_blocks=6)
    names = "abc"
    for index, name in enumerate(names):
        scheduler.add(request_of(name, 16, arrival_s=index / 10, max_tokens=60))
    requests = {name: scheduler.get(name) for name in names}
    finished = run_to_end(scheduler, now=1.0)
    assert finished[0].request_id == "a" and len(finished) == 3
    assert all(done.request.output_ids == [5] * 60 for done in finished)
    assert requests["a"].num_preemptions == 0 and requests["c"].num_preemptions > 0
    assert scheduler.num_preemptions == sum(request.num_preemptions for request in requests.values())


def test_an_older_prompt_takes_blocks_from_a_younger_answer_planned_in_the_same_step():
    scheduler = scheduler_of(num_blocks=12, max_rows=4, max_running=3)
    for name, arrival_s in (("y1", 0.5), ("y2", 0.6)):
        scheduler.add(request_of(name, 15, arrival_s=arrival_s, max_tokens=120))
    while scheduler.num_waiting or any(len(r.tokens) - r.num_computed > 1 for r in scheduler._running):
        step(scheduler, now=1.0)
    old = request_of("old", 128, arrival_s=0.0, max_tokens=8)
    scheduler.add(old)  # fits when it is seated; but at two rows per step the answers outgrow it
    while scheduler.num_preemptions == 0:
        plan = scheduler.plan_step(1.0)
        scheduler.check()
        planned = shape(plan)
        assert plan is not None
        scheduler.complete(plan, {piece.request.request_id: 5 for piece in plan.slices if piece.samples}, 1.0)
    assert [name for name, *_ in planned] == ["y1", "old"]
    finished = run_to_end(scheduler, now=1.0)
    assert old.num_preemptions == 0
    assert {done.request_id: len(done.request.output_ids) for done in finished} == {
        "old": 8,
        "y1": 120,
        "y2": 120,
    }


def test_a_preempted_request_finds_its_blocks_again_if_nobody_took_them():
    scheduler = scheduler_of(num_blocks=6)
    for index, name in enumerate("ab"):
        scheduler.add(request_of(name, 30, arrival_s=index / 10, max_tokens=20))
    b = scheduler.get("b")
    run_to_end(scheduler, now=1.0)
    assert b is not None and (b.num_preemptions, b.num_cached) == (1, 32)


@pytest.mark.parametrize(("now", "passes"), [(0.99, True), (1.0, False)])
def test_the_oldest_without_blocks_lets_the_shortest_pass_only_until_it_is_due(now, passes):
    scheduler = scheduler_of(num_blocks=8, ageing_rows_per_s=100.0)
    scheduler.add(request_of("first", 5, arrival_s=0.0, max_tokens=1))
    scheduler.add(request_of("holder", 60, arrival_s=0.0, max_tokens=60))
    step(scheduler)
    scheduler.add(request_of("long", 100, arrival_s=0.0, max_tokens=1))  # due at 1.0, and does not fit now
    scheduler.add(request_of("short", 8, arrival_s=0.9, max_tokens=1))
    assert ("short" in [name for name, *_ in shape(scheduler.plan_step(now))]) == passes


def test_seats_go_in_turn_to_the_oldest_and_to_the_shortest():
    scheduler = scheduler_of(max_running=1)
    for index, length in enumerate([30, 20, 25, 5, 10]):
        scheduler.add(request_of(f"{length}", length, arrival_s=index / 10, max_tokens=1))
    assert [done.request_id for done in run_to_end(scheduler, now=1.0)] == ["30", "5", "20", "10", "25"]


def test_when_it_is_the_shortest_ones_turn_a_due_request_without_blocks_does_not_hold_it_up():
    scheduler = scheduler_of(num_blocks=8, ageing_rows_per_s=1000.0)
    scheduler.add(request_of("holder", 60, arrival_s=0.0, max_tokens=60))
    step(scheduler)
    for name, length in (("long", 100), ("short", 8), ("other", 9)):
        scheduler.add(request_of(name, length, arrival_s=0.0, max_tokens=60 if length < 20 else 1))
    plan = scheduler.plan_step(5.0)
    assert [name for name, *_ in shape(plan)] == ["holder", "short"]  # and then it is the long one's turn


# What it costs.


def calls_of_a_decode_step(scheduler: Scheduler) -> int:
    """Python function calls in one plan and its completion; 9.6 us for 16 requests when last measured."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan = scheduler.plan_step(0.0)
        assert plan is not None
        scheduler.complete(plan, {piece.request.request_id: 5 for piece in plan.slices}, 0.0)
    finally:
        sys.setprofile(None)
    return calls


def test_a_decode_step_does_as_much_work_at_the_end_of_a_long_answer_as_at_its_start():
    scheduler = scheduler_of(num_blocks=1024, context_tokens=1024, max_running=16)
    for index in range(16):
        scheduler.add(request_of(f"r{index}", 100, max_tokens=900))
    while any(len(request.tokens) - request.num_computed > 1 for request in scheduler._running) or (
        scheduler.num_waiting
    ):
        step(scheduler)
    at_start = max(calls_of_a_decode_step(scheduler) for _ in range(16))
    for _ in range(700):
        step(scheduler)
    assert max(calls_of_a_decode_step(scheduler) for _ in range(16)) == at_start
