"""What requests' tokens chose at the gates: recorded from a model over labelled text, or drawn so that domains differ as
published. The food of `replay.py`.

N requests, L MoE layers, E experts, K chosen per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

DECODE_TOKENS = 64


@dataclass(frozen=True)
class Traces:
    """Requests and the choices of their gates.

    prefill        [N, L, E] int16, counts over the prompt
    probabilities  [N, L, E] float32, gate probabilities summed over the prompt
    choices        per request [tokens, L, K] int16, what each decoded token chose
    domain         [N], index into `domains`
    prompt_tokens  [N]
    """

    prefill: np.ndarray
    probabilities: np.ndarray
    choices: list[np.ndarray]
    domain: np.ndarray
    domains: tuple[str, ...]
    prompt_tokens: np.ndarray

    @property
    def decode_counts(self) -> np.ndarray:
        """[N, L, E] int32."""
        _, L, E = self.prefill.shape
        found = np.zeros(self.prefill.shape, dtype=np.int32)
        for request, choices in enumerate(self.choices):
            flat = (np.arange(L)[None, :, None] * E + choices).ravel()
            found[request] = np.bincount(flat, minlength=L * E).reshape(L, E)
        return found

    @cached_property
    def masks(self) -> list[list[int]]:
        """Per request and decoded token its choices as one number, whose bit l * E + e is expert e of layer l.

        What a batch touches is then one `|` of such numbers: a step of a replay takes microseconds.
        """
        _, L, E = self.prefill.shape
        found = []
        for choices in self.choices:
            used = np.zeros((len(choices), L, E), dtype=bool)
            np.put_along_axis(used, choices.astype(np.intp), True, axis=2)
            rows = np.packbits(used.reshape(len(choices), L * E), axis=1, bitorder="little")
            found.append([int.from_bytes(row.tobytes(), "little") for row in rows])
        return found

    def of(self, requests: np.ndarray | Sequence[int]) -> "Traces":
        """Some of the requests."""
        return Traces(
            self.prefill[requests],
            self.probabilities[requests],
            [self.choices[request] for request in requests],
            self.domain[requests],
            self.domains,
            self.prompt_tokens[requests],
        )


def record(
    model: Path, corpus: Path, split: str, num_requests: int, *, seed: int, prompt_tokens: int = 128
) -> Traces:
    """Run text of a labelled corpus through the exact model and note what every gate chose."""
    import torch

    from calibration.calibrate import Options
    from calibration.corpus import find_domains, sample_documents
    from calibration.exact_model import ExactModel, Routed
    from calibration.requests import Lengths, cut_requests
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.model.tokenizer import Tokenizer

    checkpoint, tokenizer = Checkpoint.open(model), Tokenizer.open(model)
    lengths = Lengths(prompt_tokens, DECODE_TOKENS)
    domains = find_domains(corpus, "validation" if split == "validation" else "calibration")
    per_domain = 2 * -(-num_requests // len(domains))
    texts = sample_documents(domains, per_domain, seed, max_chars=lengths.max_chars, seen=lambda _: None)
    requests = cut_requests(texts, tokenizer, num_requests, lengths, seed)
    run = ExactModel(
        checkpoint, context_tokens=max(r.num_tokens for r in requests) + 1, step_rows=Options().step_rows
    )
    L, E, K = len(run.moe_layers), run.num_experts, run.top_k
    row_of = {layer: place for place, layer in enumerate(run.moe_layers)}
    prefill = np.zeros((len(requests), L, E), dtype=np.int16)
    probabilities = np.zeros((len(requests), L, E), dtype=np.float32)
    choices: list[np.ndarray] = []
    done = 0
    for batch in run.batches(requests):
        step = run.place(batch)
        chosen = np.zeros((len(step.request), L, K), dtype=np.int16)
        in_prompt = (~step.is_decode).numpy()
        owner = step.request.numpy()

        def look(
            routed: Routed,
            chosen: np.ndarray = chosen,
            owner: np.ndarray = owner,
            in_prompt: np.ndarray = in_prompt,
            first: int = done,
        ) -> None:
            row = row_of[routed.layer]
            chosen[:, row] = routed.expert_ids.numpy()
            scores = torch.softmax(routed.logits, dim=-1).numpy()
            np.add.at(probabilities[:, row], first + owner[in_prompt], scores[in_prompt])

        run.run(step, look)
        for index in range(len(batch)):
            mine = owner == index
            flat = (np.arange(L)[None, :, None] * E + chosen[mine & in_prompt]).ravel()
            prefill[done + index] = np.bincount(flat, minlength=L * E).reshape(L, E)
            choices.append(chosen[mine & ~in_prompt])
        done += len(batch)
    return Traces(
        prefill,
        probabilities,
        choices,
        np.array([request.domain for request in requests]),
        tuple(sorted(texts)),
        np.array([len(request.prompt_ids) for request in requests]),
    )


@dataclass(frozen=True)
class Geometry:
    """A model's gates, and how far apart domains are in it, as published for ELDR.

    layers       MoE layers that are drawn; costs count for `model_layers`
    fewer        share of distinct experts that a batch of one domain saves against a mixed one
    correlation  of a request's expert use in prefill and in decode
    """

    name: str
    model_layers: int
    experts: int
    top_k: int
    fewer: float
    correlation: float
    layers: int = 6


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("qwen3-30b-a3b", 48, 128, 8, 0.20, 0.90),
        Geometry("gpt-oss-120b", 36, 128, 4, 0.17, 0.70),
        Geometry("gemma-4-26b-a4b", 30, 128, 8, 0.18, 0.92),
    )
}
_BATCH = 32  # at which a batch of one domain is compared with a mixed one


def synthetic(geometry: Geometry, num_requests: int, *, num_domains: int = 4, seed: int = 1) -> Traces:
    """Requests whose domains are as far apart, and whose answers as like their prompts, as published.

    Each domain has a taste for experts, each request one of its own beside it, another in decode as far as prefill does
    not foretell it. The strength of tastes is searched until single-domain batches save what they should.
    """
    low, high = 0.1, 4.0
    for _ in range(7):
        middle = (low + high) / 2
        probe = _draw(geometry, 160, num_domains, middle, seed, tokens=8)
        if saving(probe, _BATCH, seed) < geometry.fewer:
            low = middle
        else:
            high = middle
    return _draw(geometry, num_requests, num_domains, (low + high) / 2, seed + 1, tokens=DECODE_TOKENS)


def _draw(
    geometry: Geometry, num_requests: int, num_domains: int, taste: float, seed: int, *, tokens: int
) -> Traces:
    rng = np.random.default_rng([seed, geometry.experts, geometry.top_k])
    fixed = np.random.default_rng([geometry.experts, num_domains])
    L, E, K = geometry.layers, geometry.experts, geometry.top_k
    domain = rng.integers(0, num_domains, num_requests)
    domain_taste = taste * fixed.standard_normal((num_domains, L, E))
    common = 0.5 * fixed.standard_normal((L, E))
    own_size = 0.5 * taste
    drift = own_size * np.sqrt(max(1.0 / geometry.correlation**2 - 1.0, 0.0)) * 2
    prompt_tokens = rng.integers(64, 257, num_requests)
    prefill = np.zeros((num_requests, L, E), dtype=np.int16)
    probabilities = np.zeros((num_requests, L, E), dtype=np.float32)
    choices: list[np.ndarray] = []
    for request in range(num_requests):
        score = common + domain_taste[domain[request]] + own_size * rng.standard_normal((L, E))
        p = np.exp(score - score.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        num_prompt = int(prompt_tokens[request])
        picked = _pick(rng, score, min(num_prompt, 96), K)
        counts = np.stack([np.bincount(picked[:, layer].ravel(), minlength=E) for layer in range(L)])
        prefill[request] = np.round(counts * (num_prompt / min(num_prompt, 96)))
        noisy = p * rng.lognormal(0.0, 0.2, p.shape)
        probabilities[request] = num_prompt * noisy / noisy.sum(axis=-1, keepdims=True)
        later = score + drift * rng.standard_normal((L, E))
        choices.append(_pick(rng, later, tokens, K).astype(np.int16))
    names = tuple(f"domain-{index}" for index in range(num_domains))
    return Traces(prefill, probabilities, choices, domain, names, prompt_tokens)


def _pick(rng: np.random.Generator, score: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    """[tokens, L, K]: K different experts per token and layer, drawn in proportion to e^score."""
    keys = score + rng.gumbel(size=(tokens, *score.shape)).astype(np.float32)
    return np.argpartition(-keys, top_k - 1, axis=-1)[..., :top_k]


def saving(traces: Traces, batch: int, seed: int, *, trials: int = 40) -> float:
    """Share of distinct experts per layer that batches of one domain save against mixed ones."""
    rng = np.random.default_rng(seed)
    _, L, E = traces.prefill.shape
    sizes = np.bincount(traces.domain, minlength=len(traces.domains))
    large = [index for index, size in enumerate(sizes) if size >= 4]

    def distinct(requests: np.ndarray) -> float:
        used = np.zeros((L, E), dtype=bool)
        for request in requests:
            choices = traces.choices[request]
            token = choices[rng.integers(len(choices))]
            used[np.arange(L)[:, None], token] = True
        return float(used.sum(axis=1).mean())

    alone, mixed = [], []
    for _ in range(trials):
        members = np.flatnonzero(traces.domain == rng.choice(large))
        alone.append(distinct(rng.choice(members, batch)))
        mixed.append(distinct(rng.integers(0, len(traces.domain), batch)))
    return 1.0 - float(np.mean(alone) / np.mean(mixed))


def save(traces: Traces, path: Path) -> None:
    """Keep traces in one file."""
    lengths = np.array([len(choices) for choices in traces.choices])
    np.savez_compressed(
        path,
        prefill=traces.prefill,
        probabilities=traces.probabilities,
        choices=np.concatenate(traces.choices),
        lengths=lengths,
        domain=traces.domain,
        domains=np.array(traces.domains),
        prompt_tokens=traces.prompt_tokens,
    )


def load(path: Path) -> Traces:
    """What `save` kept."""
    with np.load(path) as kept:
        ends: Sequence[int] = np.cumsum(kept["lengths"])[:-1].tolist()
        return Traces(
            kept["prefill"],
            kept["probabilities"],
            np.split(kept["choices"], ends),
            kept["domain"],
            tuple(kept["domains"].tolist()),
            kept["prompt_tokens"],
        )
