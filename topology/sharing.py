"""How long steps take when several homes, and the nodes that serve them, share the processors of one machine.

Each group of homes goes round for itself: step after step, in parts on the wire and in parts on some machine's processors.
A part that wants a processor waits for the others that want one: with X of them at once, and C processors, it takes
max(1, (1 + X) / C) times as long. X is what the others use on average, spread as by chance (Poisson); who waits longer
uses it less often, so the answer is a fixed point. Alone on a machine with processors enough nothing changes.

Others on the machine, who want a processor all the time, are something else: a fair scheduler gives a process that sleeps
in between its turn at once, as long as it takes no more than its share. With U processors in use by all of ours, u by the
hungriest process, and B of the others, shares are even at u' = (C - U') / B: steps take (U + B u) / C times as long if that
is above 1, and else no longer. But a thread that is woken, by a message or a reply, first waits for the one of the others
that is on its processor.

Knows predictions, not how they come about.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

WAKE_S = 54e-6  # that a thread waits when it is woken, for each of the others per processor. Measured: 0.8 ms for some 28
ROUNDS = 60  # of the fixed point; it stands still after some 20
MOST_OTHERS = 64  # beyond which a Poisson tail is not summed


class Turn(NamedTuple):
    """One group's step when nobody disturbs it.

    seconds   of a step
    serial_s  machine -> processor seconds that the step has to wait for, one after another
    work_s    machine -> processor seconds of all threads; what is beyond `serial_s` happens beside it
    by_process  machine -> process -> its part of `work_s`; empty where all of it is one process
    wakes     machine -> threads that are woken there one after another, before the step is done
    """

    seconds: float
    serial_s: Mapping[str, float]
    work_s: Mapping[str, float]
    by_process: Mapping[str, Mapping[str, float]] = {}
    wakes: Mapping[str, float] = {}


def shared_seconds(
    turns: Sequence[Turn],
    cores: Mapping[str, float],
    busy: float = 0.0,
    beside: Sequence[Mapping[str, float]] = (),
) -> list[float]:
    """Seconds of a step of each group while all of them run, in their order.

    cores   machine -> processors; a machine that is not there has enough
    busy    processes of others that want a processor of each machine all the time, as a mean
    beside  for each turn, machine -> processor seconds that its step costs there besides, for whoever reads its tokens
    """
    beside = beside or [{}] * len(turns)
    machines = sorted(cores)
    seconds = [turn.seconds for turn in turns]
    slower = [dict.fromkeys(machines, 1.0) for _ in turns]
    for _ in range(ROUNDS):
        wanted = {  # threads that want a processor on average, by machine
            machine: sum(
                (turn.work_s.get(machine, 0.0) + more.get(machine, 0.0)) * factors[machine] / took
                for turn, more, factors, took in zip(turns, beside, slower, seconds, strict=True)
                if took > 0
            )
            for machine in machines
        }
        for index, turn in enumerate(turns):
            for machine in machines:
                own = turn.serial_s.get(machine, 0.0) * slower[index][machine]
                others = max(0.0, wanted[machine] - own / max(seconds[index], 1e-12))
                aim = _stretch(others, cores[machine])
                slower[index][machine] += (aim - slower[index][machine]) / 2
            waits = sum(turn.serial_s.get(m, 0.0) * (slower[index][m] - 1) for m in machines)
            seconds[index] = turn.seconds + waits
    for machine in machines if busy else ():
        wait_s = WAKE_S * busy / cores[machine]
        seconds = [
            took + turn.wakes.get(machine, 0.0) * wait_s for turn, took in zip(turns, seconds, strict=True)
        ]
        factor = _share_factor(turns, seconds, beside, machine, cores[machine], busy)
        seconds = [
            took * factor if turn.serial_s.get(machine) else took
            for turn, took in zip(turns, seconds, strict=True)
        ]
    return seconds


def _share_factor(
    turns: Sequence[Turn],
    seconds: Sequence[float],
    beside: Sequence[Mapping[str, float]],
    machine: str,
    cores: float,
    busy: float,
) -> float:
    """How many times as long steps take so that no process has more than what a fair scheduler gives it beside others."""
    used = 0.0
    by_process: dict[str, float] = {}
    for index, (turn, took, more) in enumerate(zip(turns, seconds, beside, strict=True)):
        work = turn.work_s.get(machine, 0.0)
        used += (work + more.get(machine, 0.0)) / took
        for process, part in (turn.by_process.get(machine) or {str(index): work}).items():
            by_process[process] = by_process.get(process, 0.0) + part / took
    hungriest = min(1.0, max(by_process.values(), default=0.0))
    return max(1.0, (used + busy * hungriest) / cores)


def _stretch(others: float, cores: float) -> float:
    """Mean of max(1, (1 + X) / cores) for X others, Poisson with that mean."""
    if others <= 0:
        return max(1.0, 1 / cores)
    if others > MOST_OTHERS / 2:
        return max(1.0, (1 + others) / cores)
    chance, total, left = math.exp(-others), 0.0, 1.0
    for count in range(MOST_OTHERS):
        total += chance * max(1.0, (1 + count) / cores)
        left -= chance
        chance *= others / (count + 1)
    return total + max(0.0, left) * MOST_OTHERS / cores
