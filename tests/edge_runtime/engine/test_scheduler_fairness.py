"""Neither long prompts starve short ones nor the reverse: measured in simulated time.

A step costs 2 ms and 0.1 ms per row, so one thousand rows take about a tenth of a second.
"""

from collections.abc import Iterator

import pytest

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.clock import ManualClock
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings

ROWS = 256
LONG = 8000


def step_s(num_rows: int) -> float:
    return 0.002 + 0.0001 * num_rows


def scheduler_of(num_blocks: int = 4096, max_running: int = 16) -> Scheduler:
    settings = SchedulerSettings(
        vocab_size=10_000,
        context_tokens=8192,
        max_rows=ROWS,
        max_running=max_running,
        ageing_rows_per_s=5000.0,
    )
    return Scheduler(settings, BlockPool(num_blocks), model_hash="model", tokenizer_hash="tokenizer")


def prompt(name: str, length: int, arrival_s: float, max_tokens: int = 16) -> Request:
    start = sum(map(ord, name)) * 101 % 9000
    return Request(
        name, [(start + i) % 10_000 for i in range(length)], SamplingParams(max_tokens=max_tokens), arrival_s
    )


def ttft_s(scheduler: Scheduler, arrivals: Iterator[Request], until_s: float = 60.0) -> dict[str, float]:
    """Serve `arrivals` (in order of time) and return each request's time to first token."""
    clock = ManualClock()
    first: dict[str, float] = {}
    coming = next(arrivals, None)
    while clock.now() < until_s:
        while coming is not None and coming.arrival_s <= clock.now():
            scheduler.add(coming)
            coming = next(arrivals, None)
        plan = scheduler.plan_step(clock.now())
        if plan is None:
            if coming is None:
                break
            clock.advance(coming.arrival_s - clock.now())
            continue
        clock.advance(step_s(plan.num_rows))
        sampled = [piece.request for piece in plan.slices if piece.samples]
        scheduler.complete(plan, {request.request_id: 5 for request in sampled}, clock.now())
        for request in sampled:
            first.setdefault(request.request_id, clock.now() - request.arrival_s)
    scheduler.check()
    return first


ALONE_S = ttft_s(scheduler_of(), iter([prompt("long", LONG, 0.0)]))["long"]


def test_the_long_prompt_alone_is_the_measure():
    assert pytest.approx(LONG * 0.0001 + -(-LONG // ROWS) * 0.002, rel=0.01) == ALONE_S


@pytest.mark.parametrize("long_first", [True, False])
def test_one_8k_prompt_and_50_short_ones_all_start_in_bounded_time(long_first):
    short = [prompt(f"s{i}", 60 + i, 0.0) for i in range(50)]
    long = prompt("long", LONG, 0.0)
    first = ttft_s(scheduler_of(), iter([long, *short] if long_first else [*short, long]))
    assert len(first) == 51
    # Half of each step is the long one's while it is in prefill: twice its time alone, and the seats' turn-over.
    assert first["long"] < 2.5 * ALONE_S
    # 50 short prompts are 4225 rows; with half of each step they need about 0.9 s, seats included.
    assert max(first[f"s{i}"] for i in range(50)) < 1.3
    assert sorted(first[f"s{i}"] for i in range(50))[25] < 0.6


def test_a_short_prompt_that_comes_into_a_long_prefill_does_not_wait_for_its_end():
    first = ttft_s(scheduler_of(), iter([prompt("long", LONG, 0.0), prompt("short", 100, 0.1)]))
    assert first["short"] < 3 * step_s(ROWS)
    assert first["long"] < ALONE_S + 0.1


def test_a_stream_of_short_prompts_that_fills_the_engine_does_not_starve_a_long_one():
    def arrivals() -> Iterator[Request]:
        yield prompt("long", LONG, 0.0)
        for i in range(2000):  # 10000 rows per second, more than the engine can do
            yield prompt(f"s{i}", 100, 0.001 + i * 0.01)

    first = ttft_s(scheduler_of(), arrivals(), until_s=15.0)
    assert first["long"] < 2.2 * ALONE_S


def test_a_stream_of_long_prompts_does_not_starve_short_ones():
    def arrivals() -> Iterator[Request]:
        for i in range(20):
            yield prompt(f"long{i}", LONG, i * 0.4)
            yield prompt(f"short{i}", 60, i * 0.4 + 0.2)

    first = ttft_s(scheduler_of(max_running=32, num_blocks=32 * 512), arrivals())
    assert max(first[f"short{i}"] for i in range(20)) < 4 * step_s(ROWS)
    assert max(first[f"long{i}"] for i in range(20)) < 20 * ALONE_S  # the last of 20 waits for 19 at most


def test_a_long_prompt_gets_its_blocks_although_short_ones_keep_coming():
    def arrivals() -> Iterator[Request]:
        for i in range(16):
            yield prompt(f"first{i}", 400, 0.0, max_tokens=50)
        yield prompt("long", LONG, 0.05)
        for i in range(3000):
            yield prompt(f"s{i}", 100, 0.06 + i * 0.004, max_tokens=50)

    first = ttft_s(scheduler_of(num_blocks=520), arrivals(), until_s=12.0)
    # Due after 1.65 s; then the answers that run end, and it is computed almost alone.
    assert first["long"] < 1.65 + 0.5 + 1.2 * ALONE_S
