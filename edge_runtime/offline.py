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

PROBE = "Once upon a time"
PROBE_TOKENS = 8  # of each answer that is only measured
MOST_TIERS = 4  # that are measured before; those between are taken in straight lines


class Submits(Protocol):
    """What of a client is needed."""

    def run(self, prompts: Sequence[Prompt], *, wait_ready_s: float) -> list[Answer]: ...


def _parsed(line: bytes) -> Any:
    """What a line of JSON says; None if it says nothing."""
    try:
        return json.loads(line)
    except ValueError:
        return None


class Journal:
    """Answers so far, one JSON line each with the prompt's `index`, behind a line that tells of which prompts they are."""

    def __init__(self, out: Path, prompts: Sequence[Prompt]) -> None:
        """RequestError where no answers could be written."""
        if out.is_dir() or not out.name:
            raise RequestError(f"--out {out} is a folder; name a file for the answers")
        if not out.parent.is_dir():
            raise RequestError(
                f"--out {out}: the folder {out.parent} does not exist; make it, or name another file"
            )
        if not os.access(out.parent, os.W_OK):
            raise RequestError(f"--out {out}: the folder {out.parent} cannot be written; name another file")
        self.path = out.with_name(f"{out.name}.part")
        digest = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            digest.update(msgspec.json.encode(prompt))
        self._num_prompts = len(prompts)
        self._head = {"prompts": self._num_prompts, "digest": digest.hexdigest()}
        self._out = out
        self.num_damaged = 0
        """Lines that hold no answer to one of the prompts; known once it is read."""

    def read(self) -> dict[int, dict[str, Any]]:
        """Answers by index. A last line that was cut short counts as not written, a damaged one as no answer.

        RequestError for other prompts' answers, for what is no journal, and for answers that are whole already.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            if self._out.exists():
                raise RequestError(
                    f"{self._out} exists already; remove it to answer the prompts again, or give another --out"
                ) from None
            return {}
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be read ({error.strerror}); give another --out"
            ) from error
        whole = content.rfind(b"\n") + 1
        if not whole:  # stopped before anything was written
            self.path.unlink()
            return {}
        head, *lines = content[:whole].split(b"\n")[:-1]
        found = _parsed(head)
        if not isinstance(found, dict) or found.keys() != self._head.keys():
            raise RequestError(
                f"line 1 of {self.path} does not tell of which prompts its answers are, so it is damaged; "
                "remove it to begin anew, or give another --out"
            )
        if found != self._head:
            raise RequestError(
                f"{self.path} holds answers to other prompts; remove it to begin anew, or give another --out"
            )
        with self.path.open("r+b") as file:
            file.truncate(whole)
        entries = [entry for entry in map(_parsed, lines) if self._is_answer(entry)]
        self.num_damaged = len(lines) - len(entries)
        return {entry["index"]: entry for entry in entries}

    def _is_answer(self, entry: Any) -> bool:
        if not isinstance(entry, dict) or not ("token_ids" in entry or "error" in entry):
            return False
        index = entry.get("index")
        return isinstance(index, int) and 0 <= index < self._num_prompts

    def add(self, answers: dict[int, dict[str, Any]]) -> None:
        """Keep the answers of a batch; they are on disk when this returns. RequestError where they cannot be written."""
        is_new = not self.path.exists()
        entries = [self._head] if is_new else []
        entries += [{**answer, "index": index} for index, answer in answers.items()]
        try:
            with self.path.open("ab") as file:
                file.write(
                    "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()
                )
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be written ({error.strerror}); what it holds is kept, and the same command goes on from it"
            ) from error

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
    full_tier: int = 0,
    rule: Rule = "paper",
    wait_ready_s: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Answer every prompt that has no answer yet. Returns how many failed.

    tiers      sub-experts of each prompt, the full tier for whole experts
    full_tier  of the model that serves; 0 where its experts are whole, and all tiers are one
    """
    journal = Journal(out, prompts)
    done = journal.read()
    if done:
        say(f"{len(done)} of {len(prompts)} prompts were answered before")
    if journal.num_damaged:
        say(
            f"{journal.num_damaged} lines of {journal.path} are damaged; prompts whose answers they held are answered again"
        )
    waiting = [Waiting(index, tier) for index, tier in enumerate(tiers) if index not in done]
    measured: dict[tuple[int, int], float] = {}
    if len({prompt.tier for prompt in waiting}) > 1:  # else nothing is ever merged
        measured = measure(
            client, [prompt.tier for prompt in waiting], capacity, full_tier, clock, wait_ready_s
        )
        shown = ", ".join(f"{n} at K {tier} {s * 1e3:.1f} ms" for (n, tier), s in sorted(measured.items()))
        say(f"a token of a batch takes, measured: {shown}")
    tokens, began = 0, clock.now()
    while waiting:
        batch = next_batch(waiting, capacity, Profile(measured) if measured else None, rule=rule)
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
            f"{len(done)} of {len(prompts)} prompts; {len(batch.indices)}"
            + (f" at up to K {batch.tier}" if full_tier else "")
            + f" in {seconds:.1f} s; "
            f"{rate:.0f} tokens/s so far"
        )
    journal.finish(done)
    return sum("error" in answer for answer in done.values())


def measure(
    client: Submits, tiers: Sequence[int], capacity: int, full_tier: int, clock: Clock, wait_ready_s: float
) -> dict[tuple[int, int], float]:
    """(n, K) -> seconds for a token of each of n prompts, by short batches of one prompt, of half and of all that fit.

    A batch that brings nothing leaves no point.
    """
    found = {}
    for tier in some_of(sorted(set(tiers)), MOST_TIERS):
        options = {"max_tokens": PROBE_TOKENS, "ignore_eos": True}
        asked = options if tier == full_tier else {**options, "sub_experts": tier}
        for size in sorted({1, max(1, capacity // 2), capacity}):
            began = clock.now()
            answers = client.run([Prompt(prompt=PROBE, sampling=asked)] * size, wait_ready_s=wait_ready_s)
            came = sum(len(answer.token_ids) for answer in answers)
            if came:
                found[size, tier] = (clock.now() - began) * size / came
    return found


def some_of(values: Sequence[int], most: int) -> list[int]:
    """The first, the last, and as many between as `most` allows, evenly."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]
