"""Which waiting prompts run together next, when nobody waits for a single answer: batches of one tier where they fill.

A batch is as slow as its dearest member where a step runs at one K, and its rows share fewer weights where they run at
many; so prompts are sorted by tier, and a remainder that does not fill a batch is run alone or promoted to the next tier,
whichever the profile says is quicker. Pure: the clock is a count of batches.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

Rule = Literal["paper", "exact"]

AGE_CAP = 64  # batches that a prompt may be passed over by


class Prompt(NamedTuple):
    """A prompt that waits. place: in the file, from 0; tier: sub-experts, the full tier for whole experts."""

    place: int
    tier: int
    passed: int = 0
    """Batches that left since it could have run."""


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


def next_batch(
    waiting: Sequence[Prompt],
    capacity: int,
    profile: Profile | None,
    *,
    rule: Rule = "paper",
    age_cap: int = AGE_CAP,
) -> Batch:
    """The next batch of at most `capacity` of what waits (at least one does).

    Lowest tier first, in the order of the file; without a profile tiers never share a batch. A prompt that was passed over
    `age_cap` times goes before all others.
    """
    old = [prompt for prompt in waiting if prompt.passed >= age_cap]
    queue = sorted(waiting, key=lambda prompt: (prompt.tier, prompt.place))
    first = min(old, key=lambda prompt: (-prompt.passed, prompt.place)) if old else queue[0]
    tiers = sorted({prompt.tier for prompt in queue if prompt.tier >= first.tier})
    mine = [prompt for prompt in queue if prompt.tier == first.tier]
    mine.sort(key=lambda prompt: (-prompt.passed if prompt.passed >= age_cap else 0, prompt.place))
    taken, tier = mine[:capacity], first.tier
    if len(taken) < capacity and len(tiers) > 1:
        following = [prompt for prompt in queue if prompt.tier == tiers[1]][: capacity - len(taken)]
        if profile is not None and merges(len(taken), tier, len(following), tiers[1], profile, rule):
            taken, tier = taken + following, tiers[1]
    return Batch(tuple(sorted(prompt.place for prompt in taken)), tier)


def after(waiting: Sequence[Prompt], batch: Batch) -> list[Prompt]:
    """What still waits once a batch has left: everybody else was passed over once more."""
    gone = set(batch.indices)
    return [prompt._replace(passed=prompt.passed + 1) for prompt in waiting if prompt.place not in gone]
