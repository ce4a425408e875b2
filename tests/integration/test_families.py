"""Families on eight nodes: one that attends and seven that hold the experts, greedy tokens as in one process."""

import shutil
from pathlib import Path

import pytest

from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from tests.support.clusters import MODEL, LocalCluster, write_topology
from tests.support.decoders import Sequences
from tests.support.encoder_decoders import Seq2SeqReference, write_tiny_switch
from tests.support.families import store_as_mxfp4
from tests.support.tiny_models import write_tiny

pytestmark = pytest.mark.timeout(240)

PROMPTS = ("def add(a, b):", "Once upon a time", "SELECT name FROM")
NUM_TOKENS = 16

TOPOLOGY = """
[cluster]
name = "family"
model = "../models/edge-moe-demo"
coordinator = "127.0.0.1:25550"
memory_ratio = 1.0
kv_tokens = 1024

[default_link]
rtt = "300 us"
bandwidth = "1 Gbit/s"

[[node]]
name = "home"
address = "127.0.0.1:25551"
roles = ["prefill", "decode"]
memory = "420 MiB"
"""
HOST = """
[[node]]
name = "host-{index}"
address = "127.0.0.1:{port}"
roles = ["experts"]
memory = "400 MiB"
"""


def write_model(family: str, folder: Path) -> Path:
    """A tiny model that reads and writes the demo model's tokens; of gpt_oss also as it is published, in mxfp4."""
    name, _, is_mxfp4 = family.partition(" ")
    write_tiny(name, folder, vocab_size=8192, max_position_embeddings=256)
    if is_mxfp4:
        store_as_mxfp4(folder)
    copy_tokens(folder)
    return folder


def copy_tokens(folder: Path) -> None:
    """Give a model the demo model's tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODEL / name, folder / name)


def greedy(folder: Path, prompt: str) -> list[int]:
    """What one process answers."""
    tokenizer = Tokenizer.open(folder)
    sequences = Sequences(Checkpoint.open(folder))
    logits = sequences.whole(tokenizer.encode(prompt))
    found: list[int] = []
    while len(found) < NUM_TOKENS:
        token = int(logits[-1].argmax())
        if token in tokenizer.eos_token_ids:
            break
        found.append(token)
        logits = sequences.step([(0, [token])])[0]
    return found


# All that decode alone but qwen3_moe, which the demo model is.
@pytest.mark.parametrize(
    "family", ["deepseek_v2", "gemma4", "gpt_oss", "gpt_oss mxfp4", "mixtral", "olmoe", "qwen2_moe"]
)
def test_eight_nodes_answer_as_one_process_does(family: str, tmp_path: Path) -> None:
    folder = write_model(family, tmp_path / "model")
    scenario = tmp_path / "family.toml"
    hosts = (HOST.format(index=index, port=25552 + index) for index in range(7))
    scenario.write_text(TOPOLOGY + "".join(hosts))
    with LocalCluster(write_topology(tmp_path, scenario, model=folder)) as cluster:
        answers = cluster.answers(PROMPTS, "--max-tokens", str(NUM_TOKENS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        found = [token for token in answer["token_ids"] if token not in Tokenizer.open(folder).eos_token_ids]
        assert found == greedy(folder, prompt)
        assert answer["bill"]["exact_here"] == 0, "every routed expert is on another node"
        assert sum(node["expert_slots"] > 0 for node in answer["nodes"].values()) >= 4


def test_eight_nodes_answer_with_an_encoder_decoder_as_generate_of_transformers_does(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    # As many layers in both halves: with more in the decoder, generate of transformers 5.24 falls over its own cache.
    write_tiny_switch(
        folder, vocab_size=8192, num_decoder_layers=3, tie_word_embeddings=False, expert_capacity=3
    )
    copy_tokens(folder)
    scenario = tmp_path / "family.toml"
    hosts = (HOST.format(index=index, port=25552 + index) for index in range(7))
    scenario.write_text(TOPOLOGY + "".join(hosts))
    with LocalCluster(write_topology(tmp_path, scenario, model=folder)) as cluster:
        answers = cluster.answers(PROMPTS, "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
    tokenizer, reference = Tokenizer.open(folder), Seq2SeqReference(folder)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["token_ids"] == reference.greedy(tokenizer.encode(prompt), NUM_TOKENS)
        assert answer["bill"]["exact_here"] == 0, "every routed expert is on another node"
        assert sum(node["expert_slots"] > 0 for node in answer["nodes"].values()) >= 2


def test_a_prompt_of_27_thousand_tokens_is_answered_over_two_nodes_as_in_one_process(tmp_path: Path) -> None:
    """Far beyond where a 16-bit position, block number or message size would end."""
    folder = tmp_path / "model"
    write_tiny(
        "qwen3_moe",
        folder,
        vocab_size=8192,
        max_position_embeddings=32768,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=2,
    )
    copy_tokens(folder)
    scenario = tmp_path / "long.toml"
    text = TOPOLOGY.replace("kv_tokens = 1024", "kv_tokens = 32768\nmax_batch_rows = 512")
    scenario.write_text(text.replace("420 MiB", "480 MiB") + HOST.format(index=0, port=25552))
    line = "The keeper of the lighthouse counted {} ships that night, and wrote each of them down. "
    tokenizer = Tokenizer.open(folder)
    prompt = "".join(line.format(number) for number in range(900))
    ids = tokenizer.encode(prompt)
    assert 26_600 < len(ids) < 32_000
    with LocalCluster(write_topology(tmp_path, scenario, model=folder)) as cluster:
        [answer] = cluster.answers([prompt], "--max-tokens", str(NUM_TOKENS), "--ignore-eos")
        cluster.wait_until_idle()
    assert answer["bill"]["exact_here"] == 0 and answer["usage"]["prompt_tokens"] == len(ids)
    sequences = Sequences(Checkpoint.open(folder), context_tokens=32768, max_rows=512)
    for start in range(0, len(ids), 512):
        logits = sequences.step([(0, ids[start : start + 512])])[0]
    found: list[int] = []
    while len(found) < NUM_TOKENS:
        found.append(int(logits[-1].argmax()))
        logits = sequences.step([(0, found[-1:])])[0]
    assert answer["token_ids"] == found
