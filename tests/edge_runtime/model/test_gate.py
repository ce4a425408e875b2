"""The gate: float32, ties to the lowest id on every backend, weights as the family has them."""

import pytest
import torch

from edge_runtime.model.gate import GateWeights, gate
from edge_runtime.model.spec import GateSpec
from kernels import ops

E, D, T = 16, 32, 9


pytestmark = [
    pytest.mark.usefixtures("backend"),
    pytest.mark.parametrize("backend", ["native", "torch", "reference"], indirect=True),
]


def choose(weight: torch.Tensor, x: torch.Tensor, **spec) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.empty(len(x), len(weight))
    weights = GateWeights(ops.pack_linear(weight))
    return gate(GateSpec(num_experts=len(weight), **spec), weights, x, logits=logits)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(E, D, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_a_softmax_over_all_experts_renormalised_only_if_asked(weight, x, renormalise):
    ids, weights = choose(weight, x, top_k=4, renormalise=renormalise)
    expected, expected_ids = (x @ weight.float().T).softmax(-1).topk(4)
    if renormalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert ids.dtype == torch.int32 and torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected)
    assert renormalise == bool(((weights.sum(-1) - 1).abs() < 1e-5).all())


def test_equal_scores_go_to_the_lowest_id(weight, x):
    weight[[3, 7, 11, 15]] = weight[3].clone()
    ids, _ = choose(weight, x, top_k=E)
    for row in ids.tolist():
        assert [i for i in row if i in (3, 7, 11, 15)] == [3, 7, 11, 15]


def test_a_row_without_any_preference_takes_the_first_experts(weight):
    ids, weights = choose(weight, torch.zeros(2, D), top_k=4, renormalise=True)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2
