"""The only place that reads time or sleeps. Decisions take `now` as a value and never come here."""

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, comparable within one machine (CLOCK_MONOTONIC is shared by its processes)."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""

    def processor_s(self) -> float:
        """Processor seconds that all threads of this process have taken so far."""

    def thread_s(self) -> float:
        """Processor seconds that the thread that asks has taken so far."""


def wall_s() -> float:
    """Seconds since 1970, for what people and other programs read. Never for a length of time."""
    return time.time()


class SystemClock:
    """The machine's own monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def processor_s(self) -> float:
        return time.process_time()

    def thread_s(self) -> float:
        return time.thread_time()


class ThreadClock:
    """Stands still while the thread that asks has no processor: what neighbours take is not in its lengths of time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock.thread_s()

    def sleep(self, seconds: float) -> None:
        self._clock.sleep(seconds)

    def processor_s(self) -> float:
        return self._clock.processor_s()

    def thread_s(self) -> float:
        return self._clock.thread_s()


class ManualClock:
    """A clock that moves only when told: for tests and the simulator."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def processor_s(self) -> float:
        return self._now

    def thread_s(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
