"""Bodies in, prompts out; answers in, bodies out."""

from typing import Any

import pytest

from edge_runtime.client import Answer, Prompt
from edge_runtime.errors import RequestError
from edge_runtime.gateway.openai import MAX_CHOICES, UNLIMITED, Responder, read_ask
from edge_runtime.protocol import Finished, TokenLogprobs

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Hello", **fields}


def test_a_chat_becomes_one_prompt_with_openai_defaults() -> None:
    ask = read_ask(chat(), is_chat=True)
    [prompt] = ask.prompts
    assert prompt.messages == HELLO
    assert prompt.sampling == {"temperature": 1.0, "max_tokens": UNLIMITED}
    assert (ask.model, ask.streams, ask.includes_usage, ask.num_logprobs) == ("m", False, False, None)


def test_text_parts_are_joined_and_a_developer_is_a_system() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    ask = read_ask(chat(messages=[{"role": "developer", "content": parts}, *HELLO]), is_chat=True)
    assert ask.prompts[0].messages == [{"role": "system", "content": "Be brief."}, *HELLO]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one", [{"prompt": "one"}]),
        (["one", "two"], [{"prompt": "one"}, {"prompt": "two"}]),
        ([1, 2], [{"prompt_ids": [1, 2]}]),
        ([[1], [2, 3]], [{"prompt_ids": [1]}, {"prompt_ids": [2, 3]}]),
    ],
)
def test_a_completion_takes_text_or_ids_one_or_several(prompt: Any, expected: list[dict[str, Any]]) -> None:
    found = read_ask(text(prompt=prompt), is_chat=False).prompts
    sampling = {"temperature": 1.0, "max_tokens": 16}
    assert list(found) == [Prompt(**entry, sampling=sampling) for entry in expected]


def test_several_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    ask = read_ask(text(prompt=["a", "b"], n=2, seed=7), is_chat=False)
    assert [(prompt.prompt, prompt.sampling["seed"]) for prompt in ask.prompts] == [
        ("a", 7),
        ("a", 8),
        ("b", 7),
        ("b", 8),
    ]


def test_options_are_passed_on() -> None:
    ask = read_ask(
        chat(max_completion_tokens=5, stop="x", logprobs=True, top_logprobs=3, min_p=0.1, stream=True),
        is_chat=True,
    )
    assert ask.prompts[0].sampling == {
        "temperature": 1.0,
        "max_tokens": 5,
        "stop": ["x"],
        "logprobs": 3,
        "min_p": 0.1,
    }
    assert ask.streams and ask.num_logprobs == 3


def test_the_largest_seed_still_gives_each_answer_its_own() -> None:
    ask = read_ask(text(n=2, seed=2**63 - 1), is_chat=False)
    assert [prompt.sampling["seed"] for prompt in ask.prompts] == [2**63 - 1, 2**63 - 2]


def test_a_budget_of_quality_is_spent_from_the_users_ledger() -> None:
    [prompt] = read_ask(chat(user="ann", quality="balanced"), is_chat=True).prompts
    assert (prompt.user, prompt.sampling["quality"]) == ("ann", "balanced")


def test_what_asks_for_nothing_is_no_fault() -> None:
    read_ask(chat(user="me", frequency_penalty=0, tools=[], response_format={"type": "text"}), is_chat=True)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "a list, expected an object"),
        (chat(messages=[]), "messages is missing, empty"),
        (chat(messages=["hello"]), r"messages\[0\] is no object"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "only text is supported"),
        (chat(messages=[{"role": "user", "content": 3}]), r"messages\[0\].content is a number"),
        (chat(n=0), "n is 0"),
        (chat(n=MAX_CHOICES + 1), "n is 17"),
        (chat(n=True), "n is True"),
        (chat(temprature=1), "unknown field 'temprature'"),
        (chat(temperature=-1), "temperature is -1"),
        (chat(temperature="hot"), "temperature is 'hot'; allowed is a number"),
        (chat(stop=[1]), r"stop is \[1\]; allowed is text"),
        (chat(user="\ud800"), "user is not valid Unicode"),
        (chat(user="u" * 257), "user has 257 characters; allowed are at most 256"),
        (chat(quality=True), "quality is True; allowed is a number or text"),
        (chat(quality="0.5"), 'quality is \'0.5\'; allowed is "exact", "balanced"'),
        (chat(quality=float("nan")), "quality is nan; allowed is"),
        (chat(quality=-0.1), "quality is -0.1; allowed is"),
        (chat(quality=1e300), "quality is 1e[+]300; allowed is"),
        (chat(messages=[{"role": "user", "content": "a\ud800"}]), "messages is not valid Unicode"),
        (chat(top_p=0), "top_p is 0"),
        (chat(frequency_penalty=0.5), "frequency_penalty is not supported"),
        (chat(tools=[{"type": "function"}]), "tools is not supported"),
        (chat(top_logprobs=2), "without logprobs"),
        (chat(logprobs=True, top_logprobs=21), "top_logprobs is 21"),
        (chat(stream="yes"), "stream is 'yes'"),
        (chat(stream_options=3), "stream_options is a number"),
        (chat(max_tokens=0), "max_tokens is 0"),
        (chat(stop=["a"] * 17), "stop has 17 entries"),
        (chat(model=3), "model is a number"),
        (chat(seed=2**70), "seed"),
        (chat(max_tokens=10**23), "max_tokens is too large"),
        (chat(sub_experts=10**23), "sub_experts is too large"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        read_ask(body, is_chat=True)
    assert refused.value.field is None if isinstance(body, list) else refused.value.field in body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt is missing"),
        (text(prompt=[]), "prompt is missing or empty"),
        (text(prompt=""), "the prompt is empty"),
        (text(prompt=["a", 1]), "neither text nor"),
        (text(prompt=[[-1]]), "neither text nor"),
        (text(prompt=["a"] * 9, n=2), "18 answers"),
        (text(echo=True), "echo is not supported"),
        (text(best_of=2), "best_of is not supported"),
        (text(logprobs=30), "logprobs is 30"),
    ],
)
def test_a_completion_that_cannot_be_served_is_refused_by_name(body: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_ask(body, is_chat=False)


def answered(words: str = "Hi there", reason: str = "stop") -> Answer:
    entries = [TokenLogprobs(1, -0.5, [(1, -0.5), (2, -1.0)]), TokenLogprobs(2, -0.25, [(2, -0.25)])]
    finished = Finished("r", reason, prompt_tokens=4, completion_tokens=2, cached_tokens=1)  # type: ignore[arg-type]
    return Answer("r", Prompt(), 0.0, text=words, token_ids=[1, 2], logprobs=entries, finished=finished)


def responder(body: dict[str, Any], *, is_chat: bool) -> Responder:
    ask = read_ask(body, is_chat=is_chat)
    return Responder(
        ask, request_id="1f", model="m", created_s=99, token_text={1: "Hi", 2: " there"}.__getitem__
    )


def test_a_whole_chat_has_text_reason_usage_and_logprobs() -> None:
    body = responder(chat(logprobs=True, top_logprobs=2), is_chat=True).whole([answered()])
    assert (body["id"], body["object"], body["created"], body["model"]) == (
        "chatcmpl-1f",
        "chat.completion",
        99,
        "m",
    )
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi there"}
    assert choice["finish_reason"] == "stop"
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("Hi", -0.5, [72, 105])
    assert [entry["token"] for entry in first["top_logprobs"]] == ["Hi", " there"]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_completion_tells_where_each_token_begins_also_across_chunks() -> None:
    streamed = responder(text(logprobs=2, stream=True), is_chat=False)
    entries = answered().logprobs
    offsets = [
        streamed.part(0, "", [entry])["choices"][0]["logprobs"]["text_offset"]
        for entry in (entries[0], entries[1])
    ]
    assert offsets == [[0], [2]]
    whole = responder(text(logprobs=2), is_chat=False).whole([answered(reason="length")])["choices"][0]
    assert whole["text"] == "Hi there" and whole["finish_reason"] == "length"
    assert whole["logprobs"]["tokens"] == ["Hi", " there"]
    assert whole["logprobs"]["top_logprobs"][0] == {"Hi": -0.5, " there": -1.0}


def test_chunks_carry_a_null_usage_only_where_usage_comes_at_the_end() -> None:
    with_usage = responder(chat(stream=True, stream_options={"include_usage": True}), is_chat=True)
    assert with_usage.part(0, "Hi", [])["usage"] is None
    assert with_usage.usage_chunk([answered()])["usage"]["total_tokens"] == 6
    assert "usage" not in responder(chat(stream=True), is_chat=True).part(0, "Hi", [])
