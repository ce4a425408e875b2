"""From what a person typed, or a file of JSON lines, to prompts. Names the line of whatever is wrong."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_runtime.client import Prompt
from edge_runtime.engine.request import ANY_VOCABULARY, check_options
from edge_runtime.errors import RequestError
from edge_runtime.model.json_file import kind_of
from topology.errors import why_unread

PROMPT_KEYS = ("prompt", "messages", "prompt_ids")
SAMPLING_KEYS = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "quality",
    "k",
    "sub_experts",
    "service",
)
STDIN = "-"
SHOWN_FAULTS = 20  # lines of a file that are told at a time
SYSTEM_WITHOUT_CHAT = "--system is a chat's first message; add --chat"


def prompt_from_options(
    text: str, sampling: Mapping[str, Any], *, chat: bool, system: str | None, trace: bool
) -> Prompt:
    """One prompt of the command line, raw or as the user's turn of a chat. RequestError for what cannot be meant."""
    check_options(sampling)
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    if system is not None and not chat:
        raise RequestError(SYSTEM_WITHOUT_CHAT)
    if not chat:
        return Prompt(prompt=text, sampling=dict(sampling), trace=trace)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return Prompt(messages=messages, sampling=dict(sampling), trace=trace)


class Numbered(NamedTuple):
    """A prompt of a file, and the line that it stands in, from 1."""

    line: int
    prompt: Prompt


def prompts_from_file(
    path: Path, sampling: Mapping[str, Any], *, chat: bool, system: str | None, trace: bool
) -> list[Numbered]:
    """Every line of a file (`-`: of standard input) of JSON objects; its own options win over those of the command line.

    Keys: one of prompt, messages, prompt_ids, and any sampling option. Unknown keys are left alone, since such files
    carry notes of their own, but a misspelt option would be lost silently: so a key one letter off is refused.
    A line ends with a line feed; JSON allows the other line ends of Unicode inside a string.
    """
    if system is not None and not chat:
        raise RequestError(SYSTEM_WITHOUT_CHAT)
    try:
        content = sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise RequestError(f"prompt file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt file {path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    prompts, faults = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found = _prompt_from_line(line, sampling, chat=chat, system=system, trace=trace)
                prompts.append(Numbered(number, found))
            except RequestError as error:
                faults.append(f"{path}, line {number}: {error}")
    refuse_faults(faults)
    if not prompts:
        raise RequestError(f"prompt file {path} has no line with a prompt")
    return prompts


def refuse_faults(faults: Sequence[str]) -> None:
    """RequestError with what is wrong with lines of a file, if anything is."""
    if faults:
        more = [f"and {len(faults) - SHOWN_FAULTS} more lines"] if len(faults) > SHOWN_FAULTS else []
        raise RequestError(faults[0], more=[*faults[1:SHOWN_FAULTS], *more])


def _prompt_from_line(
    line: str, sampling: Mapping[str, Any], *, chat: bool, system: str | None, trace: bool
) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON that can be read: {why_unread(error)}") from error
    if not isinstance(entry, dict):
        raise RequestError(f"found {kind_of(entry)}, expected an object with `prompt`")
    _refuse_misspelt(entry)
    given = [key for key in PROMPT_KEYS if entry.get(key) is not None]
    if len(given) != 1:
        raise RequestError(
            f"found {' and '.join(given) or 'none'} of {', '.join(PROMPT_KEYS)}, expected exactly one"
        )
    options = dict(sampling) | {key: entry[key] for key in SAMPLING_KEYS if key in entry}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    if "prompt" in given:
        if not isinstance(entry["prompt"], str):
            raise RequestError(f"prompt is {entry['prompt']!r:.40}, expected a string")
        return prompt_from_options(entry["prompt"], options, chat=chat, system=system, trace=trace)
    check_options(options)
    if "messages" in given:
        messages = entry["messages"]
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RequestError("messages is no list of objects with `role` and `content`")
        return Prompt(messages=messages, sampling=options, trace=trace)
    ids = entry["prompt_ids"]
    if not isinstance(ids, list) or not all(
        type(token_id) is int and 0 <= token_id < ANY_VOCABULARY for token_id in ids
    ):
        raise RequestError("prompt_ids is no list of token ids")
    return Prompt(prompt_ids=ids, sampling=options, trace=trace)


def _refuse_misspelt(entry: Mapping[str, Any]) -> None:
    known = (*SAMPLING_KEYS, *PROMPT_KEYS)
    for key in entry:
        meant = next((other for other in known if _is_near(_plain(key), _plain(other))), None)
        if key not in known and meant is not None:
            raise RequestError(f"unknown key {key!r}; did you mean {meant!r}?")


def _is_near(word: str, known: str) -> bool:
    """Equal, or one letter added, left out, changed or swapped with its neighbour in a word of more than four."""
    if word == known:
        return True
    if len(known) <= 4 or abs(len(word) - len(known)) > 1:
        return False
    begin = next((i for i, (a, b) in enumerate(zip(word, known, strict=False)) if a != b), len(known))
    rest, other = word[begin:], known[begin:]
    swapped = rest[:2] == other[1::-1] and rest[2:] == other[2:]
    return swapped or rest[1:] == other[1:] or rest[1:] == other or rest == other[1:]


def _plain(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "").rstrip("s")
