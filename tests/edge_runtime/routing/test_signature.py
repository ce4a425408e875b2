"""From counts to signatures."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.routing.signature import SignatureRule, check_conservation, idf_weights, unit_rows

COUNTS = np.array(
    [[[3, 0, 1], [4, 0, 0]], [[2, 2, 0], [4, 0, 0]]], dtype=np.int16
)  # [2 requests, 2 layers, 3]


def test_an_expert_that_everybody_used_weighs_nothing_and_a_rare_one_much():
    weights = idf_weights(COUNTS)
    assert weights.dtype == np.float32
    assert weights[0].tolist() == pytest.approx([0.0, math.log(3 / 2), math.log(3 / 2)])
    assert weights[1].tolist() == pytest.approx([0.0, math.log(3), math.log(3)])


def test_a_signature_has_one_norm_over_its_layers_together():
    rule = SignatureRule((0, 1), np.array([[1, 1, 1], [2, 0, 0]], dtype=np.float32))
    assert rule.signature(COUNTS[0]).tolist() == pytest.approx(
        [3 / 74**0.5, 0, 1 / 74**0.5, 8 / 74**0.5, 0, 0]
    )


def test_only_the_layers_of_the_mask_count():
    rule = SignatureRule((1,), np.ones((2, 3), dtype=np.float32))
    assert rule.dim == 3
    assert rule.signature(COUNTS[0]).tolist() == [1, 0, 0]


def test_choices_that_say_nothing_give_a_signature_of_zeros():
    rule = SignatureRule((0,), np.zeros((2, 3), dtype=np.float32))
    assert not rule.signature(COUNTS[0]).any()


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (0, 2)])
def test_a_mask_that_names_no_layer_is_refused(layers):
    with pytest.raises(ValueError, match="not ascending places among 2"):
        SignatureRule(layers, np.ones((2, 3), dtype=np.float32))


def test_counts_of_another_model_are_refused():
    rule = SignatureRule((0,), np.ones((2, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"\[2, 4\] layers and experts, expected \[2, 3\]"):
        rule.signature(np.zeros((2, 4), dtype=np.int16))


@given(st.integers(0, 2**32 - 1))
def test_experts_without_weight_never_change_a_signature(seed):
    rng = np.random.default_rng(seed)
    weights = rng.random((3, 8)).astype(np.float32)
    weights[rng.random((3, 8)) < 0.4] = 0
    rule = SignatureRule((0, 2), weights)
    counts = rng.integers(0, 100, (3, 8))
    other = np.where(weights == 0, rng.integers(0, 100, (3, 8)), counts)
    assert (rule.signature(counts) == rule.signature(other)).all()
    found = rule.signature(counts)
    assert (found >= 0).all()
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5) or not found.any()


def test_lost_and_doubled_choices_are_found():
    check_conservation(COUNTS[0], 2, [2, 2])
    with pytest.raises(ValueError, match="layer 1 has 4 choices of 2 prompt tokens, expected 2"):
        check_conservation(COUNTS[0], 2, [2, 1])


def test_unit_rows_leaves_zeros_alone():
    assert unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])).tolist() == [[0, 0], pytest.approx([0.6, 0.8])]
