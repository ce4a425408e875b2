"""How many requests each home was given of late, and what that says to a placement: copies go where requests live. Pure.

What is said changes in steps and only once enough was counted, so that a plan does not move experts for chance alone, and two
plans in a row are the same.
"""

from collections.abc import Mapping, Sequence

ENOUGH = 256
"""Requests in all, before anything is said."""
MOST = 4096
"""Then all counts are halved: what was long ago counts less."""
STEP = 0.25
"""Shares are whole numbers of this, of the mean home's."""


class TrafficBook:
    """Requests by home."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = {home: count for home, count in (counts or {}).items() if count > 0}

    @property
    def counts(self) -> dict[str, int]:
        """For the next coordinator."""
        return dict(self._counts)

    def sent(self, home: str) -> None:
        """A request went there."""
        self._counts[home] = self._counts.get(home, 0) + 1
        if sum(self._counts.values()) > MOST:
            self._counts = {home: count // 2 for home, count in self._counts.items() if count > 1}

    def shares(self, homes: Sequence[str]) -> dict[str, float]:
        """How much each of these homes counts, 1 the mean; empty where all count the same, or too little was counted.

        A home that was given nothing yet, one that is new, counts as the mean; every other at least one step.
        """
        known = {home: self._counts[home] for home in homes if home in self._counts}
        total = sum(known.values())
        if total < ENOUGH or len(homes) < 2:
            return {}
        mean = total / len(known)
        found = {home: max(STEP, round(count / mean / STEP) * STEP) for home, count in known.items()}
        return found if set(found.values()) != {1.0} else {}
