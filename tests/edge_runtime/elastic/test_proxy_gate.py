"""The proxy gate keeps what promises most, never less than asked for, and more never loses more."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.elastic.proxy_gate import choose_slices, dropped_mass, slice_scores

cases = given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))


def drawn(seed: int, T: int, k0: int, N: int):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(T, k0, generator=generator).sort(dim=1, descending=True).values
    weights = weights / weights.sum(-1, keepdim=True)
    activations = torch.randn(T, k0, N, 3, generator=generator)
    slopes, offsets = (torch.rand(T, k0, N, generator=generator) for _ in range(2))
    return weights, slice_scores(weights, activations, slopes, offsets)


@cases
@settings(max_examples=40, deadline=None)
def test_exactly_as_many_as_the_tier_run_and_one_of_the_first_choice(seed, T, k0, N):
    _, scores = drawn(seed, T, k0, N)
    tiers = torch.randint(1, k0 * N + 1, (T,), generator=torch.Generator().manual_seed(seed))
    kept = choose_slices(scores, tiers)
    assert kept.flatten(1).sum(1).tolist() == tiers.tolist()
    assert kept[:, 0].any(-1).all()
    assert choose_slices(scores, torch.full((T,), k0 * N)).all()


@cases
@settings(max_examples=40, deadline=None)
def test_a_larger_tier_keeps_what_a_smaller_one_kept_and_drops_no_more(seed, T, k0, N):
    weights, scores = drawn(seed, T, k0, N)
    last_kept, last_dropped = torch.zeros_like(scores, dtype=torch.bool), torch.ones(T)
    for tier in range(1, k0 * N + 1):
        kept = choose_slices(scores, torch.full((T,), tier))
        dropped = dropped_mass(weights, scores, kept)
        assert (kept | ~last_kept).all()
        assert (dropped <= last_dropped + 1e-6).all()
        last_kept, last_dropped = kept, dropped
    assert last_dropped.abs().max() == 0


def test_the_largest_expected_mass_is_kept_and_ties_go_to_the_better_expert():
    scores = torch.tensor([[[4.0, 1.0], [3.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    kept = choose_slices(scores, torch.tensor([2, 3]))
    assert kept.tolist() == [[[True, False], [True, False]], [[True, True], [True, False]]]


def test_rows_of_different_tiers_share_a_batch_as_if_alone():
    _, scores = drawn(5, 4, 3, 4)
    tiers = torch.tensor([1, 12, 5, 7])
    together = choose_slices(scores, tiers)
    for row in range(4):
        assert torch.equal(choose_slices(scores[row : row + 1], tiers[row : row + 1])[0], together[row])
