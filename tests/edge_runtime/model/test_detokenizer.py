"""Streams of ids give whole characters, and stop strings never leak, however the text is cut."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.model.detokenizer import IncrementalDetokenizer, StopMatcher
from edge_runtime.model.tokenizer import Tokenizer

PIECES = [
    "a",
    "Stra\u00dfe",
    "\u00e9",
    "\u65e5\u672c\u8a9e",
    "\U0001f600",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\n",
    " ",
    "\ud55c\uad6d",
    "\u2026",
    "x" * 20,
    "\U0001f3f3\ufe0f\u200d\U0001f308",
    "\x00",
    "\ufffd",
]


@pytest.fixture(scope="module")
def tokenizer(demo_model) -> Tokenizer:
    return Tokenizer.open(demo_model)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token_id) for token_id in ids), stream.flush()]


texts = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


@given(texts.filter(lambda text: text and not any("\ud800" <= c <= "\udfff" for c in text)))
def test_any_text_comes_out_whole_and_in_whole_characters(tokenizer, text):
    pieces = streamed(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.data())
def test_a_character_given_byte_by_byte_appears_with_its_last_byte(tokenizer, data):
    text = data.draw(st.lists(st.sampled_from(PIECES[1:8]), min_size=1, max_size=6).map("".join))
    ids = byte_ids(tokenizer, text.encode())
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert streamed(tokenizer, ids) == [*(decoder.decode(bytes([byte])) for byte in text.encode()), ""]


@given(st.lists(st.integers(0, 8191), max_size=80))
def test_any_ids_come_out_as_the_whole_decode_has_them(tokenizer, ids):
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0xFF, 0x41]), max_size=80))
def test_bytes_that_are_no_text_come_out_as_the_whole_decode_has_them(tokenizer, values):
    ids = byte_ids(tokenizer, bytes(values))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_long_run_of_garbage_is_given_out_as_it_comes_and_costs_no_more_with_time(tokenizer):
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    stream = IncrementalDetokenizer(decode)
    given_out = "".join(stream.push(token_id) for token_id in byte_ids(tokenizer, b"\x80" * 500))
    assert len(given_out) >= 497
    assert max(lengths) < 30


def test_special_tokens_are_skipped_without_losing_what_stands_around_them(tokenizer):
    ids = [1, *tokenizer.encode("a b")[1:], 4, 2, *tokenizer.encode(" c")[1:], 2]
    assert "".join(streamed(tokenizer, ids)) == "a b c"


def test_an_answer_of_special_tokens_alone_is_empty_and_stays_cheap(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(2) for _ in range(100)] == [""] * 100
    assert stream.flush() == ""
    assert len(stream._window) <= 1


def test_an_unfinished_character_is_flushed_at_the_end_once(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(token_id) for token_id in byte_ids(tokenizer, "\u00e9\U0001f600".encode()[:-1])] == [
        "",
        "\u00e9",
        "",
        "",
        "",
    ]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_decoders_that_drop_the_first_space_do_not_drop_later_ones():
    words = {1: "\u2581one", 2: "\u2581two", 3: "\u2581three", 4: ""}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("\u2581", " ").removeprefix(" ")

    stream = IncrementalDetokenizer(decode)
    assert [stream.push(i) for i in (1, 4, 2, 3)] == ["one", "", " two", " three"]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte, by the byte-level alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [tokenizer._backend.token_to_id(letters[byte]) for byte in data]


def pushed(matcher: StopMatcher, chunks: list[str]) -> str:
    text = "".join(matcher.push(chunk) for chunk in chunks)
    return text + ("" if matcher.matched else matcher.flush())


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Read character by character; the first stop that is complete ends it, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_a_stop_that_spans_chunks_is_found_and_not_given_out():
    matcher = StopMatcher(["ab", "b\n"])
    assert [matcher.push(c) for c in "xxa"] == ["x", "x", ""]
    assert matcher.push("b") == "" and matcher.matched == "ab"
    assert matcher.push("more") == ""


def test_only_what_may_still_become_a_stop_is_held_back():
    matcher = StopMatcher(["<|end|>"])
    assert matcher.push("a < b <|e") == "a < b "
    assert matcher.push("xit") == "<|exit"
    assert matcher.push("<") == "" and matcher.flush() == "<" and matcher.flush() == ""


def test_a_single_string_is_one_stop_and_empty_ones_are_none():
    assert pushed(StopMatcher("ab"), ["xab"]) == "x"
    assert pushed(StopMatcher(["", "ab"]), ["xa"]) == "xa"
    assert StopMatcher().push("anything") == "anything"


short = st.text(alphabet="ab\n", max_size=14)


@given(st.lists(st.text(alphabet="ab\n", max_size=4), max_size=4), st.lists(short, max_size=6))
def test_the_answer_does_not_depend_on_how_the_text_is_cut(stops, chunks):
    matcher = StopMatcher(stops)
    expected, stop = by_definition("".join(chunks), stops)
    assert pushed(matcher, chunks) == expected
    assert matcher.matched == stop


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3), short)
def test_no_more_is_held_back_than_the_longest_open_prefix(stops, text):
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(c) for c in text)
    if matcher.matched is None:
        held = text[len(given_out) :]
        ends = [
            text[i:] for i in range(len(text)) if any(s.startswith(text[i:]) and s != text[i:] for s in stops)
        ]
        assert held == max(ends, key=len, default="")
