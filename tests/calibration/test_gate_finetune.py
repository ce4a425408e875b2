"""The linear gate: untrained it is the model's own, training changes its rows and nothing else, in every decoder family."""

import copy

import msgspec
import pytest
import torch

from calibration.elastic_eval import whole_route
from calibration.gate_finetune import TuneGate, TuneSettings
from calibration.linear_gate import check_tier, expanded, linear_route
from calibration.partition import PartitionSettings
from calibration.plain_model import PlainModel
from calibration.prism import PrismOptions, calibrate_prism
from calibration.requests import Lengths
from calibration.tune import TuneOptions, tune_gate, tuned_rows
from edge_runtime.artifacts import Artifact
from edge_runtime.clock import SystemClock
from edge_runtime.errors import ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.calibrating import small_corpus, write_family
from tests.support.clusters import MODEL
from tests.support.families import VARIANTS

WINDOWS = torch.randint(3, 500, (6, 20), generator=torch.Generator().manual_seed(0))


def frozen(model: PlainModel) -> list[torch.Tensor]:
    """Every weight but the gates'."""
    trunk = [part for layer in model.layers for part in layer.values()]
    experts = [part for each in model.experts.values() for part in each if part is not None]
    return [model.embed, model.head, model.final_norm, *trunk, *experts]


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_only_the_rows_of_the_gate_change_and_the_loss_falls(family, tmp_path):
    model = PlainModel(Checkpoint.open(write_family(family, tmp_path)))
    before = copy.deepcopy(frozen(model))
    tune = TuneGate(model, 4, WINDOWS, TuneSettings(steps=3, batch=2, learning_rate=1e-3))
    start = {layer: weight.clone() for layer, (weight, _) in tune.tuned().items()}
    for unit in range(3):
        tune.run(unit)
    assert all(torch.equal(*pair) for pair in zip(frozen(model), before, strict=True))
    assert all(not torch.equal(weight, start[layer]) for layer, (weight, _) in tune.tuned().items())
    assert all(torch.isfinite(torch.tensor(tune.losses)).flatten())
    assert [tune.tier(unit) for unit in range(3)] == sorted(tune.tier(unit) for unit in range(3))
    assert tune.tier(2) == tune.full_tier


@pytest.mark.parametrize("family", sorted(VARIANTS))
def test_untrained_it_chooses_whole_experts_with_their_trained_weights(family, tmp_path):
    model = PlainModel(Checkpoint.open(write_family(family, tmp_path)))
    top_k = max(layer.gate.top_k for layer in model.spec.layers if layer.gate)
    with torch.no_grad():
        native = dict(model.gates)
        expected = {
            k: model.logits(model.run(WINDOWS[:2], whole_route(model, k, renormalise=False)))
            for k in (1, top_k)
        }
        model.gates = {layer: expanded(gate, 2) for layer, gate in native.items()}
        for k, logits in expected.items():
            found = model.logits(model.run(WINDOWS[:2], linear_route(model, 2, 2 * k)))
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_training_that_was_stopped_goes_on_bit_for_bit(tmp_path):
    model = PlainModel(Checkpoint.open(write_family("qwen3_moe", tmp_path)))
    settings = TuneSettings(steps=4, batch=2)
    native = dict(model.gates)

    def fresh() -> TuneGate:
        model.gates = dict(native)
        return TuneGate(model, 2, WINDOWS, settings)

    whole = fresh()
    for unit in range(4):
        whole.run(unit)
    first = fresh()
    first.run(0)
    first.run(1)
    second = fresh()
    second.restore(first.state())
    second.run(2)
    second.run(3)
    for layer, (weight, _) in whole.tuned().items():
        assert torch.equal(second.tuned()[layer][0], weight)
    assert second.losses == whole.losses


def test_tuned_rows_are_kept_in_the_artifact_and_read_again(tmp_path):
    corpus = small_corpus(tmp_path / "corpus")
    options = PrismOptions(PartitionSettings(swaps=200), num_requests=16, lengths=Lengths(32, 16))
    clock = SystemClock()
    calibrate_prism(MODEL, corpus, tmp_path / "out", options, clock)
    choice = TuneOptions(TuneSettings(steps=2, batch=1), window_tokens=24, num_windows=4)
    artifact = tune_gate(MODEL, corpus, tmp_path / "out", choice, clock)
    model = PlainModel(Checkpoint.open(MODEL))
    rows = tuned_rows(artifact, model.spec)
    assert rows is not None and set(rows) == set(model.gates)
    moved = [not torch.equal(rows[i][0], expanded(gate, 4)[0]) for i, gate in model.gates.items()]
    assert all(moved)
    unsplit = Artifact(tmp_path, msgspec.structs.replace(artifact.index, sections={}))
    assert tuned_rows(unsplit, model.spec) is None


def test_a_tier_that_is_none_is_refused(tmp_path):
    spec = Checkpoint.open(write_family("qwen3_moe", tmp_path)).spec.layers[0].gate
    with pytest.raises(ConfigError, match="K is 0, expected 1 to"):
        check_tier(0, spec, 4)
