"""Which waiting prompts run together next, when nobody waits for a single answer: batches of one tier where they fill.

A batch is as slow as its dearest member where a step runs at one K, and its rows share fewer weights where they run at
many; so prompts are sorted by tier, and a remainder that does not fill a batch is run alone or joined by the next tier,
whichever the profile says is quicker. Places that answers leave are taken at once, so only the tail of a tier ever runs in a
batch that is not full. Pure: the clock is a count of prompts.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Rule = Literal["paper", "exact"]

AGE_CAP = 64  # full batches that a tier may be passed over by


class Batch(NamedTuple):
    """What runs next: indices in the order of the file, and the highest tier among them."""

    indices: tuple[int, ...]
    tier: int


class Profile:
    """Seconds of a batch by size and tier, measured at some points; between them in straight lines, beyond them level rates.

    points  (n, K) -> seconds; at least one
    """

    def __init__(self, points: Mapping[tuple[int, int], float]) -> None:
        if not points:
            raise ValueError("points: found none, expected at least one measured batch")
        self.sizes = sorted({n for n, _ in points})
        self.tiers = sorted({k for _, k in points})
        self._points = dict(points)

    def seconds(self, size: int, tier: int) -> float:
        """T(n, K)."""
        low, high, share = _between(self.tiers, tier)
        return (1 - share) * self._at(size, low) + share * self._at(size, high)

    def _at(self, size: int, tier: int) -> float:
        sizes = [n for n in self.sizes if (n, tier) in self._points]
        if not sizes:  # a tier that was never measured at any size: the nearest one
            tier = min(self.tiers, key=lambda k: abs(k - tier))
            sizes = [n for n in self.sizes if (n, tier) in self._points]
        if size > sizes[-1]:
            return self._points[sizes[-1], tier] * size / sizes[-1]
        low, high, share = _between(sizes, size)
        return (1 - share) * self._points[low, tier] + share * self._points[high, tier]


def _between(marks: Sequence[int], value: int) -> tuple[int, int, float]:
    """The marks around a value, and how far it is from the lower to the upper one."""
    place = bisect_right(marks, value)
    if place == 0:
        return marks[0], marks[0], 0.0
    if place == len(marks):
        return marks[-1], marks[-1], 0.0
    low, high = marks[place - 1], marks[place]
    return low, high, (value - low) / (high - low)


def merges(
    now: int, tier: int, following: int, next_tier: int, profile: Profile, rule: Rule = "paper"
) -> bool:
    """Whether `now` prompts of a tier that do not fill a batch run with `following` ones of the next tier, at that tier.

    "paper"  if more prompts per second end so than of the remainder alone, whatever the next tier would do by itself
    "exact"  if the two together take less time than one after the other
    """
    together = profile.seconds(now + following, next_tier)
    alone = profile.seconds(now, tier)
    if rule == "exact":
        return together < alone + profile.seconds(following, next_tier)
    return (now + following) / together > now / alone


class Queue:
    """Prompts that wait, by tier: the lowest goes first, in the order of the file.

    A tier that was passed over by `age_cap` full batches goes before all others, until another was.
    """

    def __init__(self, tiers: Mapping[int, int], *, age_cap: int = AGE_CAP) -> None:
        """tiers: place in the file -> sub-experts of the prompt, the full tier for whole experts."""
        self._places: dict[int, deque[int]] = {tier: deque() for tier in sorted(set(tiers.values()))}
        for place in sorted(tiers):
            self._places[tiers[place]].append(place)
        # Prompts of other tiers that left since one of this tier did.
        self._passed = dict.fromkeys(self._places, 0)
        self._age_cap = age_cap

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    @property
    def tiers(self) -> list[int]:
        """Tiers of which somebody waits, rising."""
        return [tier for tier, places in self._places.items() if places]

    def take(
        self,
        capacity: int,
        profile: Profile | None,
        *,
        num_running: int = 0,
        tier: int = 0,
        rule: Rule = "paper",
    ) -> Batch | None:
        """Who takes the places that are free beside what runs; None if nobody does.

        Those of the tier that runs; once none of it is left, those of the next one, as soon as the profile says that this
        is quicker than to run the rest alone first. Without a profile tiers never share a batch.

        num_running, tier  prompts that run, and the highest tier among them
        """
        free, waiting = capacity - num_running, self.tiers
        if not waiting or free < 1:
            return None
        overdue = max(waiting, key=lambda each: self._passed[each])
        if self._passed[overdue] < self._age_cap * capacity:
            overdue = 0
        now = tier if num_running else overdue or waiting[0]
        taken: dict[int, int] = {}
        if now in waiting and overdue in (0, now):
            taken[now] = min(free, len(self._places[now]))
        count = taken.get(now, 0)
        others = [each for each in waiting if each != now]
        if count < free and others:
            following = overdue if overdue in others else min(others, key=lambda each: (each < now, each))
            more = min(free - count, len(self._places[following]))
            highest = max(now, following)
            if profile is not None and merges(num_running + count, now, more, highest, profile, rule):
                taken[following] = more
        if not taken:
            return None
        indices = [self._places[each].popleft() for each, many in taken.items() for _ in range(many)]
        for each in waiting:
            self._passed[each] = 0 if each in taken else self._passed[each] + len(indices)
        return Batch(tuple(sorted(indices)), max(tier, *taken) if num_running else max(taken))


class Flow:
    """Prompts from a queue to a cluster that runs so many at once, places being taken as answers end; time is given.

    Times full batches of one tier as they run, so that the profile is of what runs now.

    running  place -> tier
    """

    def __init__(
        self,
        queue: Queue,
        tiers: Sequence[int],
        measured: Mapping[tuple[int, int], float],
        capacity: int,
        *,
        rule: Rule = "paper",
    ) -> None:
        """tiers: of every place; measured: (n, K) -> seconds of a token of each of n, empty where nothing is merged."""
        self._queue, self._tiers, self._capacity, self._rule = queue, tiers, capacity, rule
        self.measured = dict(measured)
        self.running: dict[int, int] = {}
        # (n, K) of the full batch of one tier that runs, if one does.
        self._timed: tuple[int, int] | None = None
        self._since_s = 0.0
        self._tokens = self._answers = 0

    @property
    def tier(self) -> int:
        """The highest that runs, 0 if nothing does."""
        return max(self.running.values(), default=0)

    def ended(self, place: int, num_tokens: int) -> None:
        """An answer of so many tokens has ended."""
        del self.running[place]
        self._tokens += num_tokens
        self._answers += 1

    def next(self, now: float) -> tuple[int, ...]:
        """Places in the file of those that begin now."""
        profile = Profile(self.measured) if self.measured else None
        batch = self._queue.take(
            self._capacity, profile, num_running=len(self.running), tier=self.tier, rule=self._rule
        )
        indices = batch.indices if batch is not None else ()
        self.running |= {index: self._tiers[index] for index in indices}
        self._time(now)
        return indices

    def _time(self, now: float) -> None:
        is_full = len(self.running) == self._capacity and len(set(self.running.values())) == 1
        runs = (self._capacity, self.tier) if is_full else None
        is_enough = self._answers >= 2 * self._capacity and self._tokens
        if runs is not None and runs == self._timed and is_enough and self.measured:
            self.measured[runs] = (now - self._since_s) * self._capacity / self._tokens
        if runs != self._timed or is_enough:
            self._timed, self._since_s, self._tokens, self._answers = runs, now, 0, 0
