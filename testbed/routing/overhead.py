"""What routing costs each request beside its prompt and answer: processor time of every part of the handoff's control, on
made-up counts in the geometry of a large model. Blocks themselves, and what waits on a link, are not part of it.
"""

from collections.abc import Callable
from statistics import median
from time import process_time

import numpy as np

from edge_runtime.cache.prefix import chain_seed, pack_hashes, prompt_hashes
from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.protocol import Generate, Handoff, PeerAddress, Prefilled, decode, encode
from edge_runtime.routing.base import HomeLoad, Question
from edge_runtime.routing.locality_band import LocalityBand
from edge_runtime.routing.signature import SignatureRule, unit_rows

ROUNDS, REPEATS = 9, 40


def overheads(
    *, layers: int = 48, experts: int = 128, homes: int = 16, prompt_tokens: int = 512
) -> dict[str, tuple[float, float, float]]:
    """Part -> milliseconds of processor time a request: median, least and most of the rounds."""
    draw = np.random.default_rng(1)
    num_blocks = -(-prompt_tokens // 16)
    cache = SignatureCache(num_blocks, layers, experts, max_rows=16)
    cache.counts[:] = 1
    ids = draw.integers(0, 30000, prompt_tokens).tolist()
    hashes = prompt_hashes(chain_seed("m", "t", "", "exact"), ids)
    counts = draw.integers(0, 300, (layers, experts)).astype(np.int16)
    rule = SignatureRule(tuple(range(layers)), draw.random((layers, experts)).astype(np.float32))
    signature = rule.signature(counts)
    centroids = unit_rows(draw.random((homes, rule.dim)))
    router = LocalityBand(centroids, [f"n{index}" for index in range(homes)])
    loads = [HomeLoad(name, int(draw.integers(4, 12)), 16) for name in router.home_of]
    told = [encode(Prefilled("r" * 32, prompt_tokens), tensors=(counts, pack_hashes(hashes)))]
    handoff = Handoff(PeerAddress("press", "10.0.0.1:5551"), 0)
    generate = Generate("r" * 32, prompt="word " * prompt_tokens, output_ids=[5], handoff=handoff)
    parts: dict[str, Callable[[], object]] = {
        "counts of the prompt": lambda: cache.total(range(num_blocks)),
        "names of its blocks": lambda: prompt_hashes(b"0" * 16, ids),
        "word to the coordinator": lambda: decode(
            encode(Prefilled("r" * 32, prompt_tokens), tensors=(counts, pack_hashes(hashes)))
        ),
        "names read": lambda: [row.tobytes() for row in decode(told[0]).tensors[1]],
        "signature": lambda: rule.signature(counts),
        "choice of the home": lambda: router.choose(Question(signature), loads),
        "what it is like from now on": lambda: router.took("n3", signature),
        "word to the home": lambda: decode(encode(generate)),
    }
    found = {name: _timed(work) for name, work in parts.items()}
    sums = [sum(part[index] for part in found.values()) for index in range(3)]
    return found | {"together": (sums[0], sums[1], sums[2])}


def _timed(work: Callable[[], object]) -> tuple[float, float, float]:
    work()
    rounds = []
    for _ in range(ROUNDS):
        began = process_time()
        for _ in range(REPEATS):
            work()
        rounds.append((process_time() - began) / REPEATS * 1e3)
    return median(rounds), min(rounds), max(rounds)


def table(found: dict[str, tuple[float, float, float]]) -> str:
    """As markdown."""
    lines = ["| part | ms (least-most) |", "|---|---|"]
    lines += [
        f"| {name} | {middle:.3f} ({least:.3f}-{most:.3f}) |" for name, (middle, least, most) in found.items()
    ]
    return "\n".join(lines)
