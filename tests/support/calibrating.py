"""Small calibrations for tests: random requests, models of every family, corpora of own text."""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from calibration.exact_model import ExactModel
from calibration.requests import CalibrationRequest
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.encoder_decoders import write_tiny_switch
from tests.support.tiny_models import TINY, write_tiny

FAMILIES = (*TINY, "switch_transformers")
WORDS = {
    "code": "def return for in range print self import class if else not None True yield".split(),
    "sea": "the wave ship wind captain harbour salt rope sail deck storm whale and over under".split(),
    "numbers": "one two three plus minus equals seven eleven twelve sum half third zero of a".split(),
}


def write_family(family: str, folder: Path, **options: object) -> Path:
    """A tiny random model of any family."""
    if family == "switch_transformers":
        return write_tiny_switch(folder, **options)  # type: ignore[arg-type]
    return write_tiny(family, folder, **options)  # type: ignore[arg-type]


def random_requests(
    count: int, seed: int = 0, longest: int = 40, domains: int = 3
) -> list[CalibrationRequest]:
    """Requests of random tokens of a vocabulary of 512, lengths unequal."""
    draw = random.Random(seed)

    def some() -> tuple[int, ...]:
        return tuple(draw.randrange(3, 512) for _ in range(draw.randint(3, longest)))

    return [CalibrationRequest(index % domains, some(), some()) for index in range(count)]


def exact_model(folder: Path, *, step_rows: int = 256) -> ExactModel:
    """A tiny model, whole."""
    return ExactModel(Checkpoint.open(folder), context_tokens=128, step_rows=step_rows)


def sentences(domain: str, count: int, words: int, seed: int = 0) -> list[str]:
    """Texts of a domain's words in random order."""
    draw = random.Random(f"{domain} {seed}")
    return [" ".join(draw.choices(WORDS[domain], k=words)) for _ in range(count)]


def write_corpus(folder: Path, texts: Mapping[str, Sequence[str]], file: str = "calib.jsonl.gz") -> Path:
    """FOLDER/DOMAIN/FILE for each domain."""
    for domain, each in texts.items():
        (folder / domain).mkdir(parents=True, exist_ok=True)
        content = "".join(json.dumps({"text": text}) + "\n" for text in each).encode()
        path = folder / domain / file
        path.write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    return folder


def small_corpus(folder: Path, count: int = 12, words: int = 120) -> Path:
    """Three domains with a calibration and a validation file each."""
    for file, seed in (("calib.jsonl.gz", 0), ("valid.jsonl", 1)):
        write_corpus(folder, {name: sentences(name, count, words, seed) for name in WORDS}, file)
    return folder
