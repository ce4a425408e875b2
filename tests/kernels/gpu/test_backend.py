"""The triton kernels behind `kernels.ops`: every operation and format there, held to the reference."""

import pytest
import torch

from kernels import backends, ops, slices
from kernels.gpu.quantise import FORMATS
from kernels.reference import mxfp4
from tests.support.gpu import error

I32 = torch.int32
D, F = 64, 48
BOUND = 1e-5
KINDS = [
    ("swiglu", {}, False),
    ("clamped_swiglu", {"alpha": 1.702, "limit": 1.5}, True),
    ("relu", {}, True),
]


@pytest.fixture
def both():
    """both(call) -> what call gives on the triton kernels, after it has been near what it gives on the reference."""

    def run(call, bound=BOUND):
        results = []
        for name in ("reference", "triton"):
            backends.use(name)
            found = call()
            results.append(found if isinstance(found, tuple) else (found,))
        for expected, found in zip(*results, strict=True):
            if expected.is_floating_point():
                assert error(found, expected) < bound
            else:
                assert torch.equal(found, expected)
        return results[1] if len(results[1]) > 1 else results[1][0]

    return run


@pytest.fixture
def experts(random):
    """experts(activation, options, has_bias) -> what `ops.pack_expert` takes, of three experts."""

    def make(activation, options, has_bias):
        made = []
        for _ in range(3):
            up, down = random(F, D) * D**-0.5, random(D, F) * F**-0.5
            expert = {
                "gate": None if activation == "relu" else random(F, D) * D**-0.5,
                "up": up,
                "down": down,
            }
            if has_bias:
                expert |= {"up_bias": random(F), "down_bias": random(D)}
                expert |= {} if activation == "relu" else {"gate_bias": random(F)}
            made.append(expert | {"activation": activation} | options)
        return made

    return make


def bank_of(experts, format):
    bank = ops.ExpertBank(len(experts) + 1, D, F)  # one is not resident
    for index, expert in enumerate(experts):
        bank.set(index, ops.pack_expert(**expert, format=format))
    return bank


@pytest.mark.parametrize("format", FORMATS)
def test_products_and_embeddings_of_every_format(random, both, format):
    x, weights, bias, residual = random(3, 96), [random(20, 96), random(12, 96)], random(32), random(3, 32)
    ids = torch.tensor([31, 0], dtype=I32)

    def call():
        packed = ops.pack_linear_rows(weights, format=format)
        added = ops.linear(x, packed, bias=bias, out=residual.clone(), add=True)
        return added, ops.embed(ids, packed)

    both(call, bound=3e-4)  # the reference rounds rows to 15 bits where it has codes


def test_weights_stored_as_mxfp4_stay_as_they_are(random, both):
    x = random(2, 64)
    weight = ops.MXFP4(*mxfp4.pack(random(32, 64)))
    gate, up, down = (ops.MXFP4(*mxfp4.pack(random(n, k))) for n, k in ((64, 64), (64, 64), (64, 64)))

    def call():
        bank = ops.ExpertBank(1, 64, 64)
        bank.set(0, ops.pack_expert(gate, up, down))
        ids = torch.zeros(2, dtype=I32)
        return ops.linear(x, ops.pack_linear(weight)), ops.grouped_ffn(
            x, torch.arange(2, dtype=I32), ids, bank
        )

    both(call)


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_a_matrix_for_each_head(random, both, format):
    x, weights = random(2, 3, 40), random(3, 24, 40)
    both(lambda: ops.linear_heads(x, ops.pack_linear_heads(weights, format=format)), bound=3e-4)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation, options, has_bias", KINDS)
def test_experts_whole_and_in_slices(random, both, experts, activation, options, has_bias, format):
    made, x = experts(activation, options, has_bias), random(3, D)
    rows, ids = (torch.tensor(each, dtype=I32) for each in ([0, 1, 1, 2, 0], [2, 0, 1, 2, 0]))
    masks = torch.tensor([0b1111, 0b0010, 0, 0b1101, 0b1111], dtype=I32)

    def call():
        bank = bank_of(made, format)
        whole = ops.grouped_ffn(x, rows, ids, bank)
        part = slices.sliced_ffn(x, rows, ids, masks, 4, bank)
        return whole, part, slices.expert_inner(x, rows, ids, bank)

    whole, part, _ = both(call, bound=2e-3)  # codes: as above, and of what stands between the matrices
    assert torch.equal(part[[0, 4]], whole[[0, 4]])


def test_the_experts_of_a_layer_are_added_to_the_residual(random, both, experts):
    made, x, hidden, weights = experts("swiglu", {}, False), random(2, D), random(2, D), random(2, 2).abs()
    ids = torch.tensor([[2, 0], [1, 2]], dtype=I32)

    def call():
        added = hidden.clone()
        assert ops.experts(x, ids, weights, bank_of(made, "float32"), added, expert_out=torch.empty(4, D))
        return added

    both(call)


def test_an_expert_that_is_not_resident_is_named(random, experts):
    backends.use("triton")
    bank, x = bank_of(experts("swiglu", {}, False), "bfloat16"), random(1, D)
    with pytest.raises(IndexError, match="asks for expert 3, which is not resident"):
        ops.grouped_ffn(x, torch.zeros(1, dtype=I32), torch.tensor([3], dtype=I32), bank)


def test_the_slices_of_a_tier_are_chosen_alike(random, both):
    activations, weights = random(4, 8), random(2, 2).abs()
    ids = torch.tensor([[1, 0], [2, 1]], dtype=I32)
    slopes, offsets = random(3, 4).abs(), random(3, 4).abs()
    tiers = torch.tensor([3, 8], dtype=I32)
    both(lambda: slices.choose_slices(activations, ids, weights, slopes, offsets, tiers))


def test_heads_that_no_rope_turns_are_normed(random, both):
    x, weight, positions = random(2, 3, 16), random(16), torch.tensor([4, 0], dtype=I32)
    nothing = torch.empty(8, 0)

    def call():
        normed = x.clone()
        ops.head_norm_rope(normed, weight, 1e-6, nothing, nothing, positions)
        return normed

    both(call)


def test_keys_of_strided_heads_are_kept_and_attended_to(random, both):
    wide, q = random(5, 2, 40), random(2, 4, 16)
    tables, request = torch.tensor([[2, 0]], dtype=I32), torch.zeros(2, dtype=I32)
    slots, positions = torch.arange(32, 37, dtype=I32), torch.tensor([4, 1], dtype=I32)

    def call():
        last = backends.keys_end_in_tokens()
        pages = torch.zeros(3, 2, 16, 16), torch.zeros(3, 2, 16, 20)
        ops.kv_write(wide[..., :16], wide[..., 16:36], *pages, slots)
        keys = pages[0] if last else pages[0].transpose(2, 3)
        return ops.paged_attention(q, *pages, tables, request, positions, 0.25), keys.clone()

    both(call)


def test_what_does_not_fit_is_told_with_what_was_expected(random):
    backends.use("triton")
    with pytest.raises(
        ValueError, match=r"q: found \[1, 4, 16\] float32 on cpu.*expected \[1, 4, 12\] float32"
    ):
        pages = torch.zeros(3, 2, 16, 12), torch.zeros(3, 2, 16, 12)
        tables = torch.zeros(1, 1, dtype=I32)
        row = torch.zeros(1, dtype=I32)
        ops.paged_attention(random(1, 4, 16), *pages, tables, row, row, 1.0)
    with pytest.raises(
        ValueError, match=r"x: found \[2, 7\] float32 on cpu.*expected \[rows, 8\] float32 on cpu"
    ):
        ops.linear(random(2, 7), ops.pack_linear(random(4, 8)))


def test_experts_of_two_layouts_in_one_layer_are_refused(random, experts):
    backends.use("triton")
    made = experts("swiglu", {}, False)
    bank = ops.ExpertBank(3, D, F)
    bank.set(0, ops.pack_expert(**made[0], format="bfloat16"))
    with pytest.raises(ValueError, match="packed as .*expected .*as the others in this bank"):
        bank.set(1, ops.pack_expert(**made[1], format="int8"))


def test_every_operation_that_ops_asks_a_backend_for_is_there():
    asked = set(backends.load("reference").__all__) - {"CHECKS", "FORMATS", "NAME"}
    lacking = asked - set(dir(backends.load("triton")))
    assert not lacking
