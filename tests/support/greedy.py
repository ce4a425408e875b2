"""Greedy answers of transformers on the demo model, kept as a file, and how ours are compared with them.

`python tests/support/greedy.py` writes the file anew; a test computes two of its answers again.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "testbed" / "models" / "edge-moe-demo"
PROMPTS = ROOT / "testbed" / "prompts" / "domains.jsonl"
ANSWERS = ROOT / "tests" / "integration" / "greedy_answers.json"
NUM_TOKENS = 64
CLOSE = 1e-3  # two best logits that are nearer than this may change places
_KEPT = 1e-2  # margins above this are not written down


class Greedy(NamedTuple):
    """One answer. margins: best minus second-best logit where it is small, by position in the answer."""

    token_ids: list[int]
    margins: dict[int, float]


def prompts() -> list[str]:
    """The 32 prompts, two of each domain."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def answers() -> list[Greedy]:
    """What transformers answers to `prompts()`, in their order."""
    return [
        Greedy(entry["token_ids"], {int(position): margin for position, margin in entry["margins"].items()})
        for entry in json.loads(ANSWERS.read_text())
    ]


def compute(prompt: str, reference: Any, tokenizer: Any, eos_ids: Sequence[int]) -> Greedy:
    """Greedy tokens of `reference` (tests.support.tiny_models.Reference) up to NUM_TOKENS or an end token."""
    ids = list(tokenizer(prompt)["input_ids"])
    start, margins = len(ids), {}
    while len(ids) < start + NUM_TOKENS:
        logits = reference.logits(ids)[-1]
        best, second = logits.topk(2).values.tolist()
        if best - second < _KEPT:
            margins[len(ids) - start] = round(best - second, 6)
        ids.append(int(logits.argmax()))
        if ids[-1] in eos_ids:
            break
    return Greedy(ids[start:], margins)


def differences(found: Sequence[int], expected: Greedy) -> str:
    """Empty if `found` is the expected answer, or parts from it where the reference itself is near a tie."""
    for position, (ours, theirs) in enumerate(zip(found, expected.token_ids, strict=False)):
        if ours != theirs:
            if expected.margins.get(position, 1.0) < CLOSE:
                return ""
            return f"token {position} is {ours}, expected {theirs}"
    if len(found) != len(expected.token_ids):
        return f"{len(found)} tokens, expected {len(expected.token_ids)}"
    return ""


def load() -> tuple[Any, Any, list[int]]:
    """Reference, tokenizer and end tokens for `compute`."""
    from transformers import AutoTokenizer, GenerationConfig

    from tests.support.tiny_models import Reference, quiet_transformers

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        eos = GenerationConfig.from_pretrained(MODEL).eos_token_id
    return Reference(MODEL), tokenizer, eos if isinstance(eos, list) else [eos]


def write() -> None:
    """Compute every answer and write the file."""
    parts = load()
    found = [compute(prompt, *parts) for prompt in prompts()]
    lines = [json.dumps({"token_ids": answer.token_ids, "margins": answer.margins}) for answer in found]
    ANSWERS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write()
