"""Windows of tokens from a corpus, in equal parts from its domains. Knows files and a tokenizer; no model.

A corpus is a folder with one folder per domain, each with `SPLIT.jsonl` or `SPLIT.jsonl.gz`, or one such file; a line is a
JSON object with `text`.
"""

import gzip
import json
from pathlib import Path

import torch
from torch import Tensor

from edge_runtime.errors import UserError
from edge_runtime.model.tokenizer import Tokenizer


def read_windows(
    corpus: Path, split: str, tokenizer: Tokenizer, *, window_tokens: int, num_windows: int, seed: int = 1
) -> Tensor:
    """Texts in random order, one after another, cut into windows: [n, window_tokens] int64, n at most num_windows.

    Domains take turns; one whose texts are used up is passed over. Fewer windows than asked for where the corpus ends.
    """
    files = _files(corpus, split)
    generator = torch.Generator().manual_seed(seed)
    by_domain = []
    for file in files:
        texts = _texts(file)
        order = torch.randperm(len(texts), generator=generator).tolist()
        by_domain.append(_windows([texts[i] for i in order], tokenizer, window_tokens, num_windows))
    windows: list[list[int]] = []
    for turn in range(max(map(len, by_domain), default=0)):
        windows += [domain[turn] for domain in by_domain if turn < len(domain)]
    if not windows:
        raise UserError(f"corpus {corpus}: no text of {window_tokens} tokens in split {split!r}")
    return torch.tensor(windows[:num_windows], dtype=torch.int64)


def _windows(texts: list[str], tokenizer: Tokenizer, size: int, most: int) -> list[list[int]]:
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text)
        if len(tokens) >= size * most:
            break
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]


def _files(corpus: Path, split: str) -> list[Path]:
    if corpus.is_file():
        return [corpus]
    found = sorted([*corpus.glob(f"*/{split}.jsonl"), *corpus.glob(f"*/{split}.jsonl.gz")])
    found += sorted([*corpus.glob(f"{split}.jsonl"), *corpus.glob(f"{split}.jsonl.gz")])
    if not found:
        raise UserError(f"corpus {corpus}: no DOMAIN/{split}.jsonl or .jsonl.gz in it, expected at least one")
    return found


def _texts(file: Path) -> list[str]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        lines = content.decode().splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"corpus file {file} cannot be read: {error}") from error
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"corpus file {file}, line {number}: expected a JSON object with `text`"
            ) from error
        texts.append(str(text))
    return texts
