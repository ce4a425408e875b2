"""Prompts from options and from files: what is wrong is named with its line, what is right is kept."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.client import Prompt
from edge_runtime.engine.request import SamplingParams
from edge_runtime.errors import EXIT_USER, RequestError
from edge_runtime.prompts import PROMPT_KEYS, SAMPLING_KEYS, prompt_from_options, prompts_from_file

GIVEN = {"max_tokens": 128, "temperature": 0.0}


def read(path, text: str | bytes, sampling=GIVEN, **options) -> list[Prompt]:
    path = path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    options = {"chat": False, "system": None, "trace": False} | options
    return [each.prompt for each in prompts_from_file(path, sampling, **options)]


def test_every_sampling_option_of_the_engine_may_stand_in_a_line():
    assert set(SAMPLING_KEYS) == set(SamplingParams.__struct_fields__)


# From options.


def test_a_text_is_sent_as_it_is():
    prompt = prompt_from_options(" Once\n", GIVEN, chat=False, system=None, trace=True)
    assert prompt == Prompt(prompt=" Once\n", sampling=GIVEN, trace=True)


def test_a_chat_has_the_text_as_its_users_turn_after_the_system_message():
    prompt = prompt_from_options("Hi", GIVEN, chat=True, system="Be short.", trace=False)
    assert prompt.messages == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
    ]
    assert prompt.prompt is None


def test_an_empty_text_and_a_system_message_without_chat_are_refused():
    with pytest.raises(RequestError, match="the prompt is empty"):
        prompt_from_options("", GIVEN, chat=False, system=None, trace=False)
    with pytest.raises(RequestError, match="add --chat"):
        prompt_from_options("x", GIVEN, chat=False, system="s", trace=False)


BAD_OPTIONS = {
    "a service that nobody sells": ({"service": "cheap"}, "service is 'cheap'; allowed is one of full"),
    "two tiers at once": (
        {"k": 2, "service": "full"},
        "says one of k, sub_experts, service, found k, service",
    ),
    "a temperature that is no number": ({"temperature": float("nan")}, "temperature is nan"),
    "an endless temperature": ({"temperature": float("inf")}, "temperature is inf"),
    "a temperature of hundreds of digits": ({"temperature": 10**400}, "temperature"),
    "a negative temperature": ({"temperature": -1}, "temperature is -1"),
    "a temperature that is text": ({"temperature": "hot"}, "temperature"),
    "a temperature that is a map": ({"temperature": {"a": 1}}, "temperature"),
    "no tokens": ({"max_tokens": 0}, "max_tokens is 0"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "more tokens than can be said": ({"max_tokens": 10**400}, "max_tokens is too large"),
    "a top_k of 65 bits": ({"top_k": 2**64}, "top_k is too large"),
    "a top_p of 0": ({"top_p": 0}, "top_p is 0"),
    "a seed of 70 bits": ({"seed": 2**70}, "seed is"),
    "a stop string that is a list": ({"stop": [["x"]]}, "stop"),
    "an empty stop string": ({"stop": [""]}, "stop is ''"),
    "a negative stop id": ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
    "too many logprobs": ({"logprobs": 21}, "logprobs is 21"),
    "an option nobody knows": ({"beams": 4}, "unknown option 'beams'"),
}


@pytest.mark.parametrize(("options", "said"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_options_out_of_range_are_refused_in_one_sentence(options, said):
    with pytest.raises(RequestError) as refused:
        prompt_from_options("x", GIVEN | options, chat=False, system=None, trace=False)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert refused.value.exit_code == EXIT_USER


# From files.


def test_a_lines_own_options_win_over_those_of_the_command_line(tmp_path):
    text = (
        '{"prompt": "a", "max_tokens": 5}\n{"prompt": "b"}\n{"prompt": "c", "temperature": 0.5, "seed": 3}\n'
    )
    a, b, c = read(tmp_path, text)
    assert a.sampling == GIVEN | {"max_tokens": 5}
    assert b.sampling == GIVEN
    assert c.sampling == GIVEN | {"temperature": 0.5, "seed": 3}


def test_a_stop_string_may_stand_alone(tmp_path):
    [prompt] = read(tmp_path, '{"prompt": "a", "stop": "END"}')
    assert prompt.sampling["stop"] == ["END"]


def test_empty_lines_notes_and_windows_line_ends_are_passed_over(tmp_path):
    text = b'\xef\xbb\xbf{"prompt": "a", "domain": "x", "note": {"any": [1]}}\r\n\r\n   \n{"prompt": "b"}\r\n'
    assert [prompt.prompt for prompt in read(tmp_path, text)] == ["a", "b"]


def test_ids_and_messages_are_kept_as_they_are(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    text = json.dumps({"prompt_ids": [1, 2]}) + "\n" + json.dumps({"messages": messages, "top_k": 3})
    ids, chat = read(tmp_path, text, chat=True, system="s")
    assert ids.prompt_ids == [1, 2] and ids.prompt is ids.messages is None
    assert chat.messages == messages and chat.sampling == GIVEN | {"top_k": 3}


def test_a_raw_prompt_of_a_file_becomes_a_chat_where_that_is_asked(tmp_path):
    [prompt] = read(tmp_path, '{"prompt": "Hi"}', chat=True, system="s", trace=True)
    assert [message["role"] for message in prompt.messages] == ["system", "user"] and prompt.trace


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
def test_every_text_survives_the_file_also_with_line_ends_of_unicode(tmp_path_factory, texts):
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in [*texts, "a\u2028b\x85c\x0cd"]]
    prompts = read(tmp_path_factory.mktemp("texts"), "\n".join(lines))
    assert [prompt.prompt for prompt in prompts] == [*texts, "a\u2028b\x85c\x0cd"]


BAD_LINES = {
    "no JSON": ("{prompt: x}", "not JSON"),
    "half of an object": ('{"prompt": "x"', "not JSON"),
    "two objects": ('{"prompt": "x"} {"prompt": "y"}', "not JSON that can be read: Extra data"),
    "a list": ('["x"]', "found a list, expected an object"),
    "a text": ('"x"', "found text, expected an object"),
    "nothing": ("null", "found null, expected an object"),
    "no prompt": ('{"max_tokens": 3}', "found none of prompt, messages, prompt_ids"),
    "a prompt that is nothing": ('{"prompt": null}', "found none of"),
    "two kinds of prompt": ('{"prompt": "x", "prompt_ids": [1]}', "found prompt and prompt_ids of"),
    "an empty prompt": ('{"prompt": ""}', "the prompt is empty"),
    "a prompt that is a number": ('{"prompt": 5}', "prompt is 5, expected a string"),
    "a prompt that is a long list": ('{"prompt": ' + json.dumps(["x" * 500]) + "}", "expected a string"),
    "messages that are a text": ('{"messages": "Hi"}', "messages is no list"),
    "messages that are texts": ('{"messages": ["Hi"]}', "messages is no list"),
    "ids that are no ids": ('{"prompt_ids": [1, -1]}', "prompt_ids is no list of token ids"),
    "ids that are true": ('{"prompt_ids": [true]}', "prompt_ids is no list of token ids"),
    "ids too large": ('{"prompt_ids": [2147483648]}', "prompt_ids is no list of token ids"),
    "ids that are a text": ('{"prompt_ids": "12"}', "prompt_ids is no list of token ids"),
    "a temperature that is NaN": ('{"prompt": "x", "temperature": NaN}', "temperature is nan"),
    "an endless temperature": ('{"prompt_ids": [1], "temperature": 1e999}', "temperature is inf"),
    "a number of 5000 digits": (
        '{"prompt": "x", "seed": ' + "1" * 5000 + "}",
        "not JSON that can be read: a number has more than 4300 digits",
    ),
    "a number of 400 digits": ('{"prompt": "x", "max_tokens": ' + "1" * 400 + "}", "max_tokens is too large"),
    "a nested bomb": ("[" * 100_000, "nested too deeply"),
    "a nested bomb in a prompt": ('{"prompt": ' + '{"a":' * 50_000, "nested too deeply"),
    "an option of the wrong kind": ('{"prompt": "x", "stop": 3}', "stop"),
    "options out of range beside messages": ('{"messages": [{}], "top_p": 2}', "top_p is 2"),
}


@pytest.mark.parametrize(("line", "said"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_in_one_sentence(tmp_path, line, said):
    with pytest.raises(RequestError) as refused:
        read(tmp_path, '{"prompt": "fine"}\n\n' + line + "\n")
    sentence = str(refused.value)
    assert "prompts.jsonl, line 3: " in sentence and said in sentence
    assert "\n" not in sentence and len(sentence) < 400


def test_all_bad_lines_of_a_file_are_told_up_to_twenty(tmp_path):
    with pytest.raises(RequestError) as refused:
        read(tmp_path, '{"prompt": "fine"}\n{}\n{"prompt": "x", "top_p": 2}\n' + "[]\n" * 40)
    lines = str(refused.value).splitlines()
    assert "line 2: found none of" in lines[0] and "line 3: top_p is 2" in lines[1]
    assert len(lines) == 21 and lines[-1] == "and 22 more lines"


def test_a_file_called_dash_is_standard_input(monkeypatch):
    lines = io.TextIOWrapper(io.BytesIO(b'{"prompt": "one"}\n{"prompt": "two"}\n'))
    monkeypatch.setattr("sys.stdin", lines)
    found = prompts_from_file(Path("-"), GIVEN, chat=False, system=None, trace=False)
    assert [(line, prompt.prompt) for line, prompt in found] == [(1, "one"), (2, "two")]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max-tokens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("temperatuer", "temperature"),
        ("tempperature", "temperature"),
        ("Seed", "seed"),
        ("stops", "stop"),
        ("promt_ids", "prompt_ids"),
        ("logprob", "logprobs"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_right_one(tmp_path, key, meant):
    with pytest.raises(RequestError, match=f"unknown key '{key}'; did you mean '{meant}'"):
        read(tmp_path, json.dumps({"prompt": "x", key: 1}))


@pytest.mark.parametrize(
    "key", ["domain", "id", "need", "step", "top_l", "model", "max", "role", "source", "n"]
)
def test_keys_of_ones_own_are_left_alone(tmp_path, key):
    assert len(read(tmp_path, json.dumps({"prompt": "x", key: 1}))) == 1


@pytest.mark.parametrize("key", [*SAMPLING_KEYS, *PROMPT_KEYS])
def test_no_right_key_is_taken_for_another(key):
    from edge_runtime.prompts import _is_near, _plain

    assert [other for other in (*SAMPLING_KEYS, *PROMPT_KEYS) if _is_near(_plain(key), _plain(other))] == [
        key
    ]


def test_a_file_that_is_not_there_a_folder_and_bytes_that_are_no_text_are_told(tmp_path):
    for path, said in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(RequestError, match=f"cannot be read: {said}"):
            prompts_from_file(path, GIVEN, chat=False, system=None, trace=False)
    with pytest.raises(RequestError, match="not UTF-8 text: .* at byte 12"):
        read(tmp_path, b'{"prompt": "\xff"}')
    with pytest.raises(RequestError, match="not UTF-8 text"):  # half of a surrogate pair, written out
        read(tmp_path, '{"prompt": "\ud800"}')


@pytest.mark.parametrize("text", ["", "\n\n", "   \n"])
def test_a_file_without_a_prompt_is_told(tmp_path, text):
    with pytest.raises(RequestError, match="has no line with a prompt"):
        read(tmp_path, text)


def test_a_system_message_without_chat_is_refused_also_for_files_of_messages(tmp_path):
    with pytest.raises(RequestError, match="add --chat"):
        read(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}', system="s")
