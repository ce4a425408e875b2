"""Splits are permutations into equal parts, never worse than neurons as they lie, and better where neurons belong together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibration.partition import (
    SOLVERS,
    PartitionSettings,
    check_settings,
    contiguous,
    objective,
    order_of,
    split,
)
from calibration.proxy_fit import fit_expert
from edge_runtime.errors import UserError


def clustered(seed: int = 0, rows: int = 200, parts: int = 4, each: int = 6) -> torch.Tensor:
    """[rows, parts * each]: neurons n, n + parts, n + 2 parts, ... fire together, one group per row."""
    generator = torch.Generator().manual_seed(seed)
    active = torch.randint(parts, (rows,), generator=generator)
    neurons = torch.arange(parts * each) % parts
    noise = 0.05 * torch.rand(rows, parts * each, generator=generator)
    return noise + (neurons == active[:, None]) * (0.5 + torch.rand(rows, parts * each, generator=generator))


@pytest.mark.parametrize("solver", sorted(SOLVERS))
@given(seed=st.integers(0, 10**6), parts=st.sampled_from([2, 3, 4]), each=st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_parts_are_equal_and_never_lose_more_than_contiguous_ones(solver, seed, parts, each):
    mass = torch.rand(30, parts * each, generator=torch.Generator().manual_seed(seed))
    chosen = PartitionSettings(num_parts=parts, solver=solver, swaps=300)
    group = split(mass, chosen)
    assert torch.bincount(group, minlength=parts).tolist() == [each] * parts
    dropped = chosen.num_dropped
    assert objective(mass, group, parts, dropped) <= objective(mass, contiguous(mass, chosen), parts, dropped)
    order = order_of(group, mass, parts)
    assert sorted(order.tolist()) == list(range(parts * each))
    slices = group[order].view(parts, each)
    assert (slices == slices[:, :1]).all(), "a slice holds one part"


@pytest.mark.parametrize("solver", ["hill", "paper"])
def test_neurons_that_fire_together_come_together(solver):
    mass = clustered()
    found = split(mass, PartitionSettings(solver=solver, swaps=5000))
    assert objective(mass, found, 4, 2) < 0.5 * objective(mass, contiguous(mass, PartitionSettings()), 4, 2)


def test_the_same_seed_gives_the_same_split():
    mass = clustered(1)
    first, again = (split(mass, PartitionSettings(swaps=500, seed=5)) for _ in range(2))
    assert torch.equal(first, again)


def test_gate_neurons_foretell_the_mass_of_their_slice():
    activations = clustered(2, rows=400)
    fit = fit_expert(activations, PartitionSettings(swaps=5000), gate_neurons=2)
    ordered = activations[:, fit.order].unflatten(1, (4, 6))
    foretold = fit.offsets + fit.slopes * ordered[..., :2].mean(-1)
    actual = ordered.sum(-1)
    torch.testing.assert_close(foretold.mean(0), actual.mean(0))
    assert torch.corrcoef(torch.stack([foretold.flatten(), actual.flatten()]))[0, 1] > 0.8


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (PartitionSettings(num_parts=5), "found experts of width 24, expected 2 to 8 that divide the width"),
        (PartitionSettings(dropped=4), "expected 1 to 3 of 4"),
        (PartitionSettings(solver="magic"), "expected one of contiguous, importance, paper, hill"),
    ],
)
def test_what_cannot_be_split_so_is_refused(chosen, words):
    with pytest.raises(UserError, match=words):
        check_settings(chosen, 24)
