"""The peers as the benchmark drives them: something that decodes and prefills when told, and can be asked what it is.

Knows how each is started and stopped, nothing of rounds and tables.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Protocol

from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError
from edge_runtime.protocol import Tokens

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 3
READY_S = 600.0
CLOSE_S = 10.0


@dataclass(frozen=True)
class Work:
    """What one engine does in one round of one cell."""

    kind: str
    """`decode` or `prefill`."""
    prompts: list[list[int]]
    """Token ids; one prompt for a prefill."""
    steps: int
    """Decode steps."""


class Rate(NamedTuple):
    """Tokens per second of one round."""

    wall: float
    cpu: float | None
    """Per second of processor time, times threads: what waiting for the processor does not change. None if not known."""


class Engine(Protocol):
    """A peer that is up."""

    name: str
    facts: Mapping[str, Any]
    """`version` at least, and what else its worker tells."""

    def run(self, work: Work) -> Rate:
        """One round."""

    def close(self) -> None:
        """End its process."""


@dataclass
class WorkerEngine:
    """A Python engine behind `worker.serve`, in the environment of `python`."""

    name: str
    arguments: tuple[str, ...]
    """Of Python: what it runs."""
    order: dict[str, Any]
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def start(self) -> "WorkerEngine":
        """Load; returns when it is ready to work."""
        threads = str(self.order["threads"])
        self._log = TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [self.python, *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # an interrupt is for the benchmark, which then ends its workers
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": threads,
                "EDGE_THREADS": threads,
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **self.environment,
            },
        )
        try:
            self.facts = self.ask(self.order)
        except BaseException:
            self.close()
            raise
        return self

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back."""
        assert self._process.stdin and self._process.stdout, "both are pipes"
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ClusterError(f"{self.name} ended: {self._last_words()}")
        return json.loads(line)

    def run(self, work: Work) -> Rate:
        if work.kind == "prefill":
            done = self.ask({"do": "prefill", "prompt": work.prompts[0]})
        else:
            done = self.ask({"do": "decode", "prompts": work.prompts, "steps": work.steps})
        threads = self.order["threads"]
        return Rate(done["tokens"] / done["seconds"], done["tokens"] / done["cpu_seconds"] * threads)

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout, "both are pipes"
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return " / ".join(lines[-SHOWN_LINES:]) or f"exit code {self._process.returncode}, without a word"


class DaemonsEngine:
    """A running cluster behind its client: our engine as users see it."""

    def __init__(
        self,
        name: str,
        client: Client,
        clock: Clock,
        facts: Mapping[str, Any],
        node_pid: int,
        threads: int,
    ) -> None:
        self.name = name
        self.facts = facts
        self._node_pid = node_pid
        self._threads = threads
        self._client = client
        self._clock = clock

    def run(self, work: Work) -> Rate:
        streams: dict[str, list[Arrival]] = {}
        if work.kind == "prefill":
            before = process_cpu_s(self._node_pid)
            (answer,) = self._ask(work.prompts, 1, streams)
            ((came_s, _, cpu_s),) = streams[answer.request_id]
            num_tokens = len(work.prompts[0])
            return Rate(num_tokens / (came_s - answer.sent_s), num_tokens / (cpu_s - before) * self._threads)
        # Longer than what counts: where the client is kept waiting, tokens come many at a time and streams end early.
        self._ask(work.prompts, 2 * work.steps + 1 + len(work.prompts), streams)
        return decode_rate(list(streams.values()), self._threads)

    def close(self) -> None:
        """Whoever started the cluster ends it."""

    def _ask(
        self, prompts: Sequence[list[int]], tokens: int, streams: dict[str, list["Arrival"]]
    ) -> list[Answer]:
        def note(answer: Answer, came: Tokens) -> None:
            if not came.token_ids:
                return
            arrival = Arrival(self._clock.now(), len(came.token_ids), process_cpu_s(self._node_pid))
            streams.setdefault(answer.request_id, []).append(arrival)

        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        asked = [Prompt(prompt_ids=prompt, sampling=sampling) for prompt in prompts]
        answers = self._client.run(asked, wait_ready_s=READY_S, on_tokens=note)
        for answer in answers:
            if (error := answer.error()) is not None:
                raise error
        return answers


class Arrival(NamedTuple):
    """Tokens of one stream that came together."""

    at_s: float
    tokens: int
    cpu_s: float
    """Processor time that the node had spent by then."""


def decode_rate(streams: Sequence[Sequence[Arrival]], threads: int) -> Rate:
    """Between the moment when every stream has begun and the one when the first ends; `streams` in order of time."""
    began = max((stream[0] for stream in streams), key=lambda arrival: arrival.at_s)
    ended = min((stream[-1] for stream in streams), key=lambda arrival: arrival.at_s)
    tokens = sum(
        arrival.tokens for stream in streams for arrival in stream if began.at_s < arrival.at_s <= ended.at_s
    )
    if tokens == 0:
        raise ClusterError("a stream ended before the last one began; let answers be longer")
    return Rate(tokens / (ended.at_s - began.at_s), tokens / (ended.cpu_s - began.cpu_s) * threads)


def process_cpu_s(pid: int) -> float:
    """Processor time of another process, all its threads together; Linux gives every process a clock of that."""
    return time.clock_gettime((~pid << 3) | 2)
