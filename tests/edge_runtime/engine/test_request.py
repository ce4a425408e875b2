"""What a user may ask for, and what a refusal says."""

import math

import pytest

from edge_runtime.engine.request import Request, SamplingParams, check_params, check_prompt, read_params
from edge_runtime.errors import RequestError


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 1},
        {"max_tokens": 10**9},
        {"temperature": 0},
        {"temperature": 1e-30},
        {"top_k": 10**6},
        {"top_p": 1e-9},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"stop": ("x",) * 16},
        {"stop_token_ids": (0, 99)},
        {"logprobs": 0},
        {"logprobs": 20},
        {"ignore_eos": True},
    ],
)
def test_values_at_the_edge_are_allowed(options):
    check_params(SamplingParams(**options), 100)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", 1.5, "whole number"),
        ("max_tokens", True, "whole number"),
        ("max_tokens", None, "whole number"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", 10**400, "finite"),
        ("temperature", "hot", "finite number"),
        ("temperature", True, "finite number"),
        ("top_k", -1, "at least 0"),
        ("top_k", 1.0, "whole number"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "above 0 and at most 1"),
        ("top_p", math.nan, "finite"),
        ("min_p", -0.01, "between 0 and 1"),
        ("min_p", 1.01, "between 0 and 1"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", math.inf, "finite"),
        ("seed", 2**63, str(2**63 - 1)),
        ("seed", -(2**63) - 1, str(-(2**63))),
        ("seed", "7", "whole number"),
        ("logprobs", 21, "0 to 20"),
        ("logprobs", -1, "0 to 20"),
        ("stop", "abc", "a list"),
        ("stop_token_ids", (100,), "0 to 99"),
        ("stop_token_ids", (-1,), "0 to 99"),
        ("stop_token_ids", ("a",), "0 to 99"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_a_refusal_says_name_value_and_range(name, value, allowed):
    with pytest.raises(RequestError) as refusal:
        check_params(SamplingParams(**{name: value}), 100)
    text = str(refusal.value)
    shown = value[0] if isinstance(value, tuple) else value
    assert name in text and repr(shown)[:80] in text and allowed in text


def test_empty_and_too_many_stop_strings_are_refused():
    with pytest.raises(RequestError, match="stop is ''; allowed is a string of at least one character"):
        check_params(SamplingParams(stop=("ok", "")), 100)
    with pytest.raises(RequestError, match="stop has 17 entries; allowed are at most 16"):
        check_params(SamplingParams(stop=("x",) * 17), 100)
    with pytest.raises(RequestError, match="stop is 3; allowed is a string"):
        check_params(SamplingParams(stop=(3,)), 100)  # type: ignore[arg-type]


def test_named_options_are_read():
    params = read_params({"max_tokens": 5, "stop": ["a", "b"], "temperature": 1})
    assert params == SamplingParams(max_tokens=5, stop=("a", "b"), temperature=1.0)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(
        RequestError, match="unknown option 'max_token'; the options are max_tokens, temperature"
    ):
        read_params({"max_token": 5})


def test_an_option_of_the_wrong_type_is_refused_by_name():
    with pytest.raises(RequestError, match="max_tokens is 'five'; allowed is a whole number"):
        read_params({"max_tokens": "five"})


def test_a_prompt_must_leave_room_for_one_token():
    check_prompt([1] * 15, 100, 16)
    with pytest.raises(RequestError, match=r"prompt has 16 tokens but the context holds 16.*to 15 tokens"):
        check_prompt([1] * 16, 100, 16)


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="the prompt is empty"):
        check_prompt([], 100, 16)


@pytest.mark.parametrize("wrong", [-1, 100])
def test_a_token_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(RequestError, match=f"token id {wrong}; allowed are 0 to 99"):
        check_prompt([5, wrong, 7], 100, 16)


def test_tokens_are_prompt_and_output():
    request = Request("a", [1, 2], SamplingParams(), 0.0, output_ids=[3])
    assert request.tokens == [1, 2, 3] and "2 prompt + 1 output" in repr(request)
