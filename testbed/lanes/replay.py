"""Replay of requests of mixed K through decode homes: the runtime's own routing, lanes and schedulers, times from a cost model.

A discrete-event simulation. A request is routed when it arrives, by the rules of the coordinator; each home has the
scheduler of the engine, and its steps take what `costs.py` says. Knows no model, no clock and no tensor.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from edge_runtime.cache.block_pool import BlockPool, blocks_for
from edge_runtime.elastic.tiers import over_serving
from edge_runtime.engine.plan import StepPlan
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.routing.base import HomeLoad, Question
from edge_runtime.routing.baselines import LeastPressure
from edge_runtime.routing.lane_book import LaneBook
from edge_runtime.routing.lanes import LaneSettings
from testbed.lanes.costs import StepCosts

TICK_S = 0.1  # how often a coordinator looks at its lanes
VOCABULARY = 32000


class Arrival(NamedTuple):
    """One request of a workload. tier: sub-experts of its tokens."""

    at_s: float
    tier: int
    prompt_tokens: int
    answer_tokens: int


class Outcome(NamedTuple):
    """What one replay measured.

    ttft_ms     [requests] from arrival to the first token, of those that count; tier likewise
    tokens_per_s  of all answers, from the first arrival to the last token
    over_served sub-experts that ran beyond those asked, by those asked
    crossings, moves  of the lanes
    """

    ttft_ms: np.ndarray
    tier: np.ndarray
    tokens_per_s: float
    over_served: float
    crossings: int
    moves: int

    def p(self, percent: float) -> float:
        return float(np.percentile(self.ttft_ms, percent))


def workload(
    count: int,
    rate: float,
    tiers: Sequence[int],
    rng: np.random.Generator,
    *,
    shares: Sequence[float] | None = None,
) -> list[Arrival]:
    """Poisson arrivals at `rate` per second; tiers in these shares; lengths log-normal around 96 and 48 tokens."""
    at = np.cumsum(rng.exponential(1.0 / rate, count))
    drawn = rng.choice(np.array(tiers), size=count, p=shares)
    prompts = np.clip(rng.lognormal(np.log(96), 0.6, count), 8, 512).astype(int)
    answers = np.clip(rng.lognormal(np.log(48), 0.6, count), 4, 256).astype(int)
    columns = (at, drawn, prompts, answers)
    return [Arrival(float(a), int(k), int(p), int(n)) for a, k, p, n in zip(*columns, strict=True)]


class _Home:
    """A home at work: the engine's scheduler, and the plan that is under way."""

    def __init__(self, name: str, slots: int, max_rows: int) -> None:
        self.name, self.slots = name, slots
        blocks = slots * blocks_for(512 + 256)
        settings = SchedulerSettings(
            vocab_size=VOCABULARY,
            context_tokens=1024,
            max_rows=max_rows,
            max_running=slots,
            max_waiting=10**6,
        )
        self.scheduler = Scheduler(settings, BlockPool(blocks), model_hash="", tokenizer_hash="")
        self.plan: StepPlan | None = None
        self.in_flight = 0

    @property
    def load(self) -> HomeLoad:
        return HomeLoad(self.name, self.in_flight, self.slots)


def replay(
    arrivals: Sequence[Arrival],
    costs: StepCosts,
    *,
    num_homes: int,
    lanes: LaneSettings | None,
    slots: int = 16,
    max_rows: int = 256,
    batch_max: bool = False,
    warm_up: float = 0.2,
) -> Outcome:
    """Run a workload to its end.

    lanes      None: every home takes every tier
    batch_max  a step runs at its highest K
    warm_up    share of the requests that does not count, at the beginning
    """
    homes = [_Home(f"n{index}", slots, max_rows) for index in range(num_homes)]
    book, router = (None if lanes is None else LaneBook(lanes)), LeastPressure()
    of_name = {home.name: home for home in homes}
    full = costs.geometry.full_tier
    events: list[tuple[float, int, str, int]] = []
    for number, arrival in enumerate(arrivals):
        heapq.heappush(events, (arrival.at_s, number, "arrives", number))
    order, next_tick_s, last_s = len(arrivals), 0.0, 0.0
    first_s: dict[str, float] = {}
    asked, ran = 0, 0
    waits = len(arrivals)

    def begin(home: _Home, now: float) -> None:
        nonlocal order, asked, ran
        home.plan = plan = home.scheduler.plan_step(now)
        if plan is None:
            return
        rows: Counter[int] = Counter()
        for piece in plan.slices:
            rows[piece.request.tier or full] += piece.count
        samples = sum(piece.samples for piece in plan.slices)
        took = costs.seconds(list(rows), list(rows.values()), samples, batch_max=batch_max)
        own = sum(tier * count for tier, count in rows.items())
        asked += own
        ran += max(rows) * plan.num_rows if batch_max else own
        heapq.heappush(events, (now + took, order, "stepped", int(home.name[1:])))
        order += 1

    while waits:
        now, _, what, who = heapq.heappop(events)
        while book is not None and next_tick_s <= now:
            book.follow([home.load for home in homes], next_tick_s)
            next_tick_s += TICK_S
        if what == "arrives":
            arrival = arrivals[who]
            tier = 0 if arrival.tier == full else arrival.tier
            loads = [home.load for home in homes]
            if book is not None:
                loads = book.allowed(tier, loads)
            home = of_name[loads[router.choose(Question(), loads)].node]
            if book is not None:
                book.sent(tier, home.name)
            ids = [3 + (who * 7919 + place * 31) % (VOCABULARY - 3) for place in range(arrival.prompt_tokens)]
            params = SamplingParams(max_tokens=arrival.answer_tokens, seed=0, ignore_eos=True)
            home.scheduler.add(Request(str(who), ids, params, now, tier=tier))
            home.in_flight += 1
        else:
            home, last_s = homes[who], now
            assert home.plan is not None, "a step that was begun has a plan"
            tokens = {piece.request.request_id: 2 for piece in home.plan.slices if piece.samples}
            for name in tokens:
                first_s.setdefault(name, now)
            ended = home.scheduler.complete(home.plan, tokens, now)
            home.plan = None
            home.in_flight -= len(ended)
            waits -= len(ended)
        if home.plan is None:
            begin(home, now)
    counted = range(int(warm_up * len(arrivals)), len(arrivals))
    ttft = np.array([1e3 * (first_s[str(number)] - arrivals[number].at_s) for number in counted])
    num_tokens = sum(arrival.answer_tokens for arrival in arrivals)
    return Outcome(
        ttft,
        np.array([arrivals[number].tier for number in counted]),
        num_tokens / max(last_s - arrivals[0].at_s, 1e-9),
        over_serving([asked], [ran]),
        sum(book.num_crossed.values()) if book is not None else 0,
        book.lanes.moves if book is not None and book.lanes is not None else 0,
    )


def capacity(
    costs: StepCosts, tiers: Sequence[int], num_homes: int, *, slots: int = 16, batch_max: bool = False
) -> float:
    """Requests per second that the homes answer when there is always one more, without lanes."""
    arrivals = [
        arrival._replace(at_s=0.0)
        for arrival in workload(40 * slots * num_homes // 4, 1.0, tiers, np.random.default_rng(7))
    ]
    found = replay(
        arrivals, costs, num_homes=num_homes, lanes=None, slots=slots, batch_max=batch_max, warm_up=0.0
    )
    return found.tokens_per_s * len(arrivals) / sum(arrival.answer_tokens for arrival in arrivals)
