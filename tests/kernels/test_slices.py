"""Slices of experts: the reference's sums, the plain bits at a full mask, and nothing of a row's neighbours."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ops, slices
from kernels.reference.choose_slices import choose_slices as plain_choice

FORMATS = ["float32", "bfloat16", "bfloat16x2", "float16", "int8", "int4", "mxfp4"]
ACTIVATIONS = {
    "swiglu": {},
    "geglu_tanh": {"activation": "geglu_tanh"},
    "clamped_swiglu": {"activation": "clamped_swiglu", "alpha": 1.702, "limit": 0.9},
    "relu": {"activation": "relu"},
}


def pairs(random, T, R, E, N):
    """Rows, experts and masks of R routed pairs; every kind of mask, none and all among them."""
    masks = random.integers(1 << N, (R,))
    masks[: R // 4] = (1 << N) - 1
    masks[-1:] = 0
    return random.integers(T, (R,)), random.integers(E, (R,)), masks


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "T, R, E, D, F, N",
    [
        (1, 1, 1, 1, 4, 4),  # smallest
        (5, 40, 3, 33, 20, 4),  # slices of 5: nothing divides anything
        (9, 60, 2, 48, 96, 4),  # slices of 24: half a panel in common with the next
        (60, 130, 2, 32, 64, 2),  # more rows of one expert than one turn takes; whole panels
        (4, 30, 2, 32, 520, 4),  # more than one line of scales in a slice
    ],
)
def test_sliced_experts_agree_with_the_reference(
    backend, by_reference, random, make_bank, T, R, E, D, F, N, format
):
    bank, plain_experts = make_bank(E, D, F, torch.float32, format=format)
    x, (rows, ids, masks) = random(T, D), pairs(random, T, R, E, N)
    found = slices.sliced_ffn(x, rows, ids, masks, N, bank)
    expected = by_reference(
        lambda: slices.sliced_ffn(x, rows, ids, masks, N, make_bank.of(plain_experts, D, F))
    )
    # Rows meet codes as whole numbers of 15 bits: where one lies between two, both sides may round apart.
    bounds = {} if format in ("float32", "bfloat16", "float16") else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **bounds)
    whole = masks == (1 << N) - 1
    assert torch.equal(found[whole], ops.grouped_ffn(x, rows, ids, bank)[whole]), (
        "a full mask is the plain path"
    )
    assert (found[masks == 0] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_slices_of_an_expert_sum_to_it_with_biases(backend, by_reference, random, make_bank, activation):
    options = ACTIVATIONS[activation]
    bank, plain_experts = make_bank(2, 32, 24, torch.float32, biases=True, **options)
    x = random(6, 32)
    rows, ids = torch.arange(6, dtype=torch.int32), torch.tensor([0, 1] * 3, dtype=torch.int32)
    parts = [
        slices.sliced_ffn(x, rows, ids, torch.full((6,), 1 << s, dtype=torch.int32), 4, bank)
        for s in range(4)
    ]
    torch.testing.assert_close(sum(parts), ops.grouped_ffn(x, rows, ids, bank), rtol=1e-5, atol=1e-5)
    masks = torch.tensor([1, 2, 5, 9, 14, 11], dtype=torch.int32)
    expected = by_reference(
        lambda: slices.sliced_ffn(x, rows, ids, masks, 4, make_bank.of(plain_experts, 32, 24))
    )
    torch.testing.assert_close(slices.sliced_ffn(x, rows, ids, masks, 4, bank), expected)


@pytest.mark.parametrize("F", [40, 96])
def test_a_sliced_row_is_the_same_in_any_batch(backend, random, make_bank, F):
    bank, _ = make_bank(3, 64, F)
    x = random(40, 64)
    for row, mask in ((0, 5), (9, 14), (31, 1), (22, 15)):
        one = torch.tensor([1], dtype=torch.int32)
        alone = slices.sliced_ffn(x, row * one, one, mask * one, 4, bank)[0]
        for size in (2, 3, 8, 16, 31, 64, 140):
            batch, ids, masks = (
                random.integers(40, (size,)),
                random.integers(3, (size,)),
                random.integers(16, (size,)),
            )
            place = int(random.integers(size, (1,)))
            batch[place], ids[place], masks[place] = row, 1, mask
            assert torch.equal(slices.sliced_ffn(x, batch, ids, masks, 4, bank)[place], alone)


def test_inner_is_what_down_reads(backend, by_reference, random, make_bank):
    bank, plain_experts = make_bank(3, 48, 40, torch.float32, biases=True)
    x, rows, ids = random(60, 48), random.integers(60, (120,)), random.integers(3, (120,))
    found = slices.expert_inner(x, rows, ids, bank)
    expected = by_reference(lambda: slices.expert_inner(x, rows, ids, make_bank.of(plain_experts, 48, 40)))
    torch.testing.assert_close(found, expected)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_the_compiled_choice_is_the_plain_one(seed, T, k0, N):
    generator = torch.Generator().manual_seed(seed)
    E = k0 + 2
    ids = torch.stack([torch.randperm(E, generator=generator)[:k0] for _ in range(T)]).int()
    weights = torch.rand(T, k0, generator=generator).sort(dim=1, descending=True).values
    activations = torch.randn(T * k0, 3 * N, generator=generator)
    slopes, offsets = (torch.rand(E, N, generator=generator) for _ in range(2))
    tiers = torch.randint(1, k0 * N + 2, (T,), generator=generator).int()
    expected = torch.empty(T, k0, dtype=torch.int32), torch.empty(T)
    plain_choice(activations, ids, weights, slopes, offsets, tiers, *expected)
    masks, dropped = slices.choose_slices(activations, ids, weights, slopes, offsets, tiers)
    assert torch.equal(masks, expected[0])
    torch.testing.assert_close(dropped, expected[1], rtol=1e-5, atol=1e-6)
    counts = sum((masks >> s) & 1 for s in range(N)).sum(1)
    assert torch.equal(counts, tiers.clamp(max=k0 * N))


@pytest.mark.parametrize("format", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize(
    "T, k0, E, D, N, r", [(1, 1, 1, 8, 2, 1), (5, 3, 6, 33, 4, 4), (16, 4, 9, 64, 4, 3), (20, 4, 9, 64, 3, 7)]
)
def test_one_call_chooses_as_gate_neurons_and_choice_do(
    backend, random, make_bank, T, k0, E, D, N, r, format
):
    neurons, _ = make_bank(E, D, N * r, torch.float32, format=format)
    x, ids = random(T, D), torch.stack([torch.randperm(E)[:k0] for _ in range(T)]).int()
    weights, slopes, offsets = random(T, k0).abs(), random(E, N).abs(), random(E, N).abs()
    tiers = 1 + random.integers(k0 * N, (T,))
    rows, _ = slices.slot_rows(T, k0)
    inner = slices.expert_inner(x, rows, ids.reshape(-1), neurons)
    expected = slices.choose_slices(inner, ids, weights, slopes, offsets, tiers)
    found = slices.choose_by_neurons(x, ids, weights, neurons, slopes, offsets, tiers)
    assert all(map(torch.equal, found, expected))
    if T > 1:
        alone = slices.choose_by_neurons(x[1:2], ids[1:2], weights[1:2], neurons, slopes, offsets, tiers[1:2])
        assert torch.equal(alone[0], found[0][1:2]) and torch.equal(alone[1], found[1][1:2])


@pytest.mark.parametrize("T, k0, E, D, F", [(1, 2, 2, 16, 24), (7, 4, 9, 48, 96), (40, 4, 9, 40, 2080)])
def test_one_call_runs_slices_and_adds_them_up(backend, random, make_bank, T, k0, E, D, F):
    bank, _ = make_bank(E, D, F, torch.bfloat16)
    x, ids = random(T, D), torch.stack([torch.randperm(E)[:k0] for _ in range(T)]).int()
    weights, masks = random(T, k0), random.integers(16, (T, k0))
    rows, slots = slices.slot_rows(T, k0)
    expected, hidden = random(T, D), torch.empty(T, D)
    hidden.copy_(expected)
    ops.combine(slices.sliced_ffn(x, rows, ids.view(-1), masks.view(-1), 4, bank), slots, weights, expected)
    out = torch.empty(T * k0, D)
    assert slices.sliced_experts(x, ids, weights, masks, 4, bank, hidden, expert_out=out)
    assert torch.equal(hidden, expected)
    hidden[0, 0] = torch.inf
    assert not slices.sliced_experts(x, ids, weights, masks, 4, bank, hidden, expert_out=out)


def test_what_does_not_fit_is_named(backend, random, make_bank):
    bank, _ = make_bank(2, 16, 24)
    x, one = random(1, 16), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="num_parts: found 5, expected 1 to 8 that divide the width 24"):
        slices.sliced_ffn(x, one, one, one, 5, bank)
    with pytest.raises(ValueError, match=r"masks: found \[1\] int64"):
        slices.sliced_ffn(x, one, one, one.long(), 4, bank)
    with pytest.raises(ValueError, match="masks: entry 0 is 16, expected 0 to 15"):
        slices.sliced_ffn(x, one, one, one + 16, 4, bank)
    with pytest.raises(IndexError, match="none is resident"):
        slices.sliced_ffn(x, one, one, one, 4, ops.ExpertBank(2, 16, 24))
    ids, weights, table = one[None], torch.ones(1, 1), torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"tiers: found \[1\] int64"):
        slices.choose_by_neurons(x, ids, weights, bank, table, table, one.long())
    with pytest.raises(IndexError, match="none is resident"):
        slices.choose_by_neurons(x, ids, weights, ops.ExpertBank(2, 16, 24), table, table, one)
    with pytest.raises(ValueError, match=r"masks: found \[1\] int64"):
        out = torch.empty(1, 16)
        slices.sliced_experts(x, ids, weights, ids.long(), 4, bank, random(1, 16), expert_out=out)
