"""`calibrate tiers`: what a layer loses at each K: how far its output is off, and how much gate weight its slices leave out.

Section tier_losses, L routed layers in order, F = N * k0 tiers from 1 to the full one, means over rows of text:
    mass       [L, F] float32, share of gate weight that the proxy gate leaves out
    square     [L, F] float32, its square
    deviation  [L, F] float32, squared length of what is left out, by the squared scale of section sensitivity

One unit is one window, run through the whole model. Deviations are of one layer at a time, as sensitivities are: a token's
expected loss at K is the sum over layers of a layer's sensitivity and its deviation.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from calibration.elastic_eval import slice_activations, split_experts
from calibration.passes import Progress, Unfinished, run_pass
from calibration.plain_model import PlainModel, Routed, choose_experts
from calibration.requests import fingerprint
from calibration.tune import split_artifact
from calibration.windows import read_windows
from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.clock import Clock
from edge_runtime.elastic.proxy_gate import best_first, dropped_shares, slice_scores
from edge_runtime.elastic.sub_experts import TIER_LOSSES, SubExperts
from edge_runtime.errors import ArtifactError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer

CHUNK_BYTES = 64 << 20


class TierLosses:
    """A Pass over windows [n, S] int64 of a plain model whose experts are split.

    scale  [L] float32, what lengths of a layer's outputs are relative to
    """

    name = "tiers"

    def __init__(self, model: PlainModel, parts: SubExperts, scale: Tensor, windows: Tensor) -> None:
        self._model, self._parts, self._windows = model, parts, windows
        self._place = {layer: place for place, layer in enumerate(model.spec.moe_layers)}
        self._scale = scale.double()
        full = parts.num_parts * max(layer.gate.top_k for layer in model.spec.layers if layer.gate)
        self.sums = torch.zeros(3, len(self._place), full, dtype=torch.float64)
        self.rows = torch.zeros(1, dtype=torch.float64)

    @property
    def num_units(self) -> int:
        return len(self._windows)

    def run(self, unit: int) -> None:
        """See Pass."""
        window = self._windows[unit][None]
        with torch.no_grad():
            self._model.run(window, self._look)
        self.rows += window.numel()

    def _look(self, layer: int, x: Tensor, logits: Tensor) -> Routed:
        model, place, N = self._model, self._place[layer], self._parts.num_parts
        spec = model.spec.layers[layer].gate
        assert spec is not None, f"layer {layer} has no gate"
        ids, weights = choose_experts(spec, logits, **model.gate_extras(layer))
        chunk = max(1, CHUNK_BYTES // (4 * x.shape[1] * N * spec.top_k))
        for first in range(0, len(x), chunk):
            part = slice(first, first + chunk)
            self._add(layer, place, x[part], ids[part], weights[part])
        return Routed(ids, weights[..., None])

    def _add(self, layer: int, place: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        parts, N = self._parts, self._parts.num_parts
        each = parts.layers[layer]
        scores = slice_scores(
            weights, slice_activations(self._model, parts, layer, x, ids), each.slopes[ids], each.offsets[ids]
        )
        outputs = torch.zeros(*ids.shape, N, x.shape[1])
        down = self._model.experts[layer].down
        for expert in ids.unique().tolist():
            rows, columns = (ids == expert).nonzero(as_tuple=True)
            inner = self._model.activations(layer, expert, x[rows]).unflatten(1, (N, -1))
            outputs[rows, columns] = torch.einsum("nsf,dsf->nsd", inner, down[expert].unflatten(1, (N, -1)))
        outputs *= weights[..., None, None]
        # Worst first, so that running sums are what K = F, F - 1, .. leave out.
        worst_first = best_first(scores).flip(1)
        lost = outputs.flatten(1, 2).gather(1, worst_first[..., None].expand(-1, -1, x.shape[1])).cumsum(1)
        shares = dropped_shares(weights, scores).flatten(1).gather(1, worst_first).cumsum(1).double()
        square = lost.double().square().sum(-1) / self._scale[place] ** 2
        for index, values in enumerate((shares, shares.square(), square)):
            # With n + 1 of the worst left out, K is F - n - 1; the full tier leaves out nothing.
            self.sums[index, place, :-1] += values.sum(0).flip(0)[1:]

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return {"sums": self.sums, "rows": self.rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self.sums, self.rows = state["sums"], state["rows"]

    def means(self) -> dict[str, Tensor]:
        """The tensors of the section."""
        found = (self.sums / self.rows.clamp_min(1)).float()
        return dict(zip(("mass", "square", "deviation"), found, strict=True))


def measure_tiers(
    model_folder: Path,
    corpus_folder: Path,
    out: Path,
    clock: Clock,
    *,
    num_windows: int = 32,
    window_tokens: int = 256,
    seed: int = 1,
    progress: Progress = lambda name, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Measure what each layer of a model whose experts are split loses at each K; goes on where it was stopped."""
    checkpoint = Checkpoint.open(model_folder)
    artifact, parts = split_artifact(out, checkpoint)
    if not artifact.has("sensitivity"):
        raise ArtifactError(
            f"calibration artifact {out} has no section sensitivity; run `edge-runtime calibrate` first"
        )
    windows = read_windows(
        corpus_folder,
        "calibration",
        Tokenizer.open(model_folder),
        window_tokens=min(window_tokens, checkpoint.spec.context_tokens),
        num_windows=num_windows,
        seed=seed,
    )
    model = PlainModel(checkpoint)
    split_experts(model, parts)
    work = TierLosses(model, parts, artifact.tensor("sensitivity", "scale"), windows)
    unfinished = Unfinished(
        out, fingerprint([], artifact.content_hash, windows.sum().item(), tuple(windows.shape))
    )
    begun = run_pass(work, unfinished, clock, progress)
    if begun:
        say(f"went on at window {begun} of {work.num_units}, where it had been stopped")
    meta = {"layers": list(checkpoint.spec.moe_layers), "num_parts": parts.num_parts, "seed": seed}
    write_section(out, TIER_LOSSES, work.means(), meta, model_hash=checkpoint.model_hash)
    unfinished.remove(work.name)
    return Artifact.open(out, model_hash=checkpoint.model_hash)
