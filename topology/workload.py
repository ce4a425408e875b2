"""What a plan is to be good at, and how good decode groups are at it together. Knows predictions, not how they come about."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topology.node_plan import GroupPlan
from topology.sharing import Turn, shared_seconds
from topology.speeds import Machines
from topology.step_time import DEFAULT_CONTEXT_TOKENS, GroupPrediction

LATENCY, THROUGHPUT = "latency", "throughput"
OBJECTIVES = (LATENCY, THROUGHPUT)

WAKES = 3.0  # threads that a message wakes where it comes in, and on its way out: socket, worker, socket

Predict = Callable[[GroupPlan, int], GroupPrediction]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How many requests decode at once, and what counts."""

    batches: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """(requests at once in the whole cluster, how much that counts)."""
    objective: str = LATENCY
    """`latency`: seconds between two tokens of a request. `throughput`: seconds for each token of all requests."""
    context_tokens: float = DEFAULT_CONTEXT_TOKENS
    """Tokens of KV that a row attends to, on average."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that its most requests take at once."""
        return int(max(requests for requests, _ in self.batches) * self.context_tokens)

    def seconds(
        self, predict: Predict, groups: Sequence[GroupPlan], machines: Machines | None = None
    ) -> float:
        """What groups take, weighed over the batches; less is better, infinite if no group can serve.

        Requests are shared out over as many of the groups as serve them best, in proportion to their rates.

        machines  where some of them share processors, that counts too
        """
        total = sum(weight for _, weight in self.batches)
        return sum(
            weight / total * self._at(predict, groups, requests, machines)
            for requests, weight in self.batches
        )

    def _at(
        self, predict: Predict, groups: Sequence[GroupPlan], requests: int, machines: Machines | None
    ) -> float:
        if not groups:
            return float("inf")
        alone = {group: period_s(predict, group, 1) for group in groups}
        fastest_first = sorted(groups, key=lambda group: alone[group])
        best = float("inf")
        for num_used in growing_counts(min(len(groups), requests)):
            used = fastest_first[:num_used]
            counts = _shares(requests, [1 / alone[group] for group in used])
            pairs = [(group, count) for group, count in zip(used, counts, strict=True) if count]
            periods = group_seconds(predict, pairs, machines)
            served = [count for _, count in pairs]
            if self.objective == THROUGHPUT:
                rate = sum(count / period for count, period in zip(served, periods, strict=True))
                best = min(best, 1 / rate if rate else float("inf"))
            else:
                waits = sum(count * period for count, period in zip(served, periods, strict=True))
                best = min(best, waits / requests)
        return best


def growing_counts(most: int) -> list[int]:
    """1, 2, 3, 4, then in growing steps up to `most`: enough to try where neighbours hardly differ."""
    counts, at = [], 0
    while at < most:
        at += max(1, at // 4)
        counts.append(min(at, most))
    return counts


def period_s(predict: Predict, group: GroupPlan, requests: int) -> float:
    """Seconds between two tokens of each of `requests` requests of one group that has its machines for itself.

    A pipeline cuts them into as many batches as it has stages: stages work side by side, and a batch comes round after
    its own way, or when the slowest stage has served all the others.
    """
    return _period(predict, group, requests)[0]


def _period(predict: Predict, group: GroupPlan, requests: int) -> tuple[float, int, GroupPrediction]:
    """Seconds, in how many batches, and what one of them takes."""
    num_batches = min(len(group.stages), requests)
    prediction = predict(group, -(-requests // num_batches))
    return max(prediction.latency_s, num_batches * prediction.slowest_s), num_batches, prediction


def group_seconds(
    predict: Predict, pairs: Sequence[tuple[GroupPlan, int]], machines: Machines | None = None
) -> list[float]:
    """Seconds between two tokens of the requests of each group, while all groups are at work.

    pairs  groups, and how many requests each has
    """
    found = [_period(predict, *pair) for pair in pairs]
    seconds = [took for took, _, _ in found]
    if machines is None or not machines.cores or not all(map(math.isfinite, seconds)):
        return seconds
    turns = [_turn(*period, machines) for period in found]
    beside = [
        {machines.reader: num_batches * machines.read_step_s + count * machines.read_token_s}
        if machines.reader
        else {}
        for (_, count), (_, num_batches, _) in zip(pairs, found, strict=True)
    ]
    return shared_seconds(turns, machines.cores, machines.busy, beside)


def _turn(seconds: float, num_batches: int, prediction: GroupPrediction, machines: Machines) -> Turn:
    """What a group's step wants of which machine, and how much of that it has to wait for."""
    serial: dict[str, float] = {}
    for stage in prediction.stages:
        at_home = stage.home_s
        away = max(0.0, stage.seconds - stage.wire_s - at_home)
        peers = {node: work for node, work in stage.work_s.items() if node != stage.node}
        total = sum(peers.values())
        for node, part in {
            stage.node: at_home,
            **{node: away * work / total for node, work in peers.items() if total},
        }.items():
            serial[machines.host(node)] = serial.get(machines.host(node), 0.0) + part
    work: dict[str, float] = {}
    by_process: dict[str, dict[str, float]] = {}
    for node, part in prediction.work_s.items():
        machine = machines.host(node)
        work[machine] = work.get(machine, 0.0) + num_batches * part
        by_process.setdefault(machine, {})[node] = num_batches * part
    wakes: dict[str, float] = {}
    for stage in prediction.stages:
        peers = {node: work for node, work in stage.work_s.items() if node != stage.node}
        total, hop = sum(peers.values()), WAKES if len(prediction.stages) > 1 else 0.0
        at_peers = {node: WAKES * stage.remote_layers * work / total for node, work in peers.items() if total}
        for node, count in {stage.node: hop + WAKES * stage.remote_layers, **at_peers}.items():
            wakes[machines.host(node)] = wakes.get(machines.host(node), 0.0) + count
    # What is not waited for since another stage is at work on another batch is not waited for here either.
    share = min(1.0, seconds / max(prediction.latency_s, 1e-12))
    return Turn(seconds, {name: part * share for name, part in serial.items()}, work, by_process, wakes)


def _shares(amount: int, rates: Sequence[float]) -> list[int]:
    """Whole shares of an amount in proportion to rates: largest remainders get what is left over."""
    total = sum(rates)
    if total <= 0:
        return [amount, *[0] * (len(rates) - 1)]
    exact = [amount * rate / total for rate in rates]
    shares = [int(share) for share in exact]
    order = sorted(range(len(rates)), key=lambda index: (shares[index] - exact[index], index))
    for index in order[: amount - sum(shares)]:
        shares[index] += 1
    return shares
