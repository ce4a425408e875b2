"""gate_topk: who is chosen, and the weights."""

import pytest
import torch

from kernels import ops


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("T, E, k", [(1, 1, 1), (7, 17, 5), (16, 32, 4), (5, 128, 8), (3, 5, 5), (0, 8, 2)])
def test_gate_topk_agrees_with_the_reference(backend, by_reference, random, T, E, k, renormalise):
    logits = random(T, E, scale=3.0)
    ids, weights = ops.gate_topk(logits, k, renormalise=renormalise)
    expected_ids, expected_weights = by_reference(lambda: ops.gate_topk(logits, k, renormalise=renormalise))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32


def test_weights_are_the_softmax_over_all_experts(backend, random):
    logits = random(6, 40)
    ids, weights = ops.gate_topk(logits, 3, renormalise=False)
    torch.testing.assert_close(weights, logits.softmax(dim=-1).gather(-1, ids.long()))
    _, renormalised = ops.gate_topk(logits, 3, renormalise=True)
    torch.testing.assert_close(renormalised.sum(dim=-1), torch.ones(6))


def test_ties_go_to_the_lowest_id(backend):
    logits = torch.zeros(2, 40)
    logits[0, [33, 20, 5]] = 1.0
    ids, _ = ops.gate_topk(logits, 4, renormalise=True)
    assert ids.tolist() == [[5, 20, 33, 0], [0, 1, 2, 3]]


def test_masked_experts_come_last_and_weigh_nothing(backend):
    logits = torch.full((1, 20), -torch.inf)
    logits[0, 7] = 1.0
    ids, weights = ops.gate_topk(logits, 3, renormalise=True)
    assert ids.tolist() == [[7, 0, 1]] and weights.tolist() == [[1, 0, 0]]


def test_a_poisoned_row_gives_valid_ids_and_stays_in_its_row(backend, random):
    logits = random(3, 20)
    clean_ids, clean_weights = ops.gate_topk(logits, 4, renormalise=True)
    logits[1] = torch.nan
    ids, weights = ops.gate_topk(logits, 4, renormalise=True)
    assert len(set(ids[1].tolist())) == 4 and ids[1].min() >= 0 and ids[1].max() < 20
    assert torch.equal(ids[::2], clean_ids[::2]) and torch.equal(weights[::2], clean_weights[::2])


def test_large_logits_do_not_overflow(backend):
    _, weights = ops.gate_topk(torch.tensor([[1e30, -1e30, 0.0]]), 2, renormalise=True)
    assert weights.tolist() == [[1, 0]]


def test_strided_logits_equal_dense_ones(backend, random):
    wide = random(4, 50)
    for a, b in zip(
        ops.gate_topk(wide[:, 3:23], 3, renormalise=True),
        ops.gate_topk(wide[:, 3:23].contiguous(), 3, renormalise=True),
        strict=True,
    ):
        assert torch.equal(a, b)
