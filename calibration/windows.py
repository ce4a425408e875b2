"""Windows of tokens from a corpus, the domains taking turns. Knows text and a tokenizer; no model."""

from pathlib import Path

import torch
from torch import Tensor

from calibration.corpus import Split, find_domains, sample_documents
from edge_runtime.errors import CorpusError
from edge_runtime.model.tokenizer import Tokenizer

MAX_CHARS_PER_TOKEN = 8
MIN_DOCUMENTS = 64


def read_windows(
    corpus: Path, split: Split, tokenizer: Tokenizer, *, window_tokens: int, num_windows: int, seed: int = 1
) -> Tensor:
    """Documents drawn at random, one after another, cut into windows: [n, window_tokens] int64, n at most num_windows.

    A domain whose text is used up is passed over; where all are, there are fewer windows than asked for.
    """
    domains = find_domains(corpus, split)
    per_domain = max(MIN_DOCUMENTS, 2 * num_windows // len(domains))
    most = MAX_CHARS_PER_TOKEN * window_tokens * num_windows
    sampled = sample_documents(domains, per_domain, seed, max_chars=most)
    each = [_windows(texts, tokenizer, window_tokens, num_windows) for texts in sampled.values()]
    turns = range(max(map(len, each), default=0))
    windows = [domain[turn] for turn in turns for domain in each if turn < len(domain)]
    if not windows:
        raise CorpusError(
            f"corpus {corpus} holds no {window_tokens} tokens of {split} text; give a larger one or shorter windows"
        )
    return torch.tensor(windows[:num_windows], dtype=torch.int64)


def _windows(texts: list[str], tokenizer: Tokenizer, size: int, most: int) -> list[list[int]]:
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text)
        if len(tokens) >= size * most:
            break
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)][:most]
