from pathlib import Path

import pytest

from calibration.requests import (
    CalibrationRequest,
    Lengths,
    cut_requests,
    fingerprint,
    refuse_too_few,
)
from edge_runtime.errors import CorpusError
from edge_runtime.model.tokenizer import Tokenizer
from tests.support.calibrating import WORDS, sentences

LENGTHS = Lengths(prompt_tokens=24, decode_tokens=12)


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.open(demo_model)


def texts(count: int = 10, words: int = 40) -> dict[str, list[str]]:
    return {name: sentences(name, count, words) for name in WORDS}


def test_a_request_is_a_prompt_and_what_its_text_goes_on_with(tokenizer: Tokenizer):
    whole = {tuple(tokenizer.encode(text)[:36]) for each in texts().values() for text in each}
    requests = cut_requests(texts(), tokenizer, 30, LENGTHS, 1)
    assert len(requests) == 30
    for request in requests:
        assert 6 <= len(request.prompt_ids) <= 24 and len(request.decode_ids) <= 12
        assert any(ids[: request.num_tokens] == request.prompt_ids + request.decode_ids for ids in whole)
    assert len({len(request.prompt_ids) for request in requests}) > 5


def test_domains_have_equal_shares_as_far_as_their_texts_reach(tokenizer: Tokenizer):
    given = texts() | {"sea": sentences("sea", 2, 12)}
    requests = cut_requests(given, tokenizer, 22, LENGTHS, 1)
    counts = [sum(request.domain == index for request in requests) for index in range(3)]
    assert counts == [10, 10, 2]


def test_long_texts_give_more_requests_where_texts_are_few(tokenizer: Tokenizer):
    requests = cut_requests({"sea": sentences("sea", 2, 200)}, tokenizer, 8, LENGTHS, 1)
    assert len(requests) == 8 and len({request.prompt_ids for request in requests}) == 8


def test_short_texts_decode_half_of_theirs_and_the_shortest_are_left_out(tokenizer: Tokenizer):
    short = " ".join(["ship"] * 8)
    requests = cut_requests({"sea": ["wave", short]}, tokenizer, 9, LENGTHS, 1)
    assert [len(request.decode_ids) for request in requests] == [len(tokenizer.encode(short)) // 2]


def test_the_same_seed_gives_the_same_requests_and_fingerprint(tokenizer: Tokenizer):
    first, again, other = (cut_requests(texts(), tokenizer, 30, LENGTHS, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert fingerprint(first, "hash") == fingerprint(again, "hash")
    assert len({fingerprint(first, "hash"), fingerprint(other, "hash"), fingerprint(first, "h")}) == 3


def test_too_little_text_is_refused_with_what_is_needed():
    request = CalibrationRequest(0, tuple(range(20)), tuple(range(10)))
    refuse_too_few([request] * 16, num_experts=8, top_k=2)
    with pytest.raises(CorpusError, match="15 requests of 450 tokens.*at least 16 requests"):
        refuse_too_few([request] * 15, num_experts=8, top_k=2)
    with pytest.raises(CorpusError, match="480 tokens in all; needed .* 2048 tokens in all"):
        refuse_too_few([request] * 16, num_experts=128, top_k=2)
