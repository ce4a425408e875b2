"""grouped_ffn, the bank and combine."""

import pytest
import torch
from torch.nn.functional import gelu, relu, silu

from kernels import ops


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "T, R, E, D, F",
    [
        (1, 1, 1, 1, 1),  # smallest
        (5, 9, 4, 33, 17),  # nothing divides anything
        (3, 12, 8, 64, 32),  # aligned
        (60, 120, 2, 48, 40),  # more rows of one expert than one turn takes
        (4, 0, 2, 16, 16),  # nobody asks
    ],
)
def test_grouped_ffn_agrees_with_the_reference(
    backend, by_reference, random, make_bank, T, R, E, D, F, dtype
):
    bank, plain = make_bank(E, D, F, dtype)
    x, rows, ids = random(T, D), random.integers(T, (R,)), random.integers(E, (R,))
    out = ops.grouped_ffn(x, rows, ids, bank)
    expected = by_reference(lambda: ops.grouped_ffn(x, rows, ids, make_bank.of(plain, D, F)))
    torch.testing.assert_close(out, expected)
    for i in range(min(R, 4)):
        gate, up, down = (plain[ids[i]][name].double() for name in ("gate", "up", "down"))
        row = x[rows[i]].double()
        torch.testing.assert_close(
            out[i], (down @ (silu(gate @ row) * (up @ row))).float(), rtol=1e-4, atol=1e-5
        )


ACTIVATIONS = {
    "swiglu": {},
    "geglu_tanh": {"activation": "geglu_tanh"},
    "clamped_swiglu": {"activation": "clamped_swiglu", "alpha": 1.702, "limit": 0.9},
    "relu": {"activation": "relu"},
}


def plain_expert(x, gate, up, down, activation="swiglu", alpha=1.0, limit=None, **biases):
    """What a family's own code computes, in float64."""
    gate_bias, up_bias, down_bias = (
        biases.get(name, torch.zeros(())).double() for name in ("gate_bias", "up_bias", "down_bias")
    )
    u = up.double() @ x.double() + up_bias
    g = u if gate is None else gate.double() @ x.double() + gate_bias
    if activation == "clamped_swiglu":
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        inner = (u + 1) * (g * torch.sigmoid(alpha * g))
    else:
        inner = {
            "swiglu": lambda: silu(g) * u,
            "geglu_tanh": lambda: gelu(g, approximate="tanh") * u,
            "relu": lambda: relu(u),
        }[activation]()
    return (down.double() @ inner + down_bias).float()


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("T, R, E, D, F", [(1, 1, 1, 1, 1), (5, 9, 3, 33, 17), (3, 120, 2, 64, 32)])
def test_every_activation_agrees_with_the_reference_and_with_its_formula(
    backend, by_reference, random, make_bank, T, R, E, D, F, activation, biases
):
    bank, plain = make_bank(E, D, F, biases=biases, **ACTIVATIONS[activation])
    x, rows, ids = random(T, D, scale=3.0), random.integers(T, (R,)), random.integers(E, (R,))
    out = ops.grouped_ffn(x, rows, ids, bank)
    torch.testing.assert_close(
        out, by_reference(lambda: ops.grouped_ffn(x, rows, ids, make_bank.of(plain, D, F)))
    )
    for i in range(min(R, 4)):
        torch.testing.assert_close(out[i], plain_expert(x[rows[i]], **plain[ids[i]]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_that_goes_in_comes_out(backend, random, make_bank, activation):
    bank, _ = make_bank(1, 24, 16, biases=True, **ACTIVATIONS[activation])
    x = random(2, 24)
    x[1, 3] = torch.nan
    out = ops.grouped_ffn(x, i32(0, 1), i32(0, 0), bank)
    assert out[0].isfinite().all() and out[1].isnan().all()


def test_strided_weights_equal_dense_ones(backend, random):
    both, turned = random(34, 24), random(17, 24)
    bank = ops.ExpertBank(2, 24, 17)
    bank.set(0, ops.pack_expert(both[0::2], both[1::2], turned.T))
    bank.set(1, ops.pack_expert(both[0::2].contiguous(), both[1::2].contiguous(), turned.T.contiguous()))
    out = ops.grouped_ffn(random(1, 24), i32(0, 0), i32(0, 1), bank)
    assert torch.equal(out[0], out[1])


def test_expert_rows_come_out_in_the_order_asked(backend, random, make_bank):
    bank, _ = make_bank(4, 24, 16)
    x, rows, ids = random(6, 24), random.integers(6, (30,)), random.integers(4, (30,))
    together = ops.grouped_ffn(x, rows, ids, bank)
    order = random.permutation(30)
    assert torch.equal(ops.grouped_ffn(x, rows[order], ids[order], bank), together[order])


def test_out_may_be_the_first_rows_of_a_larger_buffer(backend, random, make_bank):
    bank, _ = make_bank(2, 24, 16)
    x, buffer = random(3, 24), torch.full((8, 24), 3.0)
    assert ops.grouped_ffn(x, i32(0, 2), i32(1, 0), bank, out=buffer[:2]).data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:2], ops.grouped_ffn(x, i32(0, 2), i32(1, 0), bank)) and (buffer[2:] == 3).all()


def test_a_poisoned_row_stays_in_its_row(backend, random, make_bank):
    bank, _ = make_bank(2, 24, 16)
    x, rows, ids = random(4, 24), i32(0, 1, 2, 3), i32(0, 0, 0, 0)
    clean = ops.grouped_ffn(x, rows, ids, bank)
    x[1] = torch.inf
    assert torch.equal(ops.grouped_ffn(x, rows, ids, bank)[[0, 2, 3]], clean[[0, 2, 3]])


def test_an_expert_that_is_not_resident_is_an_index_error_naming_it(backend, random, make_bank):
    bank, _ = make_bank(4, 24, 16)
    bank.drop(2)
    for expert in (2, 4, -1):
        with pytest.raises(IndexError, match=f"expert {expert}"):
            ops.grouped_ffn(random(3, 24), i32(0, 1), i32(0, expert), bank)
    with pytest.raises(IndexError, match="expert 0"):
        ops.grouped_ffn(random(3, 24), i32(0), i32(0), ops.ExpertBank(4, 24, 16))


def test_a_row_that_does_not_exist_is_refused(backend, random, make_bank):
    bank, _ = make_bank(2, 24, 16)
    with pytest.raises(ValueError, match="rows"):
        ops.grouped_ffn(random(3, 24), i32(3), i32(0), bank)


def test_a_bank_knows_who_is_resident_and_how_many_bytes_they_take(backend, random):
    bank = ops.ExpertBank(8, 24, 17)
    assert bank.resident == () and bank.nbytes == 0
    expert = ops.pack_expert(random(17, 24).bfloat16(), random(17, 24).bfloat16(), random(24, 17).bfloat16())
    bank.set(5, expert)
    bank.set(1, expert)
    assert bank.resident == (1, 5) and bank.nbytes == 2 * expert.nbytes
    bank.drop(5)
    assert bank.resident == (1,)
    with pytest.raises(IndexError, match="expert 5"):
        bank.drop(5)
    with pytest.raises(IndexError, match="expert_id"):
        bank.set(8, expert)


def test_an_expert_of_another_shape_is_refused(backend, random):
    with pytest.raises(ValueError, match="expert: found D=24, F=17, expected D=24, F=16"):
        ops.ExpertBank(8, 24, 16).set(0, ops.pack_expert(random(17, 24), random(17, 24), random(24, 17)))


@pytest.mark.parametrize(
    "T, K, R, D", [(1, 1, 1, 1), (7, 2, 9, 97), (16, 8, 40, 150), (3, 2, 0, 16), (0, 2, 4, 16)]
)
def test_combine_agrees_with_the_reference(backend, by_reference, random, T, K, R, D):
    expert_out, weights, hidden = random(R, D), random(T, K), random(T, D)
    slots = random.integers(R + 1, (T, K)) - 1
    slots[slots == 0] = -1
    if R:
        expert_out[0] = torch.inf  # a row nobody asked for must not leak
    expected = hidden.clone()
    by_reference(lambda: ops.combine(expert_out, slots, weights, expected))
    ops.combine(expert_out, slots, weights, hidden)
    torch.testing.assert_close(hidden, expected)


def test_a_token_whose_rows_all_stayed_away_keeps_its_residual(backend, random):
    hidden = random(2, 20)
    before = hidden.clone()
    ops.combine(
        torch.full((3, 20), torch.nan), torch.full((2, 4), -1, dtype=torch.int32), torch.ones(2, 4), hidden
    )
    assert torch.equal(hidden, before)


def test_a_slot_outside_the_rows_is_refused(backend, random):
    for slot in (-2, 3):
        with pytest.raises(ValueError, match="slots"):
            ops.combine(random(3, 8), i32(slot)[None], torch.ones(1, 1), random(1, 8))
