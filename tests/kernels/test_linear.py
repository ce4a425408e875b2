"""linear and embed against their definition."""

import pytest
import torch

from kernels import ops

SHAPES = [
    (1, 1, 1),  # smallest
    (7, 17, 33),  # nothing divides anything
    (3, 15, 8),  # less than a panel
    (8, 48, 64),  # aligned
    (40, 200, 96),  # several tiles of rows and of panels
    (150, 130, 31),  # several blocks of rows
    (0, 16, 4),  # nobody asks
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, N, K", SHAPES)
def test_linear_agrees_with_the_reference(backend, by_reference, random, T, N, K, dtype):
    x, weight = random(T, K), random(N, K, scale=K**-0.5).to(dtype)
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight)))
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", range(1, 20))
def test_native_linear_is_the_chain_bit_by_bit(native, by_reference, random, T, dtype):
    x, weight = random(T, 50), random(150, 50).to(dtype)
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight)))
    assert torch.equal(ops.linear(x, ops.pack_linear(weight)), expected)


@pytest.mark.parametrize("N", [1, 16, 40, 257])
def test_add_adds_the_finished_product_to_the_residual(backend, random, N):
    x, w, residual = random(5, 24), ops.pack_linear(random(N, 24).bfloat16()), random(5, N)
    out = residual.clone()
    assert ops.linear(x, w, out=out, add=True) is out
    assert torch.equal(out, residual + ops.linear(x, w))


@pytest.mark.parametrize("N", [1, 16, 40, 257])
def test_a_bias_is_added_to_the_finished_product_and_that_to_the_residual(backend, random, N):
    x, w, bias, residual = (
        random(5, 24),
        ops.pack_linear(random(N, 24).bfloat16()),
        random(N),
        random(5, N + 3),
    )
    expected = ops.linear(x, w) + bias
    assert torch.equal(ops.linear(x, w, bias=bias), expected)
    out = residual.clone()[:, 1 : 1 + N]
    assert ops.linear(x, w, bias=bias, out=out, add=True) is out
    assert torch.equal(out, residual[:, 1 : 1 + N] + expected)


def test_a_bias_agrees_with_the_reference(backend, by_reference, random):
    x, weight, bias = random(7, 33), random(17, 33), random(17)
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight), bias=bias))
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight), bias=bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "T, H, N, K", [(1, 1, 1, 1), (3, 4, 17, 33), (2, 16, 32, 16), (20, 3, 40, 24), (0, 2, 8, 8)]
)
def test_every_head_is_multiplied_by_its_own_matrix(backend, random, T, H, N, K, dtype):
    weights = random(H, K, N).to(dtype).transpose(1, 2)
    w = ops.pack_linear_heads(weights)
    assert (w.num_heads, w.num_outputs, w.num_inputs) == (H, N, K)
    assert w.nbytes == H * ops.pack_linear(weights[0]).nbytes
    x, wide = random(T, H, K + 9)[..., 4 : 4 + K], torch.full((T, H, N + 6), 3.0)
    assert ops.linear_heads(x, w, out=wide[..., 2 : 2 + N]).shape == (T, H, N)
    for h in range(H):
        assert torch.equal(wide[:, h, 2 : 2 + N], ops.linear(x[:, h], ops.pack_linear(weights[h])))
    assert (wide[..., :2] == 3).all() and (wide[..., 2 + N :] == 3).all()
    assert torch.equal(ops.linear_heads(x, w), wide[..., 2 : 2 + N])


def test_out_may_be_the_first_rows_and_columns_of_a_larger_buffer(backend, random):
    x, w = random(5, 24), ops.pack_linear(random(40, 24).bfloat16())
    buffer = torch.full((9, 64), 3.0)
    ops.linear(x, w, out=buffer[:5, :40])
    assert torch.equal(buffer[:5, :40], ops.linear(x, w))
    assert (buffer[5:] == 3).all() and (buffer[:, 40:] == 3).all()


def test_strided_rows_equal_dense_rows(backend, random):
    wide, w = random(9, 100), ops.pack_linear(random(20, 24).bfloat16())
    assert torch.equal(ops.linear(wide[:, 8:32], w), ops.linear(wide[:, 8:32].contiguous(), w))


def test_a_poisoned_row_stays_in_its_row(backend, random):
    x, w = random(20, 24), ops.pack_linear(random(40, 24).bfloat16())
    clean = ops.linear(x, w)
    x[3], x[11] = torch.nan, torch.inf
    poisoned = ops.linear(x, w)
    rest = [t for t in range(20) if t not in (3, 11)]
    assert torch.equal(poisoned[rest], clean[rest])


def test_rows_packed_as_one_equal_the_parts(backend, random):
    x, parts = random(6, 24), [random(n, 24).bfloat16() for n in (20, 7, 33)]
    together = ops.linear(x, ops.pack_linear_rows(parts))
    assert torch.equal(together, torch.cat([ops.linear(x, ops.pack_linear(part)) for part in parts], dim=1))


def test_a_packed_weight_does_not_need_the_original(backend, random):
    x, weight = random(2, 24), random(20, 24)
    w = ops.pack_linear(weight)
    before = ops.linear(x, w)
    weight.fill_(torch.nan)
    assert torch.equal(ops.linear(x, w), before)


def test_format_converts_before_packing(backend, random):
    x, weight = random(2, 24), random(20, 24)
    w = ops.pack_linear(weight, format="bfloat16")
    assert w.format == "bfloat16"
    assert torch.equal(ops.linear(x, w), ops.linear(x, ops.pack_linear(weight.bfloat16())))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K", [(1, 1), (33, 7), (64, 32)])
def test_embed_gives_the_stored_rows_widened(backend, random, N, K, dtype):
    weight = random(N, K).to(dtype)
    ids = random.integers(N, (10,))
    assert torch.equal(ops.embed(ids, ops.pack_linear(weight)), weight[ids.long()].float())


def test_every_float16_value_is_widened_exactly(backend):
    every = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).view(256, 256)
    )
    every = torch.where(every.isnan(), 0.0, every)
    w = ops.pack_linear(every)
    assert torch.equal(ops.embed(torch.arange(256, dtype=torch.int32), w), every.float())
    finite = ops.pack_linear(torch.where(every.isinf(), 0.0, every))
    assert torch.equal(ops.linear(torch.eye(256), finite), torch.where(every.isinf(), 0.0, every).float().T)


def test_a_token_outside_the_vocabulary_is_refused(backend, random):
    w = ops.pack_linear(random(20, 4))
    with pytest.raises(ValueError, match="token_ids"):
        ops.embed(torch.tensor([3, 20], dtype=torch.int32), w)
