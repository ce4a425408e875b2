"""Tell from the times of a peer's heartbeats whether it is alive, suspect or lost. Pure: `now` is given.

One missed beat changes nothing. A lost peer returns only after several beats without a gap, so that a link that
flickers does not make the cluster flicker.
"""

from typing import Literal

Liveness = Literal["alive", "suspect", "lost"]


class HeartbeatMonitor:
    """Watches one peer.

    interval_s       how often the peer beats
    suspect_after_s  silence after which it gets no new work; more than two intervals
    lost_after_s     silence after which others take over what it held
    beats_to_return  beats in a row, none of them `suspect_after_s` apart, that bring a lost peer back
    """

    def __init__(
        self,
        now: float,
        *,
        interval_s: float = 1.0,
        suspect_after_s: float = 3.0,
        lost_after_s: float = 10.0,
        beats_to_return: int = 3,
    ) -> None:
        assert 2 * interval_s < suspect_after_s < lost_after_s, (interval_s, suspect_after_s, lost_after_s)
        self.interval_s = interval_s
        self.suspect_after_s = suspect_after_s
        self.lost_after_s = lost_after_s
        self.beats_to_return = beats_to_return
        self.last_heard_s = now
        self._was_lost = False
        self._beats = 0  # in a row, since it was lost

    def heard(self, now: float) -> None:
        """A beat came; any other message of the peer counts as well."""
        silent_s = now - self.last_heard_s
        if self.state(now) == "lost":
            self._was_lost = True
            self._beats = self._beats + 1 if silent_s < self.suspect_after_s else 1
            if self._beats >= self.beats_to_return:
                self._was_lost = False
                self._beats = 0
        self.last_heard_s = now

    def state(self, now: float) -> Liveness:
        silent_s = now - self.last_heard_s
        if self._was_lost or silent_s >= self.lost_after_s:
            return "lost"
        return "suspect" if silent_s >= self.suspect_after_s else "alive"

    def next_change_s(self, now: float) -> float | None:
        """When the state changes if nothing more is heard; None if it does not."""
        match self.state(now):
            case "alive":
                return self.last_heard_s + self.suspect_after_s
            case "suspect":
                return self.last_heard_s + self.lost_after_s
            case _:
                return None
