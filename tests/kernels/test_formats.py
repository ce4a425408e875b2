"""Quantised weights: what codes stand for, how far off they may be, and that products of them are what is defined."""

import pytest
import torch

from kernels import backends, ops
from kernels.packing import FORMATS, packed_expert_bytes, packed_linear_bytes
from kernels.reference import int4, mxfp4
from kernels.reference.formats import decode, encode
from kernels.reference.integers import LARGEST

QUANTISED = ("int8", "int4", "mxfp4")
DEFINED = (*QUANTISED, "bfloat16x2")  # whose sums are defined by more than a chain
SHAPES = [(1, 1, 1), (7, 17, 33), (8, 48, 64), (20, 200, 96), (9, 40, 200), (2, 130, 1024), (0, 16, 40)]
E8M0_NAN = 255


def plain(w, num_rows):
    """The float32 weight a packed one stands for, through embed."""
    return ops.embed(torch.arange(num_rows, dtype=torch.int32), w)


def on_every_isa(call):
    """What the call gives with each instruction set of this machine, best first."""
    from kernels.cpu import _native

    best = _native.isa()
    try:
        for isa in _native.runnable_isas():
            backends.use_isa(isa)
            yield isa, call()
    finally:
        backends.use_isa(best)


@pytest.mark.parametrize("format", DEFINED)
@pytest.mark.parametrize("T, N, K", SHAPES)
def test_linear_agrees_with_the_reference(backend, by_reference, random, T, N, K, format):
    x, weight = random(T, K), random(N, K, scale=K**-0.5).bfloat16()
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight, format=format)))
    torch.testing.assert_close(ops.linear(x, ops.pack_linear(weight, format=format)), expected)


@pytest.mark.parametrize("format", DEFINED)
@pytest.mark.parametrize("T", [*range(1, 10), 17, 40])
@pytest.mark.parametrize("K", [50, 96, 133])
def test_native_linear_is_the_defined_sum_bit_by_bit(native, by_reference, random, T, K, format):
    x, weight, residual = random(T, K), random(150, K), random(T, 150)
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight, format=format)))
    w = ops.pack_linear(weight, format=format)
    assert torch.equal(ops.linear(x, w), expected)
    assert torch.equal(ops.linear(x, w, out=residual.clone(), add=True), residual + expected)


@pytest.mark.parametrize("format", DEFINED)
@pytest.mark.parametrize("T, N, K", [(1, 130, 64), (2, 40, 33), (3, 90, 20), (7, 70, 96), (40, 100, 133)])
def test_linear_has_the_same_bits_on_every_isa(native, random, T, N, K, format):
    x, w = random(T, K), ops.pack_linear(random(N, K), format=format)
    x[0] *= 1e-36  # products below the smallest normal number
    x[0, ::3] *= 1e-4
    expected = ops.linear(x, w)
    for isa, found in on_every_isa(lambda: ops.linear(x, w)):
        assert torch.equal(found, expected), isa


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("T", [7, 8, 9, 15, 16, 17, 31, 33, 48, 67, 130])
def test_many_rows_have_the_same_bits_on_every_isa(native, by_reference, random, T, format):
    """Rows, outputs and inputs that fill no tile, and some that fill them all; weights at their largest and rows of nothing."""
    for N, K in (
        (16, 64),
        (33, 1),
        (50, 63),
        (17, 290),
        (48, 513),
        (int(random.integers(90, (1,))) + 1, 257),
    ):
        x, weight = random(T, K), random(N, K)
        x[T // 2], x[T - 1] = 0.0, torch.where(x[T - 1] > 0, 1.0, -1.0)
        weight[N // 2] = torch.where(weight[N // 2] > 0, 1.0, -1.0)
        w, residual = ops.pack_linear(weight, format=format), random(T, N)
        expected = by_reference(
            lambda x=x, weight=weight: ops.linear(x, ops.pack_linear(weight, format=format))
        )
        for isa, found in on_every_isa(lambda x=x, w=w: ops.linear(x, w)):
            assert torch.equal(found, expected), (isa, N, K)
        for isa, found in on_every_isa(
            lambda x=x, w=w, residual=residual: ops.linear(x, w, out=residual.clone(), add=True)
        ):
            assert torch.equal(found, residual + expected), (isa, N, K)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("D, F", [(33, 17), (70, 290)])
def test_experts_of_many_rows_have_the_same_bits_on_every_isa(native, random, D, F, format):
    bank = ops.ExpertBank(2, D, F)
    for i in range(2):
        bank.set(i, ops.pack_expert(random(F, D), random(F, D), random(D, F), format=format))
    x, rows, ids = random(60, D), random.integers(60, (150,)), (random.integers(5, (150,)) == 0).int()
    ((_, expected), *others) = on_every_isa(lambda: ops.grouped_ffn(x, rows, ids, bank))
    for isa, found in others:
        assert torch.equal(found, expected), isa


@pytest.mark.parametrize("format", QUANTISED)
def test_no_sum_of_codes_overflows(native, by_reference, format):
    """The largest sums there are: every input and every code at its end, of one sign and of both."""
    signs = torch.tensor([1.0, -1.0]).repeat(400)
    x, weight = (
        torch.stack([torch.ones(800), signs, -signs] * 3),
        torch.stack([torch.ones(800), -torch.ones(800), signs]),
    )
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight, format=format)))
    assert torch.equal(ops.linear(x, ops.pack_linear(weight, format=format)), expected)
    torch.testing.assert_close(expected, x @ weight.T, rtol=1e-3, atol=0.5)


@pytest.mark.parametrize("format", DEFINED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_nothing_finite_and_leaves_the_others(backend, random, format, poison):
    x, w = random(7, 40), ops.pack_linear(random(20, 40), format=format)
    clean = ops.linear(x, w)
    x[3, 39] = poison
    found = ops.linear(x, w)
    assert found[3].isnan().all() and torch.equal(found[[0, 1, 2, 4, 5, 6]], clean[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("format", QUANTISED)
def test_rows_of_any_size_are_multiplied_and_rows_of_nothing_give_zeros(
    backend, by_reference, random, format
):
    x, weight = (
        random(6, 40) * torch.tensor([[1e-20], [1e20], [0.0], [1e-31], [1e-38], [1.0]]),
        random(20, 40),
    )
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight, format=format)))
    found = ops.linear(x, ops.pack_linear(weight, format=format))
    torch.testing.assert_close(
        found / x.abs().amax(1, True).clamp(min=1e-20), expected / x.abs().amax(1, True).clamp(min=1e-20)
    )
    assert found[2:5].count_nonzero() == 0


@pytest.mark.parametrize("format", DEFINED)
def test_a_row_is_the_same_in_any_batch(backend, random, format):
    x, w = random(70, 100), ops.pack_linear(random(150, 100), format=format)
    together = ops.linear(x, w)
    for rows in (slice(0, 1), slice(3, 5), slice(10, 17), slice(20, 60)):
        assert torch.equal(ops.linear(x[rows], w), together[rows])


@pytest.mark.parametrize("format", DEFINED)
@pytest.mark.parametrize("D, F", [(33, 17), (64, 96)])
def test_grouped_ffn_agrees_with_the_reference(backend, by_reference, random, D, F, format):
    three = [(random(F, D), random(F, D), random(D, F)) for _ in range(3)]
    x, rows, ids = random(9, D, scale=D**-0.5), random.integers(9, (30,)), random.integers(3, (30,))

    def run():
        bank = ops.ExpertBank(3, D, F)
        for i, weights in enumerate(three):
            bank.set(i, ops.pack_expert(*weights, format=format))
        return ops.grouped_ffn(x, rows, ids, bank)

    # The last bit of an exp may turn a whole number of the inner row into its neighbour: one of 32,639 of its largest.
    expected = by_reference(run)
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=4e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("N, K", [(1, 1), (17, 33), (64, 32), (48, 200)])
def test_packed_bytes_are_the_planned_ones(native, N, K, format):
    w = ops.pack_linear(torch.zeros(N, K), format=format)
    assert w.nbytes == w.handle.nbytes == packed_linear_bytes(N, K, format)
    expert = ops.pack_expert(torch.zeros(N, K), torch.zeros(N, K), torch.zeros(K, N), format=format)
    assert expert.nbytes == expert.handle.nbytes == packed_expert_bytes(K, N, format)


def test_rows_of_two_terms_keep_sixteen_bits(backend, random):
    x, weight = random(30, 512), random(64, 512).bfloat16()
    true = x.double() @ weight.double().T
    of_terms = (ops.linear(x, ops.pack_linear(weight, format="bfloat16x2")) - true).abs()
    assert (of_terms <= 2.0**-16 * (x.abs().double() @ weight.abs().double().T)).all()


def test_the_sums_of_two_terms_are_those_that_the_reference_writes_out(native, by_reference, random):
    """Small numbers among large ones, whole blocks and a rest, and what is too small to count."""
    x, weight = random(5, 75), random(20, 75)
    x[0, :7] = torch.tensor([1e-41, 1e-38, -1e-38, 3e-39, 1e30, -1e30, 1e-30])
    x[1] *= 1e-30
    weight[2] *= 1e-9
    expected = by_reference(lambda: ops.linear(x, ops.pack_linear(weight, format="bfloat16x2")))
    assert torch.equal(ops.linear(x, ops.pack_linear(weight, format="bfloat16x2")), expected)


def test_bits_per_value_are_what_the_formats_promise():
    values = 1024 * 1024
    assert packed_linear_bytes(1024, 1024, "int8") == values + 4 * 1024
    assert packed_linear_bytes(1024, 1024, "int4") * 8 == values * 4.5
    assert packed_linear_bytes(1024, 1024, "mxfp4") * 8 == values * 4.25


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
def test_every_value_is_within_the_bound_of_its_format(backend, random, format, spread):
    weight = random(40, 133, scale=spread)
    off = (plain(ops.pack_linear(weight, format=format), 40) - weight).abs()
    groups = int4.grouped(weight)
    largest = groups.abs().amax(dim=2, keepdim=True)
    if format == "int8":  # half a step, and the roundings of code * scale
        bound = weight.abs().amax(dim=1, keepdim=True) * (0.5 / 127 + 1e-6) + 0 * weight
    elif format == "int4":
        # half a step of largest / 7; when a group is scaled to -8 instead, a value near +8 loses a whole step of
        # largest / 8; float16 scales are off by 2^-11
        bound = (largest * (1 / 8 + 2**-10)).expand_as(groups).flatten(1)[:, :133]
    else:  # values in [6, 8) become 6; below that half the widest step, 1, which is less
        power = 2.0 ** torch.floor(torch.log2(largest)) / 4
        bound = (2 * power).expand_as(groups).flatten(1)[:, :133]
    assert (off <= bound).all()


@pytest.mark.parametrize("format, most", [("int8", 0.012), ("int4", 0.11), ("mxfp4", 0.17)])
def test_the_error_of_a_row_stays_below_its_share_of_the_row(backend, random, format, most):
    """Root mean square, normal values. int8: steps of 4.1 sigma / 127, a step has 1 / sqrt(12) of itself: under 0.012.
    int4: steps of 2.2 sigma / 7.5: under 0.11. mxfp4: steps of up to a third of a value, and what is cut off: under 0.17.
    """
    x, weight = random(30, 512), random(64, 512)
    w = ops.pack_linear(weight, format=format)
    off = (plain(w, 64) - weight).square().mean(dim=1).sqrt()
    assert (off <= most * weight.square().mean(dim=1).sqrt()).all()
    true = x.double() @ weight.double().T
    error = (ops.linear(x, w) - true).norm(dim=1) / true.norm(dim=1)
    assert (error <= 1.5 * most).all()


@pytest.mark.parametrize("format", QUANTISED)
def test_values_that_a_format_holds_come_back_exactly(backend, random, format):
    weight = decode(encode(random(40, 96), format))
    assert torch.equal(plain(ops.pack_linear(weight, format=format), 40), weight)


@pytest.mark.parametrize("format", QUANTISED)
def test_what_was_encoded_before_is_packed_as_it_is(backend, random, format):
    codes = encode(random(40, 96), format)
    assert ops.pack_linear(codes).format == format
    assert torch.equal(plain(ops.pack_linear(codes), 40), decode(codes))
    assert torch.equal(plain(ops.pack_linear(codes, format="float32"), 40), decode(codes))


@pytest.mark.parametrize("format", QUANTISED)
def test_zeros_stay_zeros(backend, format):
    weight = torch.zeros(20, 64)
    weight[3, 40] = 2.0
    assert torch.equal(plain(ops.pack_linear(weight, format=format), 20), weight)


@pytest.mark.parametrize("format", QUANTISED)
def test_quantising_goes_by_blocks_without_a_trace(random, monkeypatch, format):
    from kernels.reference import formats

    weight = random(50, 70).bfloat16()
    whole = encode(weight, format)
    monkeypatch.setattr(formats, "BLOCK_VALUES", 70 * 3)
    pieces = encode(weight, format)
    assert torch.equal(whole.values, pieces.values) and torch.equal(whole.scales, pieces.scales)


@pytest.mark.parametrize("format", QUANTISED)
def test_rows_packed_as_one_equal_the_parts(backend, random, format):
    x, parts = random(6, 70), [random(n, 70).bfloat16() for n in (20, 7, 33)]
    together = ops.linear(x, ops.pack_linear_rows(parts, format=format))
    apart = [ops.linear(x, ops.pack_linear(part, format=format)) for part in parts]
    assert torch.equal(together, torch.cat(apart, dim=1))


def test_every_mxfp4_code_and_exponent_is_unpacked_exactly(backend):
    codes = torch.arange(32).repeat(255, 1) % 16
    blocks = int4.pair(codes[:, None].to(torch.uint8))
    scales = torch.arange(255, dtype=torch.uint8)[:, None]
    weight = ops.MXFP4(blocks, scales)
    steps = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    expected = torch.tensor([*steps, *(-s for s in steps)] * 2, dtype=torch.float64) * 2.0 ** (
        torch.arange(255)[:, None].double() - 127
    )
    w = ops.pack_linear(weight)
    assert w.format == "mxfp4"
    assert torch.equal(plain(w, 255), expected.float())
    usual = slice(60, 190)  # a product of 0 and an infinite sum is no number
    w = ops.pack_linear(ops.MXFP4(blocks[usual], scales[usual]))
    found = ops.linear(torch.eye(32) * LARGEST, w)  # a row whose scale is 1
    assert torch.equal(found, LARGEST * expected[usual].float().T)


def test_mxfp4_is_packed_to_the_nearest_code_ties_to_even(random):
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -2.5, 4.0])
    block = torch.nn.functional.pad(middles, (0, 32 - len(middles)))
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -2.0, 4.0]
    assert mxfp4.unpack(*mxfp4.pack(block[None]))[0, : len(middles)].tolist() == expected
    weight = random(3, 5, 64)
    blocks, scales = mxfp4.pack(weight)
    assert blocks.shape == (3, 5, 2, 16) and scales.shape == (3, 5, 2)
    again = mxfp4.pack(mxfp4.unpack(blocks, scales))
    assert torch.equal(mxfp4.unpack(*again), mxfp4.unpack(blocks, scales))


def test_strided_mxfp4_rows_are_taken_as_they_are(backend, random):
    blocks, scales = mxfp4.pack(random(40, 64))
    gate, up = ops.MXFP4(blocks[0::2], scales[0::2]), ops.MXFP4(blocks[1::2], scales[1::2])
    down = ops.MXFP4(*mxfp4.pack(random(64, 32)))
    padded = ops.MXFP4(blocks[:32], scales[:32]), ops.MXFP4(blocks[8:], scales[8:])
    assert torch.equal(plain(ops.pack_linear(gate), 20), mxfp4.unpack(blocks, scales)[0::2])
    expert = ops.pack_expert(*padded, down)
    wide = ops.pack_expert(*padded, down, format="bfloat16")
    assert (expert.format, wide.format) == ("mxfp4", "bfloat16")
    x, rows, ids = random(3, 64, scale=0.02), torch.arange(3).int(), torch.zeros(3).int()
    results = []
    for packed in (expert, wide):
        bank = ops.ExpertBank(1, 64, 32)
        bank.set(0, packed)
        results.append(ops.grouped_ffn(x, rows, ids, bank))
    torch.testing.assert_close(
        *results, rtol=1e-4, atol=1e-4
    )  # bfloat16 holds E2M1 times a power of two exactly
    with pytest.raises(ValueError, match=r"^gate: found MXFP4 \[32, 64\], expected \[20, 64\] MXFP4"):
        ops.pack_expert(padded[0], up, down)


def test_mxfp4_that_is_no_number_or_of_a_wrong_shape_is_refused(backend, random):
    blocks, scales = mxfp4.pack(random(4, 64))
    spoiled = scales.clone()
    spoiled[2, 1] = E8M0_NAN
    with pytest.raises(ValueError, match="^weights.0.: found a scale of 255"):
        ops.pack_linear(ops.MXFP4(blocks, spoiled))
    with pytest.raises(ValueError, match="^weights.0.: found blocks .* expected uint8"):
        ops.pack_linear(ops.MXFP4(blocks[:, :1], scales))


def test_a_format_that_a_backend_lacks_is_refused_naming_its_operations(backend, random, monkeypatch):
    monkeypatch.setattr(
        backend, "FORMATS", {**backend.FORMATS, "linear": ("bfloat16",), "embed": ("bfloat16",)}
    )
    with pytest.raises(
        ValueError, match=f"^format: found 'int4', which linear, embed of the {backend.NAME} kernels lack"
    ):
        ops.pack_linear(random(4, 8), format="int4")
    with pytest.raises(
        ValueError, match="^format: found 'int3', which grouped_ffn of the .* lack, expected as_stored"
    ):
        ops.pack_expert(random(4, 8), random(4, 8), random(8, 4), format="int3")


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_of_any_strides_is_packed_as_its_values_stand(backend, random, format):
    both = random(80, 64)
    for weight in (both[0::2], both.T, both[:, 8:40]):
        x = random(3, weight.shape[1])
        dense = ops.linear(x, ops.pack_linear(weight.contiguous(), format=format))
        assert torch.equal(ops.linear(x, ops.pack_linear(weight, format=format)), dense)


def awkward_weight(random, N, K, dtype):
    """Values of many sizes, whole groups of zeros, ties between codes, subnormals, and the ends of the range."""
    weight = random(N, K) * 10.0 ** random.integers(9, (N, 1)).sub(6).float()
    weight[0] = 0.0
    weight[1] = torch.arange(K).remainder(17).sub(8) / 4  # on codes and on the middles between them
    weight[2, : K // 2] = 0.0
    weight[3] *= 1e-38 / 10.0 ** random.integers(9, (1,)).float()
    weight[4] = torch.where(weight[4] > 0, 1.0, -1.0)
    weight[5] = -weight[5].abs()
    return weight.to(dtype)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("N, K", [(33, 70), (40, 256), (16, 1), (23, 96)])
def test_codes_made_while_packing_are_those_that_are_defined(native, random, N, K, dtype, format):
    """By what they stand for, all instruction sets: rows of two weights in one, the second begins inside a panel."""
    weight = awkward_weight(random, N, K, dtype)
    expected = decode(encode(weight, format))
    parts = [weight[:7], weight[7:]]
    for isa, w in on_every_isa(lambda: ops.pack_linear_rows(parts, format=format)):
        assert torch.equal(plain(w, N), expected), isa
    strided = torch.cat([weight, weight], dim=1)[:, :K]
    assert torch.equal(plain(ops.pack_linear(strided, format=format), N), expected)
    turned = weight.T.contiguous().T
    assert torch.equal(plain(ops.pack_linear(turned, format=format), N), expected)


@pytest.mark.parametrize("format", QUANTISED)
def test_codes_of_many_random_weights_are_those_that_are_defined(native, random, format):
    weight = random(400, 1024, scale=0.03).bfloat16()
    found = plain(ops.pack_linear(weight, format=format), 400)
    assert torch.equal(found, decode(encode(weight, format)))


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_a_weight_without_codes_of_its_own_is_packed_as_the_plain_path_packs_it(
    native, random, format, poison
):
    weight = random(20, 70)
    weight[11, 33] = poison
    torch.testing.assert_close(
        plain(ops.pack_linear(weight, format=format), 20),
        decode(encode(weight, format)),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_the_sum_that_chooses_an_int4_scale_has_one_order_everywhere():
    values = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(3)) ** 2
    summed = int4.pairwise_sum(values)
    for at, lanes in ((at, values[at].tolist()) for at in [(0, 0), (4, 2)]):
        numbers = [torch.tensor(lane) for lane in lanes]
        for half in (16, 8, 4, 2, 1):
            numbers = [numbers[i] + numbers[i + half] for i in range(half)]
        assert summed[at] == numbers[0]
