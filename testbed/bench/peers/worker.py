"""The side of a peer that lives in a process of its own: reads orders from standard input, one JSON object a line.

The first line says what to load; each later one is a piece of work, answered by a line with its seconds. Only an engine
that is being waited for works, so several may be up and take turns. Imports nothing that another engine's environment lacks.
"""

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any, NamedTuple, Protocol


class Moment(NamedTuple):
    """Seconds on the wall's clock, and of this process's processor time, threads together."""

    wall_s: float
    cpu_s: float


def moment() -> Moment:
    """Now."""
    return Moment(perf_counter(), process_time())


class Took(NamedTuple):
    """One measurement: from where to where, and the tokens that came between."""

    began: Moment
    ended: Moment
    tokens: int


class Runner(Protocol):
    """A loaded engine."""

    facts: dict[str, Any]
    """What is worth saying of it: `version` at least."""

    def decode(self, prompts: list[list[int]], steps: int) -> Took:
        """Run all prompts together; what counts is decoding alone, from when each has its first token."""

    def prefill(self, prompt: list[int]) -> Took:
        """From a prompt to its first token; the prompt's tokens count."""


def serve(load: Callable[[dict[str, Any]], Runner]) -> None:
    """Load what the first line says, then work until standard input ends. Other prints go to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    runner = load(json.loads(sys.stdin.readline()))
    answer(**runner.facts)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "decode":
            took = runner.decode(order["prompts"], order["steps"])
        elif order["do"] == "prefill":
            took = runner.prefill(order["prompt"])
        else:  # an engine's own question, such as how many experts a step reads
            answer(**getattr(runner, order["do"])(order))
            continue
        answer(
            seconds=took.ended.wall_s - took.began.wall_s,
            cpu_seconds=took.ended.cpu_s - took.began.cpu_s,
            tokens=took.tokens,
        )
