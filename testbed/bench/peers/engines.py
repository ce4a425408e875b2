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
from tempfile import TemporaryFile
from typing import Any, NamedTuple, Protocol

from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.errors import EXIT_USER, ClusterError, UserError
from testbed.carried import FOLDER

ROOT = FOLDER.parent
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
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": threads,
            "EDGE_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **self.environment,
        }
        try:
            self._process = subprocess.Popen(
                [self.python, *self.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=ROOT,
                start_new_session=True,  # an interrupt is for the benchmark, which then ends its workers
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise UserError(
                f"{self.python} cannot be run ({error.strerror}); name the python of an environment that has {self.name}"
            ) from error
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
            words = self._last_words()
            kind = UserError if self._process.returncode == EXIT_USER else ClusterError
            raise kind(f"{self.name} ended: {words}")
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
        if lines and lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")  # a sentence of ours, which says it all
        return " / ".join(lines[-SHOWN_LINES:]) or f"exit code {self._process.returncode}, without a word"


class DaemonsEngine:
    """A running cluster behind its client: our engine as users see it."""

    def __init__(
        self,
        name: str,
        client: Client,
        facts: Mapping[str, Any],
        node_pid: int,
        threads: int,
    ) -> None:
        self.name = name
        self.facts = facts
        self._node_pid = node_pid
        self._threads = threads
        self._client = client

    def run(self, work: Work) -> Rate:
        began = process_cpu_s(self._node_pid)
        if work.kind == "prefill":
            (answer,) = self._ask(work.prompts, 1)
            assert answer.first_token_s is not None, "an answer without error has a token"
            num_tokens = len(work.prompts[0])
            cpu_s = process_cpu_s(self._node_pid) - began
            return Rate(
                num_tokens / (answer.first_token_s - answer.sent_s), num_tokens / cpu_s * self._threads
            )
        # The same work with one token each says what the prompts cost; other first tokens, so that no prefix is reused.
        self._ask([prompt[1:] + prompt[:1] for prompt in work.prompts], 1)
        prompts_done = process_cpu_s(self._node_pid)
        answers = self._ask(work.prompts, work.steps + 1)
        ended = process_cpu_s(self._node_pid)
        num_tokens = len(answers) * work.steps
        # Times are the node's own: a client that is kept waiting reads many tokens at once, and none of them late.
        decode_s = max(answer.finished.timing.decode_s for answer in answers if answer.finished is not None)
        cpu_s = (ended - prompts_done) - (prompts_done - began)
        return Rate(num_tokens / decode_s, num_tokens / cpu_s * self._threads if cpu_s > 0 else None)

    def close(self) -> None:
        """Whoever started the cluster ends it."""

    def _ask(self, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
        sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        asked = [Prompt(prompt_ids=prompt, sampling=sampling) for prompt in prompts]
        answers = self._client.run(asked, wait_ready_s=READY_S)
        for answer in answers:
            if (error := answer.error()) is not None:
                raise error
        return answers


def process_cpu_s(pid: int) -> float:
    """Processor time of another process, all its threads together; Linux gives every process a clock of that."""
    return time.clock_gettime((~pid << 3) | 2)
