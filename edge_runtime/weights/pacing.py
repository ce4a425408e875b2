"""How fast weights may leave a process, so that answers on the same link do not feel it. Pure; `now` comes as a value."""


class Pacer:
    """At most `rate_bps` bits per second on average; None: no limit."""

    def __init__(self, rate_bps: float | None) -> None:
        self._rate_bps = rate_bps
        self._free_at_s = 0.0

    def wait_s(self, now: float) -> float:
        """Seconds until more may leave."""
        return max(0.0, self._free_at_s - now)

    def spend(self, num_bytes: int, now: float) -> None:
        """So many bytes leave now. Time in which nothing left is not saved up."""
        if self._rate_bps is not None:
            self._free_at_s = max(self._free_at_s, now) + 8 * num_bytes / self._rate_bps
