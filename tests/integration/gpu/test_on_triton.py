"""Engines on the triton kernels, interpreted: the answers of the processor's kernels, whoever computes the experts."""

import pytest
import torch

from kernels import backends
from tests.support.encoder_decoders import write_tiny_switch
from tests.support.gpu_engines import BOUND, answer, distance, holder, served_elsewhere, whole_by
from tests.support.tiny_models import write_tiny

PROMPTS = {"a": [3, 17, 5, 60], "b": [7, 2]}
OPTIONS = {"deepseek_v2": {"first_k_dense_replace": 0}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")

    def folder(family):
        path = root / family
        if path.exists():
            return path
        if family == "switch_transformers":
            few = {"num_layers": 1, "num_decoder_layers": 1, "num_sparse_encoder_layers": 1}
            return write_tiny_switch(path, vocab_size=64, num_sparse_decoder_layers=1, **few)
        return write_tiny(family, path, vocab_size=64, num_hidden_layers=1, **OPTIONS.get(family, {}))

    return folder


@pytest.fixture(autouse=True)
def restored():
    yield
    backends.use("triton")


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "switch_transformers"])
def test_a_family_answers_as_on_the_processor(folders, family):
    folder = folders(family)
    expected = answer(whole_by("native", folder), PROMPTS, max_tokens=2)
    found = answer(whole_by("triton", folder), PROMPTS, max_tokens=2)
    assert found.tokens == expected.tokens
    assert distance(found.logits, expected.logits) < BOUND


def test_a_row_has_the_same_bits_alone_and_among_others(folders):
    whole = whole_by("triton", folders("qwen3_moe"))
    prompts = PROMPTS | {f"c{i}": [11 * i + j for j in range(3 + 2 * i)] for i in range(3)}
    together = answer(whole, prompts)
    alone = answer(whole, {"a": PROMPTS["a"]})
    assert alone.tokens["a"] == together.tokens["a"]
    assert torch.equal(alone.of("a"), together.of("a"))


def test_a_prompt_in_pieces_has_the_same_bits_as_at_once(folders):
    whole = whole_by("triton", folders("qwen3_moe"))
    prompt = {"long": [(7 * i) % 60 for i in range(20)]}
    at_once, in_pieces = (answer(whole, prompt, max_rows=rows, max_tokens=2) for rows in (64, 8))
    assert torch.equal(at_once.of("long"), in_pieces.of("long"))


def test_experts_of_a_peer_give_the_bits_of_own_experts(folders):
    whole = whole_by("triton", folders("qwen3_moe"))
    here = answer(whole, PROMPTS, max_tokens=2)
    # All of them: the interpreter bears one thread at a time, and a home with own experts computes while a peer does.
    with holder(whole) as peer, served_elsewhere(whole, peer, own=()) as port:
        mixed = answer(whole, PROMPTS, max_tokens=2, port=port)
        assert sum(traffic.calls for traffic in port.traffic.values()) > 0
    assert mixed.tokens == here.tokens
    assert torch.equal(mixed.logits, here.logits)
