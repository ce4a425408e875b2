"""Runs one HTTP request's prompts on a client in a thread and brings what comes to the event loop.

A client of the cluster is blocking and belongs to one thread at a time; connected ones are kept for the next request.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.errors import EdgeError
from edge_runtime.protocol import Tokens

MAX_REQUESTS = 128  # HTTP requests answered at the same time; each has a thread that waits
MAX_IDLE_CLIENTS = 16
CONNECT_S = 5.0


class Part(NamedTuple):
    """Tokens of one of the request's answers; `place` is its prompt's."""

    place: int
    tokens: Tokens


class Ended(NamedTuple):
    """All answers have ended; each has failed or finished."""

    answers: list[Answer]


class _ReaderGone(Exception):
    """Thrown into a client's wait so that it takes its requests back."""


class Answering:
    """Answers prompts for an event loop.

    connect        makes a client that has not greeted yet
    wait_ready_s   how long a cluster that is still loading is waited for
    """

    def __init__(self, connect: Callable[[], Client], wait_ready_s: float) -> None:
        self._connect = connect
        self._wait_ready_s = wait_ready_s
        self._threads = ThreadPoolExecutor(MAX_REQUESTS, thread_name_prefix="answer")
        self._idle: list[Client] = []
        self.num_running = 0

    @property
    def is_full(self) -> bool:
        return self.num_running >= MAX_REQUESTS

    async def run(self, prompts: Sequence[Prompt]) -> AsyncGenerator[Part | Ended]:
        """Parts as they come, then the end. Closing the iterator takes the requests back. Raises EdgeError."""
        loop = asyncio.get_running_loop()
        came: asyncio.Queue[Part | None] = asyncio.Queue()
        is_gone = False

        def bring(part: Part) -> None:
            loop.call_soon_threadsafe(came.put_nowait, part)

        def check() -> None:
            if is_gone:
                raise _ReaderGone

        self.num_running += 1
        answering = loop.run_in_executor(self._threads, lambda: self._run(prompts, bring, check))
        answering.add_done_callback(lambda done: came.put_nowait(None))
        try:
            while (part := await came.get()) is not None:
                yield part
            yield Ended(await answering)
        finally:
            is_gone = True
            self.num_running -= 1
            if (
                not answering.cancel()
            ):  # one that runs ends by itself, and what it ends with is nobody's any more
                answering.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _run(
        self, prompts: Sequence[Prompt], bring: Callable[[Part], None], check: Callable[[], None]
    ) -> list[Answer]:
        try:
            client = self._idle.pop()
        except IndexError:  # none is idle; looking first would race with other threads
            client = self._connect()
        places: dict[str, int] = {}

        def take(answer: Answer, tokens: Tokens) -> None:
            check()
            place = places.get(answer.request_id)
            if place is None:  # the same prompt may be asked twice, but each is an object of its own
                place = next(i for i, prompt in enumerate(prompts) if prompt is answer.prompt)
                places[answer.request_id] = place
            bring(Part(place, tokens))

        try:
            client.connect(CONNECT_S)
            answers = client.run(prompts, wait_ready_s=self._wait_ready_s, on_tokens=take, on_turn=check)
        except BaseException:
            client.close()
            raise
        if len(self._idle) < MAX_IDLE_CLIENTS:
            self._idle.append(client)
        else:
            client.close()
        return answers

    def status(self) -> dict[str, object]:
        """What the coordinator says of the cluster. Blocks."""
        with self._connect() as client:
            client.connect(CONNECT_S)
            return client.status()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for client in self._idle:
            client.close()


def first_error(answers: Sequence[Answer]) -> EdgeError | None:
    """The first failure among ended answers."""
    return next((error for answer in answers if (error := answer.error()) is not None), None)
