"""`calibrate prism`: what it writes, that a stop changes nothing, and whom it refuses."""

import shutil

import pytest
import torch

from calibration.activations import CollectRows, expert_activations
from calibration.elastic_eval import perplexity, proxy_route, split_experts
from calibration.partition import PartitionSettings
from calibration.passes import Unfinished
from calibration.plain_model import PlainModel, read_expert
from calibration.prism import PrismOptions, SplitLayers, calibrate_prism, write_fit
from calibration.requests import Lengths
from calibration.tier_losses import TierLosses, measure_tiers
from edge_runtime.artifacts import Artifact, remove_section
from edge_runtime.clock import SystemClock
from edge_runtime.elastic.sub_experts import read_sub_experts
from edge_runtime.errors import ArtifactError, ConfigError, UserError
from edge_runtime.model.checkpoint import Checkpoint
from tests.support.calibrating import exact_model, random_requests, small_corpus, write_family
from tests.support.clusters import MODEL
from tests.support.families import VARIANTS, write_variant
from topology.ids import ExpertId

SMALL = PrismOptions(PartitionSettings(swaps=200), num_requests=16, lengths=Lengths(32, 16), threads=2)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """The demo model's experts split by a few requests."""
    folder = tmp_path_factory.mktemp("prism")
    corpus = small_corpus(folder / "corpus")
    return calibrate_prism(MODEL, corpus, folder / "out", SMALL, SystemClock())


def test_every_expert_is_split_and_loses_no_more_than_as_its_neurons_lie(artifact):
    checkpoint = Checkpoint.open(MODEL)
    parts = read_sub_experts(artifact, checkpoint.spec)
    assert parts is not None and parts.num_parts == 4 and set(parts.layers) == set(checkpoint.spec.moe_layers)
    split, contiguous = artifact.tensor("partition", "objective").unbind(-1)
    assert (split <= contiguous).all() and (split < contiguous).float().mean() > 0.5
    for layer in parts.layers.values():
        assert (layer.slopes >= 0).all() and (layer.offsets >= -1e-6).all()


def test_the_full_tier_is_the_model_and_less_is_worse(artifact):
    model = PlainModel(Checkpoint.open(MODEL))
    windows = torch.randint(3, 8000, (1, 48), generator=torch.Generator().manual_seed(0))
    full = perplexity(model, windows, None)
    parts = read_sub_experts(artifact, model.spec)
    split_experts(model, parts)
    assert perplexity(model, windows, proxy_route(model, parts, 16)) == pytest.approx(full, rel=1e-4)
    assert perplexity(model, windows, proxy_route(model, parts, 1)) != pytest.approx(full, rel=1e-3)


def test_a_stopped_split_ends_with_the_numbers_of_one_that_was_not(tmp_path):
    folder = write_family("qwen3_moe", tmp_path / "model")
    model = exact_model(folder)
    rows = CollectRows(model, random_requests(20))
    for unit in range(rows.num_units):
        rows.run(unit)
    options = PrismOptions(PartitionSettings(num_parts=2, swaps=100))
    whole = SplitLayers(model.checkpoint, rows.rows, options)
    first, second = (SplitLayers(model.checkpoint, rows.rows, options) for _ in range(2))
    for unit in range(whole.num_units):
        whole.run(unit)
    first.run(0)
    kept = Unfinished(tmp_path, "same")
    kept.save(first.name, first.state(), 1)
    second.restore(kept.load(first.name)[0])
    for unit in range(1, second.num_units):
        second.run(unit)
    for found, expected in zip(second.fitted(), whole.fitted(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, "plain") for family in sorted(VARIANTS)]
    + [("qwen3_moe", "layer 0 dense"), ("gpt_oss", "mxfp4")],
)
def test_experts_of_every_family_are_split_and_the_full_tier_is_the_model(family, variant, tmp_path):
    folder = write_variant(family, variant, tmp_path / "model")
    model = exact_model(folder)
    checkpoint = model.checkpoint
    rows = CollectRows(model, random_requests(8))
    for unit in range(rows.num_units):
        rows.run(unit)
    options = PrismOptions(PartitionSettings(num_parts=2, swaps=50), gate_neurons=2)
    splitting = SplitLayers(checkpoint, rows.rows, options)
    for unit in range(splitting.num_units):
        splitting.run(unit)
    write_fit(tmp_path / "out", checkpoint, splitting.fitted(), options, model=family, requests="")
    parts = read_sub_experts(Artifact.open(tmp_path / "out"), checkpoint.spec)
    assert parts is not None and tuple(parts.layers) == checkpoint.spec.moe_layers
    split, contiguous = splitting.fitted().objective.unbind(-1)
    assert (split <= contiguous + 1e-6).all()
    plain = PlainModel(checkpoint)
    windows = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(0))
    full = 2 * max(layer.gate.top_k for layer in checkpoint.spec.layers if layer.gate)
    whole = perplexity(plain, windows, None)
    split_experts(plain, parts)
    assert perplexity(plain, windows, proxy_route(plain, parts, full)) == pytest.approx(whole, rel=1e-4)
    losses = TierLosses(plain, parts, torch.ones(len(parts.layers)), windows)
    losses.run(0)
    for name, values in losses.means().items():
        assert (values[:, -1] == 0).all(), f"the full tier leaves out nothing: {name}"
        assert (values.diff(dim=1) <= 1e-5).all() or name == "deviation", (
            f"more runs, less is left out: {name}"
        )


def test_an_expert_that_hardly_any_row_chose_is_shown_all_rows(tmp_path):
    folder = write_family("qwen3_moe", tmp_path / "model")
    model = exact_model(folder)
    collected = CollectRows(model, random_requests(20))
    for unit in range(collected.num_units):
        collected.run(unit)
    layer = model.moe_layers[0]
    rows = collected.rows(layer)
    spec, weights = model.spec.layers[layer].ffn, read_expert(model.checkpoint, ExpertId(layer, 1))
    nobody = rows._replace(expert_ids=torch.zeros_like(rows.expert_ids))
    assert len(expert_activations(spec, weights, 1, nobody)) == len(rows.x)
    assert len(expert_activations(spec, weights, 0, nobody, most=10)) == 10


def test_who_cannot_be_split_is_told_in_a_sentence(tmp_path):
    corpus = small_corpus(tmp_path / "corpus")

    def attempt(folder, options=SMALL, out="out"):
        calibrate_prism(folder, corpus, tmp_path / out, options, SystemClock())

    dense = write_family("qwen3_moe", tmp_path / "dense", mlp_only_layers=[0, 1, 2])
    with pytest.raises(ConfigError, match="no layer with routed experts"):
        attempt(dense)
    with pytest.raises(ConfigError, match=r"is an encoder-decoder \(switch_transformers\)"):
        attempt(write_family("switch_transformers", tmp_path / "switch"))
    with pytest.raises(UserError, match="7 sub-experts per expert: found experts of width 96"):
        attempt(MODEL, SMALL._replace(partition=PartitionSettings(num_parts=7)))


def test_an_artifact_of_other_experts_is_refused(artifact, tmp_path):
    other = Checkpoint.open(write_family("qwen3_moe", tmp_path / "model"))
    with pytest.raises(ArtifactError, match="expected"):
        Artifact.open(artifact.folder, model_hash=other.model_hash)
    with pytest.raises(ArtifactError, match="run `edge-runtime calibrate prism`"):
        read_sub_experts(artifact, other.spec)


def test_what_layers_lose_at_each_tier_is_measured_and_what_it_needs_is_named(artifact, tmp_path):
    corpus, clock, out = small_corpus(tmp_path / "corpus"), SystemClock(), tmp_path / "out"
    shutil.copytree(MODEL / "calibration", out)
    remove_section(out, "tier_losses")
    assert read_sub_experts(Artifact.open(out), Checkpoint.open(MODEL).spec).tier_losses is None
    found = measure_tiers(MODEL, corpus, out, clock, num_windows=2, window_tokens=24)
    parts = read_sub_experts(found, Checkpoint.open(MODEL).spec)
    assert parts is not None and parts.tier_losses is not None
    for losses in parts.tier_losses.values():
        assert len(losses) == 16 and losses[-1] == 0 < losses[0]
    assert sum(parts.split_of(6).values()) == 36
    with pytest.raises(ArtifactError, match="has no section sensitivity; run `edge-runtime calibrate` first"):
        measure_tiers(MODEL, corpus, artifact.folder, clock, num_windows=2, window_tokens=24)


def test_the_demo_models_artifact_spreads_k_so_that_less_is_lost():
    parts = read_sub_experts(Artifact.open(MODEL / "calibration"), Checkpoint.open(MODEL).spec)
    assert parts is not None and parts.tier_losses is not None
    for tier in range(1, 16):
        spread = parts.split_of(tier)
        lost = sum(parts.tier_losses[layer][own - 1] for layer, own in spread.items())
        even = sum(losses[tier - 1] for losses in parts.tier_losses.values())
        assert sum(spread.values()) == 6 * tier and lost <= even
