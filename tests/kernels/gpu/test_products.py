"""linear, embed and grouped_ffn in every format and activation, and the table of tiles under them."""

import pytest
import torch

from kernels import gpu, ops
from kernels.gpu import plain, tile_table
from tests.support.gpu import make_bank

FORMATS = ("bfloat16", "float16", "float32", "int8", "int4", "mxfp4")
OPERAND = {"float16": torch.float16, "float32": torch.float32}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "T, N, K",
    [
        (1, 1, 1),  # smallest
        (7, 33, 97),  # nothing divides anything
        (16, 64, 256),  # whole tiles
        (37, 80, 192),  # several tiles of rows and outputs
    ],
)
def test_a_product_is_the_dequantised_weights(random, close, format, T, N, K):
    x, w = random(T, K), gpu.pack_linear(random(N, K), format=format)
    close(gpu.linear(x, w), plain.linear(x, w), OPERAND.get(format, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_is_the_references(random, close, reference, dtype):
    x, weight = random(5, 70), random(20, 70).to(dtype)
    expected = ops.linear(x.cpu(), ops.pack_linear(weight.cpu()))
    close(gpu.linear(x, gpu.pack_linear(weight)).cpu(), expected, dtype)


def test_a_prompts_tiles_compute_the_same(random, close):
    x, w = random(130, 96), gpu.pack_linear(random(70, 96), format="bfloat16")
    close(gpu.linear(x, w, prompt=True), plain.linear(x, w), torch.bfloat16)


def test_bias_and_residual_are_added_to_the_finished_product(random, close):
    x, w, bias = random(3, 64), gpu.pack_linear(random(40, 64), format="float32"), random(40)
    out = random(3, 40)
    expected = out.double() + plain.linear(x, w, bias)
    assert gpu.linear(x, w, bias=bias, out=out, add=True) is out
    close(out, expected)


def test_rows_may_be_strided_and_no_rows_are_no_work(random, close):
    wide, w = random(4, 96), gpu.pack_linear(random(24, 32), format="float32")
    out = torch.zeros(4, 60, device=wide.device)
    gpu.linear(wide[:, 32:64], w, out=out[:, 10:34])
    close(out[:, 10:34], plain.linear(wide[:, 32:64], w))
    assert not out[:, :10].any() and not out[:, 34:].any()
    assert gpu.linear(wide[:0, :32], w).shape == (0, 24)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, under the interpreter
def test_a_row_of_inf_stays_in_its_row(random, close):
    x, w = random(3, 64), gpu.pack_linear(random(16, 64), format="int4")
    x[1] = torch.inf
    close(gpu.linear(x, w)[[0, 2]], plain.linear(x[[0, 2]], w), torch.bfloat16)


def test_q_k_and_v_stacked_are_three_products(random, close):
    parts = [random(n, 64) for n in (32, 16, 16)]
    for format in FORMATS:
        stacked = gpu.pack_linear_rows(parts, format=format)
        each = [gpu.dequantised_linear(gpu.pack_linear(part, format=format)) for part in parts]
        assert torch.equal(gpu.dequantised_linear(stacked), torch.cat(each))


@pytest.mark.parametrize("format", FORMATS)
def test_heads_have_a_matrix_each(random, close, format):
    x, weights = random(5, 4, 70)[:, 1:], random(3, 20, 70)
    w = gpu.pack_linear_heads(weights, format=format)
    each = gpu.dequantised_linear(w.stacked).double().view(3, 20, 70)
    expected = torch.einsum("thk,hnk->thn", x.double(), each)
    close(gpu.linear_heads(x, w), expected, OPERAND.get(format, torch.bfloat16))


@pytest.mark.parametrize("format", FORMATS)
def test_embed_is_the_dequantised_row(random, format):
    w = gpu.pack_linear(random(50, 70), format=format)
    ids = torch.tensor([49, 0, 7, 7], dtype=torch.int32, device=w.values.device)
    assert torch.equal(gpu.embed(ids, w), gpu.dequantised_linear(w)[ids.long()])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "clamped_swiglu", "relu"])
def test_rows_go_through_their_experts(random, close, device, activation, format):
    experts = [0, 1, 3]
    bank = make_bank(
        random,
        device,
        experts,
        4,
        96,
        72,
        activation=activation,
        format=format,
        bias=activation == "clamped_swiglu",
    )
    x, rows = random(5, 96) * 3, random.integers(5, (19,))
    ids = torch.tensor(experts, device=device).int()[random.integers(3, (19,)).long()]
    found = gpu.grouped_ffn(x, rows, ids, bank)
    close(found, plain.grouped_ffn(x, rows, ids, bank), OPERAND.get(format, torch.bfloat16))


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "clamped_swiglu", "relu"])
def test_experts_are_the_references(random, close, reference, device, activation):
    bank, same = gpu.ExpertBank(3, 32, 24, device=device), ops.ExpertBank(3, 32, 24)
    for expert_id in range(3):
        weights = [random(24, 32), random(24, 32), random(32, 24)]
        options = {"up_bias": random(24), "down_bias": random(32)}
        if activation == "relu":
            weights[0] = None
        elif activation == "clamped_swiglu":
            options |= {"gate_bias": random(24), "alpha": 1.702, "limit": 0.7}
        bank.set(expert_id, gpu.pack_expert(*weights, activation=activation, **options))
        there = [None if weight is None else weight.cpu() for weight in weights]
        options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        same.set(expert_id, ops.pack_expert(*there, activation=activation, **options))
    x, rows, ids = random(4, 32) / 8, random.integers(4, (9,)), random.integers(3, (9,))
    expected = ops.grouped_ffn(x.cpu(), rows.cpu(), ids.cpu(), same)
    close(gpu.grouped_ffn(x, rows, ids, bank).cpu(), expected)


def test_one_expert_may_get_all_rows_and_many_may_get_one_each(random, close, device):
    bank = make_bank(random, device, range(8), 8, 64, 64)
    x = random(40, 64)
    for ids in (torch.full((40,), 5), torch.arange(40) % 8):
        ids, rows = ids.int().to(device), torch.arange(40, device=device).int()
        close(gpu.grouped_ffn(x, rows, ids, bank), plain.grouped_ffn(x, rows, ids, bank), torch.bfloat16)
        prompt = gpu.grouped_ffn(x, rows, ids, bank, prompt=True)
        close(prompt, plain.grouped_ffn(x, rows, ids, bank), torch.bfloat16)


def test_padding_rows_are_left_alone(random, device):
    bank = make_bank(random, device, [0], 2, 32, 32)
    out = torch.full((3, 32), 7.0, device=device)
    ids = torch.tensor([-1, 0, -1], dtype=torch.int32, device=device)
    gpu.grouped_ffn(random(3, 32), torch.arange(3, device=device).int(), ids, bank, out=out)
    assert (out[[0, 2]] == 7).all() and not (out[1] == 7).any()


def test_an_absent_expert_is_named_and_the_bank_goes_on(random, device):
    bank = make_bank(random, device, [0, 1], 3, 32, 32)
    x, rows = random(2, 32), torch.arange(2, device=device).int()
    with pytest.raises(IndexError, match="expert 2"):
        gpu.grouped_ffn(x, rows, torch.tensor([0, 2], dtype=torch.int32, device=device), bank)
    gpu.grouped_ffn(x, rows, rows, bank)
    bank.drop(1)
    with pytest.raises(IndexError, match="expert 1"):
        gpu.grouped_ffn(x, rows, rows, bank)
    assert bank.resident == (0,)


@pytest.mark.parametrize(
    "format, cuts", [("bfloat16", (0, 32, 48, 96)), ("int4", (0, 64, 96)), ("mxfp4", (0, 64, 96))]
)
def test_the_slices_of_an_expert_add_up_to_it(random, close, device, format, cuts):
    whole = make_bank(random, device, [0], 1, 64, 96, format=format, bias=True)
    sliced = gpu.ExpertBank(len(cuts) - 1, 64, 96, device=device)
    for slice_id, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
        sliced.set_slice(slice_id, whole.expert(0), begin, end - begin)
    x = random(3, 64)
    rows = torch.arange(3, device=device).int().repeat_interleave(len(cuts) - 1)
    ids = torch.arange(len(cuts) - 1, device=device).int().repeat(3)
    parts = gpu.grouped_ffn(x, rows, ids, sliced)
    close(parts, plain.grouped_ffn(x, rows, ids, sliced), torch.bfloat16)
    three = torch.arange(3, device=device).int()
    close(parts.view(3, -1, 64).sum(dim=1), plain.grouped_ffn(x, three, three * 0, whole), torch.bfloat16)


def test_a_slice_must_lie_on_whole_blocks(random, device):
    bank = make_bank(random, device, [0], 3, 64, 96, format="int4")
    with pytest.raises(ValueError, match="multiples of 64"):
        bank.set_slice(1, bank.expert(0), 32, 64)


def test_weights_that_lie_in_turn_are_told_apart_when_packed(random, close, device):
    both, down = random(2 * 48, 64), random(64, 48)
    bank = gpu.ExpertBank(1, 64, 48, device=device)
    bank.set(
        0, gpu.pack_expert(both[0::2], both[1::2], down, activation="clamped_swiglu", alpha=1.702, limit=0.2)
    )
    x = random(2, 64) / 8
    zero = torch.zeros(2, dtype=torch.int32, device=device)
    gate, up = (x.double() @ part.double().T for part in (both[0::2], both[1::2]))
    inner = plain.activate(gate, up, "clamped_swiglu", 1.702, 0.2)
    found = gpu.grouped_ffn(x, torch.arange(2, device=device).int(), zero, bank)
    close(found, inner @ down.double().T)


@pytest.mark.parametrize("R, E, tile_rows", [(1, 1, 16), (5, 3, 2), (130, 7, 16), (2000, 33, 64)])
def test_the_table_sorts_rows_by_expert_and_covers_each_once(random, device, R, E, tile_rows):
    ids = random.integers(E + 1, (R,)) - 1
    addresses = torch.ones(E, dtype=torch.int64, device=device)
    missing = torch.zeros(1, dtype=torch.int32, device=device)
    pairs, tiles = tile_table.tile_table(ids, addresses, missing, tile_rows)
    order = [r for e in range(E) for r in range(R) if ids[r] == e]
    assert pairs[: len(order)].tolist() == order
    covered = [0]
    for expert, first, count in tiles.tolist():
        if count:
            assert first == covered[-1] and count <= tile_rows
            assert (ids[pairs[first : first + count].long()] == expert).all()
            covered.append(first + count)
    assert covered[-1] == len(order) and int(missing) == 0

    by_torch = [torch.empty_like(part) for part in (pairs, tiles)]
    tile_table._sorted_by_torch(ids, addresses, missing, tile_rows, *by_torch)
    assert by_torch[0][: len(order)].tolist() == order
    used = tiles[:, 2] > 0
    assert torch.equal(by_torch[1][:, 2], tiles[:, 2]) and torch.equal(by_torch[1][used], tiles[used])
