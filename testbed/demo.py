"""`make demo`: the main job from start to stop, driven through the command line as a person would.

Starts the nodes of a scenario, asks them questions one by one and all at once, shows who holds what, and stops
them again, whatever happens in between. Knows the commands and their JSON, nothing of what is behind them.
"""

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from edge_runtime.clock import SystemClock
from edge_runtime.errors import EXIT_DONE, EXIT_USER
from testbed.carried import EIGHT_NODES, PROMPTS

# Only to be read by people: greedy text of so small a model goes round in circles.
FOR_READERS = ("--temperature", "0.7", "--top-p", "0.9", "--repetition-penalty", "1.2", "--seed", "1")


class DemoFailed(Exception):
    """A step of the demo did not do what it promises."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m testbed.demo", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--short", action="store_true", help="fewer and shorter answers, for automatic checks"
    )
    parser.add_argument("--topology", type=Path, default=EIGHT_NODES, help="scenario to run")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop_as_if_interrupted)
    try:
        run_demo(Edge(options.topology), short=options.short)
    except DemoFailed as failure:
        print(f"demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    print("\ndemo: done; the nodes are stopped")
    return 0


class Edge:
    """The `edge-runtime` of this installation, on one topology file."""

    def __init__(self, topology: Path) -> None:
        self.topology = topology

    def show(self, command: str, *arguments: str) -> int:
        """Run a command before the person's eyes and return its exit code."""
        self._announce(command, arguments)
        return subprocess.run(self._argv(command, arguments), check=False).returncode

    def must(self, command: str, *arguments: str) -> None:
        exit_code = self.show(command, *arguments)
        if exit_code != EXIT_DONE:
            raise DemoFailed(f"`edge-runtime {command}` ended with exit code {exit_code}")

    def read(self, command: str, *arguments: str) -> list[dict[str, Any]]:
        """Run a command that prints JSON, one object per line, and return the objects."""
        self._announce(command, arguments)
        ended = subprocess.run(
            self._argv(command, arguments), stdout=subprocess.PIPE, text=True, encoding="utf-8", check=False
        )
        if ended.returncode != EXIT_DONE:
            raise DemoFailed(
                f"`edge-runtime {command}` ended with exit code {ended.returncode}: {ended.stdout}"
            )
        return [json.loads(line) for line in ended.stdout.splitlines() if line.strip()]

    def _argv(self, command: str, arguments: tuple[str, ...]) -> list[str]:
        script = Path(sys.executable).with_name("edge-runtime")
        return [sys.executable, str(script), command, "--topology", str(self.topology), *arguments]

    def _announce(self, command: str, arguments: tuple[str, ...]) -> None:
        one_line = (" ".join(argument.split()) for argument in arguments)
        shown = shlex.join(argument if len(argument) < 80 else f"{argument[:77]}..." for argument in one_line)
        print(f"\n$ edge-runtime {command} --topology {self.topology.name} {shown}".rstrip(), flush=True)


def run_demo(edge: Edge, *, short: bool) -> None:
    """Go through the main job once; the nodes are stopped even when a step fails."""
    edge.must("plan")
    ours = True  # what runs was started here, unless `up` says otherwise
    try:
        exit_code = edge.show("up", "--detach")
        if exit_code != EXIT_DONE:
            ours = (
                exit_code != EXIT_USER
            )  # refused: perhaps the cluster was up before, which is not ours to stop
            raise DemoFailed(f"`edge-runtime up` ended with exit code {exit_code}; the line above says why")
        answer_one_by_one(edge, count=1 if short else 3, max_tokens=24 if short else 60)
        answer_all_at_once(edge, count=4 if short else 16, max_tokens=16 if short else 64)
        edge.must("status")
    except BaseException:
        if ours:
            edge.show("down")
        raise
    edge.must("down")


def answer_one_by_one(edge: Edge, *, count: int, max_tokens: int) -> None:
    """Stream a few answers to the terminal."""
    wanted = ["en_prose", "python", "math"][:count]
    for domain in wanted:
        edge.must("submit", *FOR_READERS, "--max-tokens", str(max_tokens), read_prompts(domain)[0])


def answer_all_at_once(edge: Edge, *, count: int, max_tokens: int) -> None:
    """Send one prompt of each of `count` domains together; the first must answer as it does alone."""
    prompts = read_prompts()[::2][:count]
    exactly = ("--json", "--temperature", "0", "--max-tokens", str(max_tokens))
    (alone,) = edge.read("submit", *exactly, prompts[0])
    with tempfile.TemporaryDirectory() as folder:
        together = Path(folder) / "prompts.jsonl"
        lines = (
            json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}) for prompt in prompts
        )
        together.write_text("\n".join(lines) + "\n", encoding="utf-8")
        clock = SystemClock()
        started = clock.now()
        answers = edge.read("submit", "--json", "--file", str(together))
        took_s = clock.now() - started
    if len(answers) != count or not all(answer["token_ids"] for answer in answers):
        raise DemoFailed(f"{count} prompts were sent, {len(answers)} answers came, or one of them is empty")
    if answers[0]["token_ids"] != alone["token_ids"]:
        raise DemoFailed(
            f"the first prompt answered {alone['text']!r} alone and {answers[0]['text']!r} in a batch"
        )
    tokens = sum(len(answer["token_ids"]) for answer in answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        print(f"  {prompt[-40:]!r} -> {answer['text'][:60]!r}")
    print(
        f"{count} answers, {tokens} tokens in {took_s:.2f} s; the first one is the same alone and in the batch"
    )


def read_prompts(domain: str | None = None) -> list[str]:
    """Return the prompts of one domain, or of all."""
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [line["prompt"] for line in lines if domain in (None, line["domain"])]


def _stop_as_if_interrupted(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
