"""The compiled swap search makes the swaps that the plain one makes, and never ends above where it began."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference.swap_search import swap_search as plain_search
from kernels.swap_search import swap_search


def problem(seed: int, F: int, B: int, parts: int, swaps: int):
    """Whole numbers, so that sums in any order are equal."""
    generator = torch.Generator().manual_seed(seed)
    mass = torch.randint(0, 50, (F, B), generator=generator).float()
    group = torch.arange(F, dtype=torch.int32) % parts
    pairs = torch.randint(0, F, (2, swaps), generator=generator).int()
    tolerances = 20 * torch.rand(swaps, generator=generator)
    tolerances *= torch.rand(swaps, generator=generator) < 0.3
    return mass, group, pairs, tolerances


@given(st.integers(0, 2**31), st.integers(2, 8), st.integers(1, 3), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_the_compiled_search_makes_the_swaps_of_the_plain_one(seed, parts, each, rows):
    mass, group, pairs, tolerances = problem(seed, parts * each, rows, parts, 60)
    for dropped in {1, parts - 1}:
        expected = plain_search(mass, group, parts, dropped, pairs, tolerances)
        found = swap_search(mass, group, parts, dropped, pairs, tolerances)
        assert torch.equal(found.group, expected.group)
        assert torch.equal(found.changes, expected.changes)
        assert (found.first, found.best) == (expected.first, expected.best)


def test_the_best_is_kept_when_the_search_goes_on_uphill():
    mass, group, pairs, _ = problem(3, 16, 20, 4, 300)
    wild = torch.full((300,), 1e9)
    found = swap_search(mass, group, 4, 2, pairs, wild)
    loads = torch.stack([mass[found.group == part].sum(0) for part in range(4)])
    assert float(loads.sort(0).values[:2].sum()) == found.best <= found.first


def test_what_does_not_fit_is_named():
    mass, group, pairs, tolerances = problem(0, 8, 4, 4, 5)
    with pytest.raises(ValueError, match="dropped, num_parts: found 4, 4"):
        swap_search(mass, group, 4, 4, pairs, tolerances)
    with pytest.raises(ValueError, match=r"group \[7\].*expected \[8\]"):
        swap_search(mass, group[:7], 4, 2, pairs, tolerances)
