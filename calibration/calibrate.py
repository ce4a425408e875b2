"""The whole calibration: corpus to requests, requests through the passes, what they found into the artifact.

Knows the order of things and what is kept where; the passes know what is measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from calibration import corpus
from calibration.exact_model import STEP_ROWS, ExactModel
from calibration.generate import Generation
from calibration.mismatch import Mismatch
from calibration.observe import Observation
from calibration.passes import Pass, Progress, Unfinished, run_pass
from calibration.requests import CalibrationRequest, Lengths, cut_requests, fingerprint, refuse_too_few
from calibration.sections import Section, loss_sections, observed_sections, together_section
from calibration.sensitivity import Sensitivity
from calibration.signatures_fit import write_fit
from calibration.together import Together
from edge_runtime.artifacts import FORMAT_VERSION, INDEX_FILE, Artifact, write_section
from edge_runtime.clock import Clock
from edge_runtime.errors import ArtifactError, ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer

PASSES_VERSION = 1
"""Part of what an unfinished calibration is recognised by: goes up when a pass keeps or does something else."""


class Options(NamedTuple):
    """What a user may choose."""

    num_requests: int = 1000
    lengths: Lengths = Lengths()
    seed: int = 1
    step_rows: int = STEP_ROWS
    """Rows that are computed together, and so how often a stop can be taken up."""
    generates: bool = False
    """Decode what the model itself goes on with, not the text."""
    num_homes: int = 8
    """Clusters that signatures are grouped into; a cluster of another number of homes groups them anew."""


class Reading(NamedTuple):
    """The requests that a corpus gave."""

    requests: list[CalibrationRequest]
    domains: list[str]


def calibrate(
    model_folder: Path,
    corpus_folder: Path,
    out: Path,
    options: Options,
    clock: Clock,
    *,
    progress: Progress = lambda name, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Measure a model over a corpus and write the artifact's sections; goes on where an earlier run was stopped."""
    checkpoint = Checkpoint.open(model_folder)
    if not checkpoint.spec.moe_layers:
        raise ConfigError(
            f"{model_folder} has no layer with routed experts, so there is nothing to calibrate"
        )
    if (out / INDEX_FILE).exists():
        Artifact.open(
            out, model_hash=checkpoint.model_hash
        )  # refuses another model's before any work is done
    tokenizer = Tokenizer.open(model_folder)
    lengths = fitted(options.lengths, checkpoint.spec.context_tokens)
    reading = read_requests(corpus_folder, tokenizer, options._replace(lengths=lengths), progress)
    requests = reading.requests
    gate = next(layer.gate for layer in checkpoint.spec.layers if layer.gate is not None)
    refuse_too_few(requests, gate.num_experts, gate.top_k)
    if len(requests) < options.num_requests:
        say(f"the corpus gives {len(requests)} requests, fewer than the {options.num_requests} asked for")
    generated = ("generated", lengths.decode_tokens) if options.generates else ()
    read = fingerprint(
        requests,
        PASSES_VERSION,
        FORMAT_VERSION,
        checkpoint.model_hash,
        options.seed,
        options.step_rows,
        *generated,
    )
    about = {
        "requests": len(requests),
        "tokens": sum(request.num_tokens for request in requests),
        "domains": reading.domains,
        "seed": options.seed,
        "fingerprint": read,
    }
    model = ExactModel(
        checkpoint,
        context_tokens=lengths.prompt_tokens + lengths.decode_tokens + 1,
        step_rows=options.step_rows,
        progress=lambda done, total, what: progress("load", done, total),
    )
    unfinished = Unfinished(out, read)

    def write(sections: dict[str, Section]) -> None:
        for name, (tensors, meta) in sections.items():
            write_section(
                out,
                name,
                tensors,
                {**meta, "layers": list(model.moe_layers), "requests": read},
                model_hash=checkpoint.model_hash,
                model=model_folder.resolve().name,
                corpus=about,
            )

    def run(work: Pass) -> None:
        begun = run_pass(work, unfinished, clock, progress)
        if begun:
            say(f"{work.name} went on at {begun} of {work.num_units}, where it had been stopped")

    if options.generates:
        generation = Generation(model, requests, lengths.decode_tokens, seed=options.seed)
        run(generation)
        requests = generation.requests
        about |= {"tokens": sum(request.num_tokens for request in requests), "decoded": "generated"}
    observation = Observation(model, requests, seed=options.seed)
    run(observation)
    write(observed_sections(observation, requests, reading.domains, options.seed))
    try:
        fitted_to = write_fit(out, min(options.num_homes, len(requests)))
        say(f"signatures tell answers apart with a rank correlation of {fitted_to['rho']:.3f}")
    except ArtifactError as error:
        say(f"no signatures for routing: {error}")
    mismatch = Mismatch(model, observation)
    run(mismatch)
    sensitivity = Sensitivity(model, requests, mismatch, seed=options.seed)
    run(sensitivity)
    write(loss_sections(mismatch, sensitivity))
    together = Together(model, requests, mismatch, sensitivity, seed=options.seed)
    run(together)
    write(together_section(together))
    unfinished.remove()
    return Artifact.open(out, model_hash=checkpoint.model_hash)


def read_requests(corpus_folder: Path, tokenizer: Tokenizer, options: Options, progress: Progress) -> Reading:
    """Sample the corpus's calibration split and cut requests from it."""
    domains = corpus.find_domains(corpus_folder, "calibration")
    per_domain = min(options.num_requests, max(4, 2 * -(-options.num_requests // len(domains))))
    total, done = corpus.num_bytes(domains), 0

    def seen(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress("read", min(done, total), total)

    texts = corpus.sample_documents(
        domains, per_domain, options.seed, max_chars=options.lengths.max_chars, seen=seen
    )
    requests = cut_requests(texts, tokenizer, options.num_requests, options.lengths, options.seed)
    return Reading(requests, sorted(texts))


def fitted(lengths: Lengths, context_tokens: int) -> Lengths:
    """Lengths that the model's context holds, decoding cut first to a third of it."""
    decode = min(lengths.decode_tokens, context_tokens // 3)
    return Lengths(min(lengths.prompt_tokens, context_tokens - decode - 1), decode)
