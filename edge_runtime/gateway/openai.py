"""OpenAI request bodies to prompts, answers to OpenAI response bodies. Values in, values out: knows no HTTP.

What a client asks and this runtime does not do is refused by name rather than dropped: the answer would be another one
than was asked for.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.client import Answer, Prompt
from edge_runtime.engine.request import ANY_VOCABULARY, SEED_MAX, check_options
from edge_runtime.errors import RequestError
from edge_runtime.model.json_file import kind_of
from edge_runtime.protocol import NAME_CHARS, TokenLogprobs

MAX_CHOICES = 16  # of one request, prompts times `n`
UNLIMITED = 1 << 30  # tokens: the context ends the answer before
COMPLETION_TOKENS = 16  # of /v1/completions where the client names no number, as in OpenAI's API

PASSED_ON = (
    "temperature",
    "top_p",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "k",
    "sub_experts",
    "service",
    "quality",
)
IGNORED = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
    }
)
"""What changes no token of the answer."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
"""What this runtime does not do, with the values that ask for nothing."""
KNOWN = frozenset(
    {
        "model",
        "user",
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "n",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        *PASSED_ON,
    }
)


@dataclass(frozen=True)
class Ask:
    """What one HTTP request asks: its prompts, `n` answers to each, one after another."""

    prompts: tuple[Prompt, ...]
    model: str
    is_chat: bool
    streams: bool
    includes_usage: bool
    num_logprobs: int | None


def read_ask(body: object, *, is_chat: bool) -> Ask:
    """Read the body of /v1/chat/completions or /v1/completions. RequestError names the field that is wrong."""
    if not isinstance(body, dict):
        raise RequestError(f"the body is {kind_of(body)}, expected an object")
    _refuse_unknown(body)
    _refuse_half_characters(body)
    num_choices = _whole(body, "n", 1, 1, MAX_CHOICES)
    options = _options(body, is_chat=is_chat)
    asked = _chat(body) if is_chat else _texts(body)
    if len(asked) * num_choices > MAX_CHOICES:
        raise RequestError(
            f"{len(asked)} prompts with n = {num_choices} are {len(asked) * num_choices} answers; "
            f"at most {MAX_CHOICES} fit in one request",
            "n" if num_choices > 1 else "prompt",
        )
    check_options(options)
    prompts = [
        Prompt(**prompt, sampling=_of_choice(options, choice), user=_text(body, "user"))
        for prompt in asked
        for choice in range(num_choices)
    ]
    return Ask(
        tuple(prompts),
        _text(body, "model"),
        is_chat,
        _bool(body, "stream"),
        _includes_usage(body),
        options.get("logprobs"),
    )


def _of_choice(options: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """Several answers to one prompt with one seed would be one answer several times."""
    seed = options.get("seed")
    if seed is None:
        return dict(options)
    return {**options, "seed": seed + choice if seed + choice <= SEED_MAX else seed - choice}


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise RequestError(f"{name} is not supported; leave it out", name)
        elif name not in KNOWN and name not in IGNORED:
            raise RequestError(f"unknown field {name!r}; the fields are {', '.join(sorted(KNOWN))}", name)


def _refuse_half_characters(body: Mapping[str, Any]) -> None:
    """JSON can escape half of a surrogate pair, which no other encoding of text has."""
    for name, value in body.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{name} is not valid Unicode text: {error.reason}", name) from error


def _options(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any]:
    options = {name: body[name] for name in PASSED_ON if body.get(name) is not None}
    options.setdefault("temperature", 1.0)  # OpenAI's default; this runtime's own is 0
    limits = [name for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    options["max_tokens"] = body[limits[0]] if limits else (UNLIMITED if is_chat else COMPLETION_TOKENS)
    stop = body.get("stop")
    if stop is not None:
        options["stop"] = [stop] if isinstance(stop, str) else stop
    logprobs = body.get("logprobs")
    if is_chat:
        num_best = _whole(body, "top_logprobs", 0, 0, 20)
        if _bool(body, "logprobs"):
            options["logprobs"] = num_best
        elif num_best:
            raise RequestError("top_logprobs is given without logprobs; set logprobs to true", "top_logprobs")
    elif logprobs is not None and logprobs is not False:
        options["logprobs"] = _whole(body, "logprobs", 0, 0, 20)
    return options


def _chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            "messages is missing, empty or no list; expected objects with `role` and `content`", "messages"
        )
    return [{"messages": [_message(number, message) for number, message in enumerate(messages)]}]


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{number}] is no object with a `role`", "messages")
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": _content(number, message.get("content"))}


def _content(number: int, content: object) -> str:
    """Text as it is, or the parts of it that some clients send."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"messages[{number}].content is {kind_of(content)}, expected text", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            what = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise RequestError(
                f"messages[{number}].content has a part of type {what!r}; only text is supported", "messages"
            )
        texts.append(part["text"])
    return "".join(texts)


def _texts(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One prompt or several, as text or as token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        prompts = [prompt] if all(type(entry) is int for entry in prompt) else prompt
    else:
        raise RequestError(
            "prompt is missing or empty; expected text, token ids, or a list of either", "prompt"
        )
    return [_one_text(entry) for entry in prompts]


def _one_text(entry: object) -> dict[str, Any]:
    if isinstance(entry, str):
        if not entry:
            raise RequestError("the prompt is empty; give at least one character", "prompt")
        return {"prompt": entry}
    if isinstance(entry, list) and entry and all(type(i) is int and 0 <= i < ANY_VOCABULARY for i in entry):
        return {"prompt_ids": entry}
    raise RequestError("prompt has an entry that is neither text nor a list of token ids", "prompt")


def _includes_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise RequestError(f"stream_options is {kind_of(options)}, expected an object", "stream_options")
    return _bool(options, "include_usage")


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} is {value!r:.40}; allowed is a whole number from {low} to {high}", name)
    return value


def _bool(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {value!r:.40}; allowed is true or false", name)
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(f"{name} is {kind_of(value)}, expected text", name)
    if len(value) > NAME_CHARS:
        raise RequestError(f"{name} has {len(value)} characters; allowed are at most {NAME_CHARS}", name)
    return value


TokenText = Callable[[int], str]


class Responder:
    """Response bodies for one HTTP request.

    created_s    seconds since 1970
    token_text   what one token says, for logprobs
    """

    def __init__(
        self, ask: Ask, *, request_id: str, model: str, created_s: int, token_text: TokenText
    ) -> None:
        self._ask = ask
        self._head = {
            "id": ("chatcmpl-" if ask.is_chat else "cmpl-") + request_id,
            "created": created_s,
            "model": model,
        }
        self._token_text = token_text
        self._num_chars = [0] * len(ask.prompts)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body where nothing is streamed. All answers have finished."""
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        return {
            **self._head,
            "object": kind,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage(answers),
            "edge_runtime": [_own(answer) for answer in answers],
        }

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        text = {"message": {"role": "assistant", "content": answer.text}}
        return {
            "index": index,
            **(text if self._ask.is_chat else {"text": answer.text}),
            "logprobs": self._logprobs(index, answer.logprobs),
            "finish_reason": finish_reason(answer),
        }

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that opens a streamed answer of a chat."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def part(self, index: int, text: str, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """A chunk with what has just come."""
        return self._chunk(index, {"content": text}, self._logprobs(index, logprobs))

    def last(self, index: int, answer: Answer) -> dict[str, Any]:
        """The chunk that says why an answer ended, and what it cost."""
        return {**self._chunk(index, {}, finish=finish_reason(answer)), "edge_runtime": _own(answer)}

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk after the last, for clients that ask for it."""
        return {**self._head, "object": self._chunkkind_of(), "choices": [], "usage": usage(answers)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: object = None, finish: str | None = None
    ) -> dict[str, Any]:
        said = {"delta": delta} if self._ask.is_chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head, "object": self._chunkkind_of(), "choices": [choice]}
        return {**chunk, "usage": None} if self._ask.includes_usage else chunk

    def _chunkkind_of(self) -> str:
        return "chat.completion.chunk" if self._ask.is_chat else "text_completion"

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self._ask.num_logprobs is None or not entries:
            return None
        if self._ask.is_chat:
            return {"content": [self._chat_entry(entry) for entry in entries], "refusal": None}
        texts = [self._token_text(entry.token_id) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._num_chars[index])
            self._num_chars[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{self._token_text(i): logprob for i, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        one = self._one(entry.token_id, entry.logprob)
        return {**one, "top_logprobs": [self._one(token_id, logprob) for token_id, logprob in entry.top]}

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def finish_reason(answer: Answer) -> str:
    """OpenAI's word for why an answer ended: `stop` or `length`."""
    reason = answer.finished.finish_reason if answer.finished is not None else "stop"
    return "length" if reason == "length" else "stop"


def usage(answers: Iterable[Answer]) -> dict[str, Any]:
    """Tokens read and written; a prompt that is answered `n` times is read as often."""
    ended = [answer.finished for answer in answers if answer.finished is not None]
    read, written = sum(done.prompt_tokens for done in ended), sum(done.completion_tokens for done in ended)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in ended)},
    }


def _own(answer: Answer) -> dict[str, Any]:
    """What no other server tells: where the answer was computed, how fast, and what quality it cost."""
    told = answer.as_json()
    return {key: told[key] for key in ("home", "nodes", "bill", "timing") if key in told}


def models(model: str, created_s: int) -> dict[str, Any]:
    """The body of /v1/models."""
    return {"object": "list", "data": [model_entry(model, created_s)]}


def model_entry(model: str, created_s: int) -> dict[str, Any]:
    """The body of /v1/models/NAME."""
    return {"id": model, "object": "model", "created": created_s, "owned_by": "edge-runtime"}


def error(message: str, kind: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """The body of everything that fails. `field` is what of the request is wrong."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
