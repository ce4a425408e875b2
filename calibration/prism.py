"""`calibrate prism`: text to rows, rows to partitions and proxy gates of every expert, and those into the artifact.

Sections, L routed layers in order, E experts, F width, N sub-experts:
    partition    permutation [L, E, F] int16, new place -> neuron of the checkpoint; sub-expert s is slice s of N;
                 objective [L, E, 2] float32, share of mass lost as split and as the neurons lie
    proxy_gate   slopes, offsets [L, E, N] float32; the first meta.gate_neurons rows of a slice are its gate neurons
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from calibration.activations import ROWS_PER_EXPERT, CollectRows, LayerRows, expert_activations
from calibration.calibrate import Options, fitted, read_requests
from calibration.exact_model import ExactModel
from calibration.partition import PartitionSettings, check_settings
from calibration.passes import Progress, Unfinished, run_pass
from calibration.plain_model import read_expert
from calibration.proxy_fit import GATE_NEURONS, ExpertFit, fit_expert
from calibration.requests import Lengths, fingerprint
from edge_runtime.artifacts import INDEX_FILE, Artifact, write_section
from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from topology.ids import ExpertId


class PrismOptions(NamedTuple):
    """What a user may choose."""

    partition: PartitionSettings = PartitionSettings()
    norm_weighted: bool = False
    gate_neurons: int = GATE_NEURONS
    num_requests: int = 0
    """0: as many as give each expert ROWS_PER_EXPERT rows, were they chosen alike."""
    lengths: Lengths = Lengths()
    threads: int = 1


class SplitLayers:
    """A Pass over the routed layers that fits every expert of one, several at a time."""

    name = "split"

    def __init__(
        self, checkpoint: Checkpoint, rows: Callable[[int], LayerRows], options: PrismOptions
    ) -> None:
        self.layers = checkpoint.spec.moe_layers
        self._checkpoint, self._rows, self._options = checkpoint, rows, options
        self._fits: list[ExpertFit] = []  # by layer, stacked over experts

    @property
    def num_units(self) -> int:
        return len(self.layers)

    def run(self, unit: int) -> None:
        """See Pass."""
        layer = self.layers[unit]
        gate = self._checkpoint.spec.layers[layer].gate
        assert gate is not None, f"layer {layer} is routed"
        with ThreadPoolExecutor(self._options.threads) as pool:
            fits = pool.map(partial(self._fit, layer, self._rows(layer)), range(gate.num_experts))
            self._fits.append(_stacked(list(fits)))

    def _fit(self, layer: int, rows: LayerRows, expert: int) -> ExpertFit:
        options = self._options
        weights = read_expert(self._checkpoint, ExpertId(layer, expert))
        spec = self._checkpoint.spec.layers[layer].ffn
        seed = options.partition.seed
        activations = expert_activations(spec, weights, expert, rows, seed=seed)
        norms = weights.down.norm(dim=0) if options.norm_weighted else None
        return fit_expert(activations, options.partition, norms=norms, gate_neurons=options.gate_neurons)

    def state(self) -> dict[str, Tensor]:
        """See Pass."""
        return self.fitted()._asdict()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """See Pass."""
        self._fits = [
            ExpertFit(*each) for each in zip(*(state[name] for name in ExpertFit._fields), strict=True)
        ]

    def fitted(self) -> ExpertFit:
        """What was found, with axes for layers and experts in front."""
        return _stacked(self._fits)


def calibrate_prism(
    model_folder: Path,
    corpus_folder: Path,
    out: Path,
    options: PrismOptions,
    clock: Clock,
    *,
    progress: Progress = lambda name, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Artifact:
    """Split every expert of a model; goes on where an earlier run was stopped."""
    checkpoint = Checkpoint.open(model_folder)
    check_model(checkpoint, options.partition, str(model_folder))
    if (out / INDEX_FILE).exists():
        Artifact.open(out, model_hash=checkpoint.model_hash)
    lengths = fitted(options.lengths, checkpoint.spec.context_tokens)
    gate = checkpoint.spec.layers[checkpoint.spec.moe_layers[0]].gate
    assert gate is not None, "a routed layer has a gate"
    wanted = -(
        -2
        * ROWS_PER_EXPERT
        * gate.num_experts
        // gate.top_k
        // (lengths.prompt_tokens + lengths.decode_tokens)
    )
    choice = Options(options.num_requests or max(16, wanted), lengths, options.partition.seed)
    requests = read_requests(corpus_folder, Tokenizer.open(model_folder), choice, progress).requests
    if not requests:
        raise ConfigError(f"corpus {corpus_folder} gave no request; give one with longer texts")
    read = fingerprint(
        requests, checkpoint.model_hash, *options.partition, options.norm_weighted, options.gate_neurons
    )
    unfinished = Unfinished(out, read)
    model = ExactModel(checkpoint, context_tokens=max(request.num_tokens for request in requests) + 1)
    collected = CollectRows(model, requests)
    run_pass(collected, unfinished, clock, progress)
    splitting = SplitLayers(checkpoint, collected.rows, options)
    begun = run_pass(splitting, unfinished, clock, progress)
    if begun:
        say(f"split went on at layer {begun} of {splitting.num_units}, where it had been stopped")
    write_fit(out, checkpoint, splitting.fitted(), options, model=model_folder.resolve().name, requests=read)
    for work in (collected, splitting):
        unfinished.remove(work.name)
    return Artifact.open(out, model_hash=checkpoint.model_hash)


def check_model(checkpoint: Checkpoint, settings: PartitionSettings, name: str) -> None:
    """Refuse a model whose experts cannot be split so."""
    spec = checkpoint.spec
    if not spec.moe_layers:
        raise ConfigError(f"{name} has no layer with routed experts, so there are no experts to split")
    if spec.encoder is not None:
        raise ConfigError(
            f"{name} is an encoder-decoder ({spec.family}), expected a decoder; its experts stay whole"
        )
    check_settings(settings, spec.layers[spec.moe_layers[0]].ffn.width)


def write_fit(
    out: Path, checkpoint: Checkpoint, fit: ExpertFit, options: PrismOptions, *, model: str, requests: str
) -> None:
    """Write the sections `partition` and `proxy_gate`."""
    meta = {
        "layers": list(checkpoint.spec.moe_layers),
        "num_parts": options.partition.num_parts,
        "requests": requests,
    }
    about = meta | {
        "solver": options.partition.solver,
        "dropped": options.partition.num_dropped,
        "norm_weighted": options.norm_weighted,
    }
    partition = {"permutation": fit.order.short(), "objective": fit.objective}
    gate = {"slopes": fit.slopes, "offsets": fit.offsets}
    hash_ = checkpoint.model_hash
    write_section(out, "partition", partition, about, model_hash=hash_, model=model)
    write_section(
        out, "proxy_gate", gate, meta | {"gate_neurons": options.gate_neurons}, model_hash=hash_, model=model
    )


def _stacked(fits: list[ExpertFit]) -> ExpertFit:
    return ExpertFit(*(torch.stack(part) for part in zip(*fits, strict=True)))
