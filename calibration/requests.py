"""Calibration requests: a prompt and the tokens that follow it, cut from documents and mixed.

Knows text and tokens; knows no model.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edge_runtime.errors import CorpusError
from edge_runtime.model.tokenizer import Tokenizer

MIN_TOKENS = 16
MIN_REQUESTS = 16
CHARS_PER_TOKEN = 16  # kept of a document for each token that is wanted of it


class Lengths(NamedTuple):
    """How long requests are, in tokens."""

    prompt_tokens: int = 256
    """Longest prompt; each is between a quarter and the whole of what its text and this allow."""
    decode_tokens: int = 128
    """Tokens decoded behind the prompt; short texts give half of theirs."""

    @property
    def max_chars(self) -> int:
        return CHARS_PER_TOKEN * (self.prompt_tokens + self.decode_tokens)


class CalibrationRequest(NamedTuple):
    """One request."""

    domain: int
    """Index into the domains' names, sorted."""
    prompt_ids: tuple[int, ...]
    decode_ids: tuple[int, ...]
    """What the text goes on with; the rows that decode them are fed the tokens themselves."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.decode_ids)


def cut_requests(
    texts: Mapping[str, Sequence[str]],
    tokenizer: Tokenizer,
    num_requests: int,
    lengths: Lengths,
    seed: int,
) -> list[CalibrationRequest]:
    """Up to `num_requests` requests, domains in equal shares as far as their texts reach, in mixed order.

    Each document gives one; only where documents are too few do long ones give more, from further on in the text.
    """
    draw = random.Random(seed)
    names = sorted(texts)
    queues = {name: _windows(texts[name], tokenizer, lengths) for name in names}
    picked: list[tuple[int, list[int]]] = []
    while len(picked) < num_requests and any(queues.values()):
        for index, name in enumerate(names):
            if queues[name] and len(picked) < num_requests:
                picked.append((index, queues[name].pop(0)))
    requests = [_cut(domain, ids, lengths, draw) for domain, ids in picked]
    draw.shuffle(requests)
    return requests


def _windows(texts: Sequence[str], tokenizer: Tokenizer, lengths: Lengths) -> list[list[int]]:
    """Token windows of a domain: first windows of all documents, then second ones, and so on."""
    length = lengths.prompt_tokens + lengths.decode_tokens
    rounds: list[list[list[int]]] = []
    for text in texts:
        ids = tokenizer.encode(text)
        for turn, start in enumerate(range(0, len(ids), length)):
            window = ids[start : start + length]
            if len(window) >= MIN_TOKENS:
                while len(rounds) <= turn:
                    rounds.append([])
                rounds[turn].append(window)
    return [window for each in rounds for window in each]


def _cut(domain: int, ids: Sequence[int], lengths: Lengths, draw: random.Random) -> CalibrationRequest:
    decode = min(lengths.decode_tokens, len(ids) // 2)
    longest = min(lengths.prompt_tokens, len(ids) - decode)
    prompt = draw.randint(max(1, longest // 4), longest)
    return CalibrationRequest(domain, tuple(ids[:prompt]), tuple(ids[prompt : prompt + decode]))


def fingerprint(requests: Sequence[CalibrationRequest], *options: object) -> str:
    """32 hex digits that differ when the requests or the options differ."""
    digest = hashlib.blake2b(repr(options).encode(), digest_size=16)
    for request in requests:
        digest.update(repr(request).encode())
    return digest.hexdigest()


def refuse_too_few(
    requests: Sequence[CalibrationRequest], num_experts: int, top_k: int, rows_per_expert: int = 32
) -> None:
    """Refuse what is too little to say anything about experts that are chosen as seldom as the average one."""
    needed = max(rows_per_expert * num_experts // max(top_k, 1), MIN_REQUESTS * MIN_TOKENS)
    found = sum(request.num_tokens for request in requests)
    if len(requests) < MIN_REQUESTS or found < needed:
        raise CorpusError(
            f"the corpus gives {len(requests)} requests of {found} tokens in all; needed are at least {MIN_REQUESTS} "
            f"requests of {MIN_TOKENS} or more tokens and {needed} tokens in all "
            f"({rows_per_expert} for each of {num_experts} experts, {top_k} chosen per token); add text"
        )
