"""`calibrate gate`: windows of text to a tuned linear gate, and that into the artifact.

Section linear_gate, L routed layers in order, E experts, N sub-experts: weight [L, E * N, D] float32 and, in models whose
gates have one, bias [L, E * N]; row e * N + s belongs to sub-expert s of expert e. losses [steps, 2]: cross-entropy and
divergence of each step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from calibration.gate_finetune import TuneGate, TuneSettings
from calibration.linear_gate import Rows
from calibration.passes import Progress, Unfinished, run_pass
from calibration.plain_model import PlainModel
from calibration.requests import fingerprint
from calibration.windows import read_windows
from edge_runtime.artifacts import INDEX_FILE, Artifact, write_section
from edge_runtime.clock import Clock
from edge_runtime.elastic.linear_gate import SECTION, read_linear_gate
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.errors import ArtifactError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.spec import ModelSpec
from edge_runtime.model.tokenizer import Tokenizer


class TuneOptions(NamedTuple):
    """What a user may choose."""

    settings: TuneSettings = TuneSettings()
    window_tokens: int = 256
    num_windows: int = 4000


def split_artifact(folder: Path, checkpoint: Checkpoint) -> tuple[Artifact, SubExperts]:
    """A model's artifact and how it splits the experts. ArtifactError with the next step where it is not there or does not."""
    if not (folder / INDEX_FILE).exists():
        raise ArtifactError(
            f"calibration artifact {folder} does not exist; run `edge-runtime calibrate prism`, which splits the experts, first"
        )
    artifact = Artifact.open(folder, model_hash=checkpoint.model_hash)
    parts = read_sub_experts(artifact, checkpoint.spec)
    if parts is None:
        raise ArtifactError(
            f"calibration artifact {folder} has no section partition; run `edge-runtime calibrate prism` first"
        )
    return artifact, parts


def tune_gate(
    model_folder: Path,
    corpus_folder: Path,
    out: Path,
    options: TuneOptions,
    clock: Clock,
    *,
    progress: Progress = lambda name, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Train the rows of the linear gate of a model whose experts are split; goes on where an earlier run was stopped."""
    checkpoint = Checkpoint.open(model_folder)
    artifact, parts = split_artifact(out, checkpoint)
    windows = read_windows(
        corpus_folder,
        "calibration",
        Tokenizer.open(model_folder),
        window_tokens=min(options.window_tokens, checkpoint.spec.context_tokens),
        num_windows=options.num_windows,
        seed=options.settings.seed,
    )
    model = PlainModel(checkpoint)
    for layer, each in parts.layers.items():
        model.experts[layer] = model.experts[layer].permuted(each.permutation)
    work = TuneGate(model, parts.num_parts, windows, options.settings)
    unfinished = Unfinished(
        out, fingerprint([], artifact.content_hash, options, windows.sum().item(), tuple(windows.shape))
    )
    begun = run_pass(work, unfinished, clock, progress)
    if begun:
        say(f"tuning went on at step {begun} of {work.num_units}, where it had been stopped")
    weights, biases = zip(*work.tuned().values(), strict=True)
    tensors = {"weight": torch.stack(weights), "losses": torch.tensor(work.losses)}
    if biases[0] is not None:
        tensors["bias"] = torch.stack(biases)
    meta = {
        "layers": list(checkpoint.spec.moe_layers),
        "num_parts": parts.num_parts,
        **options.settings._asdict(),
    }
    write_section(out, SECTION, tensors, meta, model_hash=checkpoint.model_hash)
    unfinished.remove(work.name)
    return Artifact.open(out, model_hash=checkpoint.model_hash)


def tuned_rows(artifact: Artifact, spec: ModelSpec) -> dict[int, Rows] | None:
    """The tuned linear gate by layer; None if it was never tuned."""
    if not artifact.has(SECTION):
        return None
    return read_linear_gate(artifact, spec, int(artifact.meta(SECTION)["num_parts"]))
