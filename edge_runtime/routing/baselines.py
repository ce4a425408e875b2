"""Routers that know nothing of experts: what ELDR is measured against, and what a cluster without calibration uses.

Those that draw have a generator of their own, seeded by whoever makes them.
"""

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from edge_runtime.routing.base import HomeLoad, Question, pressure


class _Heedless:
    """Looks at no signature, so it chooses before there is one, and learns nothing from what became of it."""

    needs_signature = False

    def took(self, node: str, signature: np.ndarray | None) -> None:
        """See Router."""


class LeastPressure(_Heedless):
    """The home with the least pressure; the first of equals."""

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        return min(range(len(loads)), key=lambda place: pressure(loads[place]))


class RoundRobin(_Heedless):
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        place = self._turn % len(loads)
        self._turn += 1
        return place


class RandomChoice(_Heedless):
    """Any home."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        return self._random.randrange(len(loads))


class ShortestQueue(_Heedless):
    """A home with the fewest requests in flight; chance decides among equals."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        return _shortest(self._random, loads, range(len(loads)))


class PowerOfTwo(_Heedless):
    """Of two different homes drawn at random the one with fewer requests; the first drawn wins a tie."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        if len(loads) == 1:
            return 0
        first, second = self._random.sample(range(len(loads)), 2)
        return second if loads[second].in_flight < loads[first].in_flight else first


class DomainOracle(_Heedless):
    """Homes of their own for each frequent domain, by labels that only an experiment has.

    shares  domain -> its share of the requests. A domain with at least 1/H of them gets a pool of homes, by largest
            remainder; the other domains have what is left together
    """

    def __init__(self, shares: Mapping[str, float], num_homes: int, seed: int) -> None:
        self._random = Random(seed)
        self._pools, self._rest = domain_pools(shares, num_homes)

    def choose(self, question: Question, loads: Sequence[HomeLoad]) -> int:
        """See Router."""
        pool = self._pools.get(question.domain) or self._rest
        return _shortest(self._random, loads, pool)


def domain_pools(shares: Mapping[str, float], num_homes: int) -> tuple[dict[str, list[int]], list[int]]:
    """Places of the homes of each frequent domain, and of all others together (everybody, if none are left for them)."""
    total = sum(shares.values()) or 1.0
    frequent = {name: share / total for name, share in shares.items() if share / total >= 1 / num_homes}
    rest = 1.0 - sum(frequent.values())
    wanted = dict(frequent)
    if len(frequent) < len(shares):
        wanted[""] = max(rest, 0.0)
    exact = {name: share * num_homes for name, share in wanted.items()}
    counts = {name: int(value) for name, value in exact.items()}
    if "" in counts:
        counts[""] = max(counts[""], 1)
    by_remainder = sorted(exact, key=lambda name: (-(exact[name] - int(exact[name])), name))
    while sum(counts.values()) < num_homes:
        for name in by_remainder:
            if sum(counts.values()) < num_homes:
                counts[name] += 1
    while sum(counts.values()) > num_homes:
        counts[max((name for name in counts if name), key=lambda name: (counts[name], name))] -= 1
    pools: dict[str, list[int]] = {}
    begin = 0
    for name, count in counts.items():
        pools[name] = list(range(begin, begin + count))
        begin += count
    others = pools.pop("", None) or list(range(num_homes))
    return {name: pool for name, pool in pools.items() if pool}, others


def _shortest(random: Random, loads: Sequence[HomeLoad], places: Sequence[int]) -> int:
    fewest = min(loads[place].in_flight for place in places)
    return random.choice([place for place in places if loads[place].in_flight == fewest])
