"""Fitting signatures to counts."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from calibration.signatures_fit import (
    answer_distances,
    draw_pairs,
    fit_section,
    rank_quality,
    select_layers,
    variant_values,
    write_fit,
)
from edge_runtime.artifacts import Artifact, write_section
from edge_runtime.errors import ArtifactError
from edge_runtime.routing.fit import SECTION, band_for, read_fit
from edge_runtime.routing.locality_band import PAPER
from edge_runtime.routing.signature import SignatureRule, idf_weights


def recorded(
    num_requests: int = 60, layers: int = 4, experts: int = 12, domains: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Prefill counts, decode counts and domains of requests whose later layers are the more telling."""
    rng = np.random.default_rng(seed)
    domain = np.arange(num_requests) % domains
    taste = rng.gamma(0.3, 1, (domains, layers, experts))
    telling = np.linspace(0, 1, layers)[:, None]
    p = telling * taste[domain] + (1 - telling) * rng.gamma(2, 1, (num_requests, layers, experts)) + 0.05
    p /= p.sum(axis=-1, keepdims=True)
    return rng.poisson(p * 25).astype(np.int16), rng.poisson(p * 100).astype(np.int16), domain


def slow_rho(prefill: np.ndarray, decode: np.ndarray, layers: list[int]) -> float:
    """Spearman's rho as the plain definition has it."""
    signatures = SignatureRule(tuple(layers), idf_weights(prefill)).signatures(prefill)
    pairs = draw_pairs(len(prefill))
    cosine = np.einsum("pd,pd->p", signatures[pairs[:, 0]], signatures[pairs[:, 1]])
    return float(spearmanr(1 - cosine, answer_distances(decode, pairs)).statistic)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_mask_is_that_of_the_plain_greedy_search(seed):
    prefill, decode, _ = recorded(24, 3, 6, seed=seed)
    found = select_layers(prefill * idf_weights(prefill), decode)
    taken: list[int] = []
    for place in range(3):
        trials = {
            layer: slow_rho(prefill, decode, sorted([*taken, layer]))
            for layer in range(3)
            if layer not in taken
        }
        best = max(trials.values())
        assert found.curve[place] == pytest.approx(best, abs=2e-3)
        taken.append(min(layer for layer, rho in trials.items() if rho > best - 1e-9))
    assert found.rho == max(found.curve) >= found.all_layers
    assert slow_rho(prefill, decode, list(found.layers)) == pytest.approx(found.rho, abs=2e-3)


def test_layers_that_tell_more_are_taken_first():
    prefill, decode, _ = recorded(layers=5, seed=3)
    assert 4 in select_layers(prefill * idf_weights(prefill), decode).layers


def test_what_is_written_is_what_the_runtime_reads_and_domains_go_apart():
    prefill, decode, domain = recorded(72)
    tensors, meta = fit_section(prefill, decode, 3)
    fit = read_fit(tensors, meta, layers=4, experts=12)
    assert meta["num_clusters"] == fit.num_clusters == 3 and meta["requests"] == 72
    router = band_for(fit, ["a", "b", "c"], PAPER)
    best = (fit.rule.signatures(prefill) @ router.centroids.T).argmax(axis=1)
    of_domain = np.array([np.bincount(best[domain == d], minlength=3) for d in range(3)])
    assert set(of_domain.argmax(axis=1)) == {0, 1, 2}
    assert of_domain.max(axis=1).min() >= 20  # of 24


def test_another_number_of_homes_gets_clusters_of_its_own_without_a_model():
    tensors, meta = fit_section(*recorded(60)[:2], 3)
    fit = read_fit(tensors, meta, layers=4, experts=12, decode_counts=recorded(60)[1])
    found = fit.clusters_for(5)
    assert len(found.centroids) == 5 and np.bincount(found.labels).tolist() == [12] * 5
    assert fit.demand(found).sum(axis=2) == pytest.approx(np.ones((5, 4)), abs=1e-5)
    assert fit.clusters_for(3) is fit.fitted


def test_homes_get_the_clusters_whose_experts_they_hold():
    prefill, decode, _ = recorded(60, layers=2)
    tensors, meta = fit_section(prefill, decode, 3)
    fit = read_fit(tensors, meta, layers=2, experts=12, decode_counts=decode)
    demand = fit.demand(fit.fitted)
    turned = demand[[2, 0, 1]]
    resident = turned >= np.sort(turned, axis=2)[:, :, -4:-3]
    router = band_for(fit, ["a", "b", "c"], PAPER, resident=resident)
    assert (router.centroids == fit.fitted.centroids[[2, 0, 1]]).all()


def test_every_variant_has_its_values():
    prefill, decode, _ = recorded()
    for variant in ("count_idf", "count", "sqrt", "binary"):
        values = variant_values(variant, prefill)
        assert values.shape == prefill.shape
        assert 0 < rank_quality(values.reshape(len(values), -1), decode) <= 1
    assert (variant_values("probability", prefill, probabilities=prefill / 2) == prefill / 2).all()
    with pytest.raises(ValueError, match="the variants are count_idf, count"):
        variant_values("logit", prefill)


@pytest.mark.parametrize(
    ("prefill", "decode", "told"),
    [
        (np.ones((4, 2, 3)), np.ones((4, 2, 4)), "not of the same requests"),
        (np.ones((1, 2, 3)), np.ones((1, 2, 3)), "tell nothing apart"),
        (np.ones((4, 2, 3)), np.zeros((4, 2, 3)), "decode counts are all 0"),
        (np.ones((4, 2, 3)), np.ones((4, 2, 3)), "0 calibration signatures"),  # everybody used everything
    ],
)
def test_counts_that_tell_nothing_are_refused(prefill, decode, told):
    with pytest.raises(ArtifactError, match=told):
        fit_section(prefill.astype(np.int16), decode.astype(np.int16), 2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"idf": np.ones((5, 12))}, r"fitted for \[5, 12\] .* this model has \[4, 12\]"),
        ({"idf": np.full((4, 12), -1.0)}, "idf has a -1, expected at least 0"),
        ({"idf": np.zeros((4, 12))}, "idf is 0 in every layer that counts"),
        ({"idf": np.full((4, 12), np.nan)}, "idf has numbers that are not finite"),
        ({"idf": np.ones(4)}, r"idf is float64 \[4\], expected a table of floating-point numbers"),
        ({"layer_mask": np.array([9])}, "not ascending places"),
        ({"layer_mask": np.array([-1, 0])}, "not ascending places"),
        ({"layer_mask": np.array([np.inf])}, "expected a row of whole numbers"),
        ({"centroids": np.ones((3, 7))}, r"centroids is \[3, 7\]"),
        ({"centroids": np.full((3, 7), np.inf)}, "centroids has numbers that are not finite"),
        ({"signatures": np.ones(60)}, "expected a table of floating-point numbers"),
        ({"signatures": np.full((60, 48), np.nan)}, "signatures has numbers that are not finite"),
        ({"labels": np.full(60, np.nan)}, "expected a row of whole numbers"),
        ({"labels": np.full(60, -1)}, "labels outside its 3 clusters"),
        ({"labels": np.full(60, 5)}, "labels outside its 3 clusters"),
        ({"requests": np.arange(59)}, "requests is"),
        ({"requests": np.full(60, 60)}, "requests 60 to 60 are named of 60"),
        ({"signatures": None}, "lacks signatures"),
    ],
)
def test_a_section_of_another_model_or_half_of_one_is_refused(change, told):
    tensors, meta = fit_section(*recorded(60)[:2], 3)
    changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
    with pytest.raises(ArtifactError, match=told):
        read_fit(changed, meta, layers=4, experts=12, decode_counts=recorded(60)[1])
    assert SECTION == "signature_fit"


@pytest.mark.parametrize(("value", "told"), [(0.0, "are empty"), (1.0, "are the same")])
def test_signatures_that_tell_nothing_are_refused_when_they_are_read(value, told):
    tensors, meta = fit_section(*recorded(60)[:2], 3)
    tensors["signatures"] = np.full_like(tensors["signatures"], value)
    with pytest.raises(ArtifactError, match=told):
        read_fit(tensors, meta, layers=4, experts=12)


def test_a_centroid_of_zeros_is_refused_when_it_is_read():
    tensors, meta = fit_section(*recorded(60)[:2], 3)
    tensors["centroids"] = np.array(tensors["centroids"])
    tensors["centroids"][1] = 0.0
    with pytest.raises(ArtifactError, match="centroids is 0 in row 1"):
        read_fit(tensors, meta, layers=4, experts=12)


def test_counts_below_zero_are_refused():
    tensors, meta = fit_section(*recorded(60)[:2], 3)
    with pytest.raises(ArtifactError, match="decode_counts has a -1, expected whole numbers of at least 0"):
        read_fit(tensors, meta, layers=4, experts=12, decode_counts=np.full((60, 4, 12), -1))


def test_an_artifact_gets_its_fit_from_its_recorded_requests(tmp_path):
    prefill, decode, _ = recorded(48)
    counts = {"prefill_counts": torch.from_numpy(prefill), "decode_counts": torch.from_numpy(decode)}
    write_section(tmp_path, "requests", counts, model_hash="m")
    meta = write_fit(tmp_path, 4)
    artifact = Artifact.open(tmp_path, model_hash="m")
    tensors = {name: tensor.numpy() for name, tensor in artifact.tensors(SECTION).items()}
    assert (
        read_fit(tensors, artifact.meta(SECTION), layers=4, experts=12).num_clusters
        == meta["num_clusters"]
        == 4
    )
    write_section(tmp_path, "requests", {"prefill_counts": counts["prefill_counts"]}, model_hash="m")
    with pytest.raises(ArtifactError, match="lacks prefill_counts or decode_counts"):
        write_fit(tmp_path, 4)
