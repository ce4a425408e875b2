"""`batch`: a file of prompts through a cluster, tier by tier, into a file of answers; goes on where it was stopped.

Prompts take the places of answers as those end, tier by tier. Every answer is written to a journal beside the output the
moment it ends. When all are there, the output is written in the order of the prompts and the journal goes; it stays while
prompts are left that the cluster failed to answer, and the next run asks those again. What remains beside an output that is
whole is a line that says of which prompts it is, so that the same command knows that nothing is left to do.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import Clock
from edge_runtime.elastic.batching import Flow, Queue, Rule
from edge_runtime.errors import RequestError
from topology.units import counted

PROBE = "Once upon a time"
PROBE_TOKENS = 8  # of each answer that is only measured
REPORT_S = 2.0  # between two lines of progress
MOST_TIERS = 4  # that are measured before; those between are taken in straight lines


class Submits(Protocol):
    """What of a client is needed."""

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        wait_ready_s: float,
        on_ended: Callable[[list[Answer]], Sequence[Prompt]] = ...,
    ) -> list[Answer]: ...


def _parsed(line: bytes) -> Any:
    """What a line of JSON says; None if it says nothing."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Unanswered(NamedTuple):
    """Prompts that failed: all of them, and those of which the cluster was at fault, which may work another time."""

    total: int
    of_cluster: int


class Journal:
    """Answers so far, one JSON line each with the prompt's `index`, behind a line that tells of which prompts they are
    answers, and who gave them.
    """

    def __init__(
        self, out: Path, prompts: Sequence[Prompt], served_by: Mapping[str, str], source: Path | None = None
    ) -> None:
        """RequestError where no answers could be written.

        served_by  what answers depend on besides the prompts, by name
        source     the file of the prompts, which must not be written over
        """
        if out.is_dir() or not out.name:
            raise RequestError(f"--out {out} is a folder; name a file for the answers")
        if not out.parent.is_dir():
            raise RequestError(
                f"--out {out}: the folder {out.parent} does not exist; make it, or name another file"
            )
        if not os.access(out.parent, os.W_OK):
            raise RequestError(f"--out {out}: the folder {out.parent} cannot be written; name another file")
        self.path = out.with_name(f"{out.name}.part")
        self._seal = out.with_name(f"{out.name}.done")
        if source is not None and source.resolve() in (
            path.resolve() for path in (out, self.path, self._seal)
        ):
            raise RequestError(
                f"--out {out}: {source} holds the prompts, and {out}, {self.path.name} and {self._seal.name} will be written; "
                "name another file"
            )
        digest = hashlib.blake2b(digest_size=16)
        for prompt in prompts:
            digest.update(msgspec.json.encode(prompt))
        self._num_prompts = len(prompts)
        self._head: dict[str, Any] = {
            "prompts": self._num_prompts,
            "digest": digest.hexdigest(),
            "served_by": dict(served_by),
        }
        self._out = out
        self.num_damaged = 0
        """Lines that hold no answer to one of the prompts; known once it is read, which takes them out."""

    def finished(self) -> Unanswered | None:
        """How many prompts failed in the output, if it is whole and of these prompts, and was not touched; else None."""
        if self.path.exists():
            return None
        try:
            sealed, content = _parsed(self._seal.read_bytes()), self._out.read_bytes()
        except OSError:
            return None
        if sealed != self._sealed(content):
            return None
        return Unanswered(sum("error" in entry for entry in map(_parsed, content.splitlines())), 0)

    def _sealed(self, content: bytes) -> dict[str, Any]:
        """What is kept beside an output: of which prompts its answers are, and what it held."""
        return {**self._head, "answers": hashlib.blake2b(content, digest_size=16).hexdigest()}

    def read(self, *, mends: bool = True) -> dict[int, dict[str, Any]]:
        """Answers by index. A last line that was cut short counts as not written, a damaged one as no answer.

        mends  whether both are taken out of the file

        RequestError for answers to other prompts or of another model, for what is no journal, and for answers that are
        whole already.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            if self._out.exists():
                raise RequestError(
                    f"{self._out} exists already, and is not known to hold this cluster's answers to these prompts; "
                    "remove it to answer the prompts again, or give another --out"
                ) from None
            return {}
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be read ({error.strerror}); give another --out"
            ) from error
        whole = content.rfind(b"\n") + 1
        if not whole:  # stopped before anything was written
            if mends:
                self.path.unlink()
            return {}
        head, *lines = content[:whole].split(b"\n")[:-1]
        found = _parsed(head)
        if not isinstance(found, dict) or found.keys() != self._head.keys():
            raise RequestError(
                f"line 1 of {self.path} does not tell of which prompts its answers are, so it is damaged; "
                "remove it to begin anew, or give another --out"
            )
        remedy = "remove it to begin anew, or give another --out"
        if any(found[name] != self._head[name] for name in ("prompts", "digest")):
            raise RequestError(f"{self.path} holds answers to other prompts, or with other options; {remedy}")
        if changed := _changes(found["served_by"], self._head["served_by"]):
            raise RequestError(
                f"{self.path} holds answers of a cluster that was another one: {changed}; {remedy}"
            )
        parsed = [(line, entry) for line in lines if self._is_answer(entry := _parsed(line))]
        self.num_damaged = len(lines) - len(parsed)
        if mends and (self.num_damaged or whole < len(content)):
            kept = b"".join(line + b"\n" for line in (head, *(line for line, _ in parsed)))
            try:
                _replace(self.path, kept)
            except OSError as error:
                raise RequestError(
                    f"{self.path} cannot be written ({error.strerror}); give another --out"
                ) from error
        return {entry["index"]: entry for _, entry in parsed}

    def _is_answer(self, entry: Any) -> bool:
        if not isinstance(entry, dict) or not ("token_ids" in entry or "error" in entry):
            return False
        index, token_ids = entry.get("index"), entry.get("token_ids", [])
        if type(index) is not int or not 0 <= index < self._num_prompts:
            return False
        return isinstance(token_ids, list) and all(type(token) is int for token in token_ids)

    def add(self, answers: dict[int, dict[str, Any]]) -> None:
        """Keep the answers of a batch; they are on disk when this returns. RequestError where they cannot be written."""
        is_new = not self.path.exists()
        entries = [self._head] if is_new else []
        entries += [{**answer, "index": index} for index, answer in answers.items()]
        try:
            with self.path.open("ab") as file:
                file.write(
                    "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode(
                        errors="replace"
                    )
                )
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RequestError(
                f"{self.path} cannot be written ({error.strerror}); what it holds is kept, and the same command goes on from it"
            ) from error

    def finish(self, answers: dict[int, dict[str, Any]], *, keep: bool = False) -> None:
        """Write the output, a line for each prompt in order, and forget the journal unless it is to be gone on with.

        RequestError where it cannot be written; the journal stays then.
        """
        lines = (json.dumps(answers[index], ensure_ascii=False) + "\n" for index in sorted(answers))
        content = "".join(lines).encode(errors="replace")
        try:
            _replace(self._out, content)
            if not keep:
                with suppress(OSError):  # without it the same command is told that the output is there
                    _replace(self._seal, json.dumps(self._sealed(content)).encode() + b"\n")
        except OSError as error:
            raise RequestError(
                f"{self._out} cannot be written ({error.strerror}); all answers are kept in {self.path}, "
                "and the same command writes them once it can"
            ) from error
        if not keep:
            self.path.unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a file as a whole: a process that is killed leaves the old one. OSError where that cannot be."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()
        raise


def _changes(before: Any, now: Mapping[str, str]) -> str:
    """What differs, in words; empty if nothing does."""
    was = before if isinstance(before, dict) else {}
    return ", ".join(
        f"{name} was {was.get(name, 'not there')}, is {now.get(name, 'not there')}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name) != now.get(name)
    )


def run_offline(
    client: Submits,
    prompts: Sequence[Prompt],
    tiers: Sequence[int],
    out: Path,
    clock: Clock,
    *,
    capacity: int,
    served_by: Mapping[str, str] = MappingProxyType({}),
    full_tier: int = 0,
    rule: Rule = "paper",
    wait_ready_s: float = 60.0,
    say: Callable[[str], None] = lambda line: None,
) -> Unanswered:
    """Answer every prompt that has no answer yet, or failed before. Returns how many failed.

    tiers      sub-experts of each prompt, the full tier for whole experts
    served_by  as of `Journal`
    full_tier  of the model that serves; 0 where its experts are whole, and all tiers are one
    """
    journal = Journal(out, prompts, served_by)
    before = journal.read()
    done = {index: answer for index, answer in before.items() if "error" not in answer}
    if before:
        again = len(before) - len(done)
        more = f", and {again} failed and {'is' if again == 1 else 'are'} asked again" if again else ""
        say(f"{len(done)} of {counted(len(prompts), 'prompt')} answered before{more}")
    if journal.num_damaged:
        lines, held = counted(journal.num_damaged, "line"), "it" if journal.num_damaged == 1 else "they"
        be = "was" if journal.num_damaged == 1 else "were"
        say(
            f"{lines} of {journal.path} {be} damaged and {be} taken out; prompts whose answers {held} held are answered again"
        )
    queue = Queue({index: tier for index, tier in enumerate(tiers) if index not in done})
    measured: dict[tuple[int, int], float] = {}
    if len(queue.tiers) > 1:  # else nothing is ever merged
        measured = measure(client, queue.tiers, capacity, full_tier, clock, wait_ready_s)
        shown = ", ".join(f"{n} at K {tier} {s * 1e3:.1f} ms" for (n, tier), s in sorted(measured.items()))
        say(f"a token of a batch takes, measured: {shown}")
    flow = Flow(queue, tiers, measured, capacity, rule=rule)
    place_of: dict[int, int] = {}  # by identity: the same prompt may stand in several lines
    began = said_s = clock.now()
    tokens = 0

    def begun(now: float) -> list[Prompt]:
        found = [(place, copy(prompts[place])) for place in flow.next(now)]
        place_of.update({id(prompt): place for place, prompt in found})
        return [prompt for _, prompt in found]

    def following(ended: Sequence[Answer]) -> list[Prompt]:
        nonlocal said_s, tokens
        now, found, ran = clock.now(), {}, flow.tier
        for answer in ended:
            place = place_of.pop(id(answer.prompt))
            flow.ended(place, len(answer.token_ids))
            found[place] = {**answer.as_json(), "index": place}
            tokens += len(answer.token_ids)
        journal.add(found)
        done.update(found)
        more = begun(now)
        if now - said_s >= REPORT_S or flow.tier != ran:  # nothing that runs is tier 0
            said_s = now
            run = "run" if len(flow.running) > 1 else "runs"
            beside = (
                f"{len(flow.running)} {run} at up to K {flow.tier}; " if full_tier and flow.running else ""
            )
            rate = tokens / max(now - began, 1e-9)
            say(f"{len(done)} of {counted(len(prompts), 'prompt')}; {beside}{rate:.0f} tokens/s so far")
        return more

    client.run(begun(began), wait_ready_s=wait_ready_s, on_ended=following)
    errors = [answer["error"] for answer in done.values() if "error" in answer]
    failed = Unanswered(len(errors), sum(error.get("kind") != "user" for error in errors))
    journal.finish(done, keep=bool(failed.of_cluster))
    return failed


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
