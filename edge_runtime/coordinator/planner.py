"""Has the coordinator's long work done on a thread of its own, one piece after another, so that its loop goes on meanwhile.

Knows nothing of the work. What came of it is brought back by `deliver`, on the loop.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Work = Callable[[], Any]
Done = Callable[[Future[Any]], None]
"""Is given what came of it; its `result()` raises what the work raised."""


class Planner:
    """One thread, started with the first piece of work."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called on the thread when there is something to deliver"""
        self._wake = wake
        self._pool = ThreadPoolExecutor(1, "planner")
        self._finished: deque[tuple[Done, Future[Any]]] = deque()

    def submit(self, work: Work, done: Done) -> None:
        """Have `work` done; `done` is called by a later `deliver`."""

        def finished(future: Future[Any]) -> None:
            self._finished.append((done, future))
            self._wake()

        self._pool.submit(work).add_done_callback(finished)

    def deliver(self) -> None:
        """Tell whoever asked what is finished."""
        while self._finished:
            done, future = self._finished.popleft()
            done(future)

    def stop(self) -> None:
        """End after the work in hand; what waits is not begun, and nothing more is delivered."""
        self._pool.shutdown(cancel_futures=True)
