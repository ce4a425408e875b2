"""`batch`: a file of prompts through a cluster, tier by tier, into a file of answers; goes on where it was stopped.

Every answer is written to a journal beside the output the moment its batch ends. When all are there, the output is
written in the order of the prompts and the journal goes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import Clock
from edge_runtime.elastic.batching import Profile, Rule, after, next_batch
from edge_runtime.elastic.batching import Prompt as Waiting
from edge_runtime.errors import RequestError

FIRST_GUESS = 0.5  # of a batch's time that is there however few it holds, until batches were measured


class Submits(Protocol):
    """What of a client is needed."""

    def run(self, prompts: Sequence[Prompt], *, wait_ready_s: float) -> list[Answer]: ...


class Journal:
    """Answers so far, one JSON line each with the prompt's `index`, behind a line that tells of which prompts they are."""

    def __init__(self, out: Path, prompts: Sequence[Prompt]) -> None:
        self.path = out.with_name(f"{out.name}.part")
        digest = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            digest.update(msgspec.json.encode(prompt))
        self._head = {"prompts": len(prompts), "digest": digest.hexdigest()}
        self._out = out

    def read(self) -> dict[int, dict[str, Any]]:
        """Answers by index; a last line that was cut short counts as not written.

        RequestError for other prompts' answers, and for answers that are whole already.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            if self._out.exists():
                raise RequestError(
                    f"{self._out} exists already; remove it to answer the prompts again, or give another --out"
                ) from None
            return {}
        lines = content[: content.rfind(b"\n") + 1].splitlines()
        if not lines or json.loads(lines[0]) != self._head:
            raise RequestError(
                f"{self.path} holds answers to other prompts; remove it to begin anew, or give another --out"
            )
        with self.path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
        return {entry["index"]: entry for entry in map(json.loads, lines[1:])}

    def add(self, answers: dict[int, dict[str, Any]]) -> None:
        """Keep the answers of a batch; they are on disk when this returns."""
        is_new = not self.path.exists()
        with self.path.open("ab") as file:
            entries = [self._head] if is_new else []
            entries += [{**answer, "index": index} for index, answer in answers.items()]
            file.write("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, answers: dict[int, dict[str, Any]]) -> None:
        """Write the output, a line for each prompt in order, and forget the journal."""
        scratch = self._out.with_name(f".{self._out.name}.{os.getpid()}")
        lines = (json.dumps(answers[index], ensure_ascii=False) + "\n" for index in sorted(answers))
        scratch.write_text("".join(lines), encoding="utf-8")
        scratch.replace(self._out)
        self.path.unlink(missing_ok=True)


def run_offline(
    client: Submits,
    prompts: Sequence[Prompt],
    tiers: Sequence[int],
    out: Path,
    clock: Clock,
    *,
    capacity: int,
    rule: Rule = "paper",
    wait_ready_s: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Answer every prompt that has no answer yet. Returns how many failed.

    tiers  sub-experts of each prompt, the full tier for whole experts
    """
    journal = Journal(out, prompts)
    done = journal.read()
    if done:
        say(f"{len(done)} of {len(prompts)} prompts were answered before")
    waiting = [Waiting(index, tier) for index, tier in enumerate(tiers) if index not in done]
    full, tokens, began = max(tiers, default=1), 0, clock.now()
    measured: dict[tuple[int, int], float] = {}
    while waiting:
        batch = next_batch(waiting, capacity, _profile(measured, capacity, full), rule=rule)
        sent_s = clock.now()
        answers = client.run([prompts[index] for index in batch.indices], wait_ready_s=wait_ready_s)
        found = {index: answer.as_json() for index, answer in zip(batch.indices, answers, strict=True)}
        journal.add(found)
        done |= {index: {**answer, "index": index} for index, answer in found.items()}
        came = sum(len(answer.token_ids) for answer in answers)
        seconds = clock.now() - sent_s
        if came:
            measured[len(batch.indices), batch.tier] = seconds * len(batch.indices) / came
        tokens += came
        waiting = after(waiting, batch)
        rate = tokens / max(clock.now() - began, 1e-9)
        say(
            f"{len(done)} of {len(prompts)} prompts; {len(batch.indices)} at up to K {batch.tier} in {seconds:.1f} s; "
            f"{rate:.0f} tokens/s so far"
        )
    journal.finish(done)
    return sum("error" in answer for answer in done.values())


def _profile(measured: dict[tuple[int, int], float], capacity: int, full: int) -> Profile:
    """What was measured; until then, half of a full batch's time whatever it holds, the rest by sub-experts."""
    if measured:
        return Profile(measured)
    return Profile(
        {
            (n, k): FIRST_GUESS + (1 - FIRST_GUESS) * n * k / (capacity * full)
            for n in (1, capacity)
            for k in (1, full)
        }
    )
