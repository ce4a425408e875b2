"""The prompts that the demo, the checks and the benchmarks send are short, cover every domain and survive the tokenizer."""

import json

import jinja2
import pytest
from tokenizers import Tokenizer

DOMAINS = "c cli de en_prose es fr ja json ko math proofs pt python ru sql zh".split()


@pytest.fixture(scope="module")
def tokenizer(demo_model) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def read_lines(repository):
    def read(name: str) -> list[dict]:
        text = (repository / "testbed" / "prompts" / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    return read


def test_every_domain_has_two_prompts(read_lines):
    assert sorted(line["domain"] for line in read_lines("domains.jsonl")) == sorted(DOMAINS * 2)


def test_every_prompt_is_short_and_comes_back_from_its_tokens(read_lines, tokenizer):
    for line in read_lines("domains.jsonl"):
        token_ids = tokenizer.encode(line["prompt"]).ids
        assert 8 <= len(token_ids) <= 60, line
        assert tokenizer.decode(token_ids) == line["prompt"]


def test_every_chat_ends_with_the_user_and_fits_its_template(read_lines, tokenizer, demo_model):
    settings = json.loads((demo_model / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Template(settings["chat_template"])
    chats = read_lines("chat.jsonl")
    assert len(chats) == 6
    for line in chats:
        assert line["messages"][-1]["role"] == "user"
        text = template.render(messages=line["messages"], add_generation_prompt=True)
        assert text.endswith("<|im_start|>assistant\n")
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) <= 120
