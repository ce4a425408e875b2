"""Replay of recorded gate choices through a cluster of decode homes: the runtime's own routers, a cost model of steps.

A discrete-event simulation. Requests arrive, are prefilled in turn, are routed when their first token is there, and
decode one token per step of their home, all of a home's requests in one batch. What a step costs depends on how many
distinct experts its tokens chose in each layer. Knows no model and no clock.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from edge_runtime.routing.base import HomeLoad, Question, Router
from testbed.routing.traces import Traces


class Costs(NamedTuple):
    """Seconds of a step: `fixed` + `per_row` * rows + layers * `per_expert` * (`base_experts` + distinct experts of a layer).

    prefill_per_token  seconds of a prompt's token on a prefill worker
    remote_call        seconds that a layer waits for experts that are elsewhere
    """

    fixed: float = 1.0e-3
    per_row: float = 1.0e-4
    per_expert: float = 1.0e-5
    base_experts: float = 14.3
    prefill_per_token: float = 1.0e-4
    remote_call: float = 0.0


class Arrival(NamedTuple):
    """One request of a workload: which trace it follows, and when it comes."""

    trace: int
    at_s: float


@dataclass
class Home:
    """A decode home at work."""

    name: str
    running: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    is_stepping: bool = False

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)


class Outcome(NamedTuple):
    """What one replay measured; latencies in milliseconds.

    distinct        experts that a layer of a decode step touches, mean over steps
    saved           share of distinct experts that steps touch less than batches of their size drawn from the whole mix
    gap             the same as a share of what batches of one domain save; each row counts once, so that many small
                    batches are not taken for good ones
    batch           rows of a decode step, mean
    remote_calls    experts per decoded token, over all layers, that its home does not hold
    imbalance       largest number of requests in flight at a home over the mean one, averaged over decisions
    """

    tpot_p50: float
    tpot_p99: float
    ttft_p50: float
    distinct: float
    batch: float
    remote_calls: float
    imbalance: float
    saved: float = 0.0
    gap: float = 0.0


class Curves(NamedTuple):
    """Distinct experts of a layer in batches of 0, 1, 2 ... rows: drawn from the whole mix, and from one domain of it."""

    mixed: np.ndarray
    alone: np.ndarray


def curves(
    traces: Traces, shares: np.ndarray, most: int, rng: np.random.Generator, *, trials: int = 200
) -> Curves:
    """What batches of up to `most` rows touch. shares: weight of each domain."""
    _, L, E = traces.prefill.shape
    weights = shares * np.array([(traces.domain == index).any() for index in range(len(traces.domains))])
    weights = weights / weights.sum()
    members = [np.flatnonzero(traces.domain == index) for index in range(len(traces.domains))]
    found = np.zeros((2, most + 1))
    for _ in range(trials):
        for kind in (0, 1):
            domains = rng.choice(len(members), size=most, p=weights)
            used = np.zeros((L, E), dtype=bool)
            for row in range(most):
                choices = traces.choices[rng.choice(members[domains[row if kind == 0 else 0]])]
                used[np.arange(L)[:, None], choices[rng.integers(len(choices))]] = True
                found[kind, row + 1] += used.sum() / L
    return Curves(*(found / trials))


def _bits(used: np.ndarray) -> int:
    """A table [L, E] of flags as the masks of `Traces` are."""
    return int.from_bytes(np.packbits(used.ravel(), bitorder="little").tobytes(), "little")


def arrivals(
    traces: Traces, count: int, rate: float, rng: np.random.Generator, shares: Callable[[float], np.ndarray]
) -> list[Arrival]:
    """Poisson arrivals. shares(progress from 0 to 1) gives the weight of each domain at that point of the workload."""
    members = [np.flatnonzero(traces.domain == index) for index in range(len(traces.domains))]
    at, found = 0.0, []
    for number in range(count):
        at += rng.exponential(1.0 / rate)
        weights = shares(number / count) * np.array([len(each) > 0 for each in members])
        domain = rng.choice(len(members), p=weights / weights.sum())
        found.append(Arrival(int(rng.choice(members[domain])), at))
    return found


def replay(
    traces: Traces,
    workload: Sequence[Arrival],
    router: Router,
    signatures: np.ndarray,
    costs: Costs,
    *,
    num_homes: int,
    num_workers: int = 1,
    slots: int = 16,
    model_layers: int = 0,
    resident: np.ndarray | None = None,
    warm_up: float = 0.2,
    compared: Sequence[Curves] = (),
) -> Outcome:
    """Run a workload to its end.

    signatures    [N, dim] of all traces, as the router wants them
    model_layers  layers that costs count for, where fewer were recorded
    resident      [H, L, E] what each home holds
    warm_up       share of the requests, and of the steps, that is left out at the beginning
    compared      what steps are held against, in the first half of the workload and in the second; of 0 to `slots` rows
    """
    _, L, E = traces.prefill.shape
    layers = model_layers or L
    homes = [Home(f"n{index}") for index in range(num_homes)]
    masks = traces.masks
    absent_of = [] if resident is None else [_bits(~held) for held in resident]
    of_layer = [((1 << E) - 1) << (layer * E) for layer in range(L)]
    workers = [0.0] * num_workers
    progress = [0] * len(workload)  # tokens decoded
    first_s = [0.0] * len(workload)
    tpot: list[float] = []
    ttft: list[float] = []
    steps: list[tuple[float, int, float]] = []  # distinct experts, rows, when
    remote = tokens = 0
    imbalance: list[float] = []
    events: list[tuple[float, int, str, int]] = []  # time, order, what, of whom
    order = 0
    for number, arrival in enumerate(workload):
        worker = min(range(num_workers), key=workers.__getitem__)
        begin = max(workers[worker], arrival.at_s)
        workers[worker] = begin + costs.prefill_per_token * float(traces.prompt_tokens[arrival.trace])
        heapq.heappush(events, (workers[worker], order, "prefilled", number))
        order += 1
    counts_from = int(warm_up * len(workload))

    def step(place: int, now: float) -> None:
        nonlocal order, remote, tokens
        home = homes[place]
        while home.waiting and len(home.running) < slots:
            home.running.append(home.waiting.popleft())
        if not home.running:
            home.is_stepping = False
            return
        rows = [masks[workload[number].trace][progress[number]] for number in home.running]
        used = 0
        for row in rows:
            used |= row
        distinct = used.bit_count() / L
        wait = 0.0
        if absent_of:
            absent = absent_of[place]
            remote += sum((row & absent).bit_count() for row in rows) * layers // L
            tokens += len(rows)
            if costs.remote_call:
                called = sum(bool(used & absent & layer) for layer in of_layer)
                wait = costs.remote_call * layers * called / L
        took = (
            costs.fixed
            + costs.per_row * len(home.running)
            + layers * costs.per_expert * (costs.base_experts + distinct)
            + wait
        )
        steps.append((distinct, len(home.running), now))
        home.is_stepping = True
        heapq.heappush(events, (now + took, order, "stepped", place))
        order += 1

    while events:
        now, _, what, who = heapq.heappop(events)
        if what == "prefilled":
            arrival = workload[who]
            first_s[who] = now
            if who >= counts_from:
                ttft.append(now - arrival.at_s)
            loads = [HomeLoad(home.name, home.in_flight, slots) for home in homes]
            domain = traces.domains[traces.domain[arrival.trace]]
            place = router.choose(Question(signatures[arrival.trace], domain), loads)
            homes[place].waiting.append(who)
            router.took(homes[place].name, signatures[arrival.trace])
            mean = sum(home.in_flight for home in homes) / num_homes
            if who >= counts_from:
                imbalance.append(max(home.in_flight for home in homes) / max(mean, 1.0))
            if not homes[place].is_stepping:
                step(place, now)
            continue
        home = homes[who]
        still = []
        for number in home.running:
            progress[number] += 1
            if progress[number] < len(masks[workload[number].trace]):
                still.append(number)
            elif number >= counts_from:
                tpot.append((now - first_s[number]) / progress[number])
        home.running = still
        step(who, now)
    late = np.array(steps[int(warm_up * len(steps)) :])
    distinct, rows = late[:, 0], late[:, 1].astype(int)
    saved = gap = 0.0
    if compared:
        is_second = late[:, 2] >= workload[len(workload) // 2].at_s
        mixed, alone = (
            np.where(is_second, compared[-1][kind][rows], compared[0][kind][rows]) for kind in (0, 1)
        )
        saved = 1.0 - float((rows * distinct).sum() / (rows * mixed).sum())
        gap = float((rows * (mixed - distinct)).sum() / max((rows * (mixed - alone)).sum(), 1e-9))
    p50, p99 = np.percentile(tpot, [50, 99]) * 1e3
    return Outcome(
        float(p50),
        float(p99),
        float(np.median(ttft)) * 1e3,
        float(distinct.mean()),
        float(rows.mean()),
        remote / max(tokens, 1),
        float(np.mean(imbalance)),
        saved,
        gap,
    )
