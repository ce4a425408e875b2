"""A row's result does not depend on its neighbours, nor on the instruction set."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from kernels import backends, ops

BATCHES = (1, 2, 3, 5, 8, 13, 16, 31, 64, 140)


def batches_around(row, num_rows, random):
    """Index lists that hold the row at some place among others."""
    for size in BATCHES:
        others = random.integers(num_rows, (size,)).long()
        others[int(random.integers(size, (1,)))] = row
        yield others


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("N, K", [(8, 5), (96, 256), (257, 64), (32, 130)])
def test_a_linear_row_is_the_same_in_any_batch(backend, random, N, K, threads):
    torch.set_num_threads(threads)
    x, w = random(40, K), ops.pack_linear(random(N, K).bfloat16())
    for row in range(0, 40, 7):
        alone = ops.linear(x[row : row + 1], w)[0]
        for batch in batches_around(row, 40, random):
            out = ops.linear(x[batch], w)
            assert all(torch.equal(out[place], alone) for place in (batch == row).nonzero().flatten())


def test_an_expert_row_is_the_same_in_any_batch(backend, random, make_bank):
    bank, _ = make_bank(3, 64, 40)
    x = random(40, 64)
    for row in range(0, 40, 9):
        alone = ops.grouped_ffn(
            x, torch.tensor([row], dtype=torch.int32), torch.tensor([1], dtype=torch.int32), bank
        )[0]
        for batch in batches_around(row, 40, random):
            ids = random.integers(3, (len(batch),))
            ids[batch == row] = 1
            out = ops.grouped_ffn(x, batch.int(), ids, bank)
            assert all(torch.equal(out[place], alone) for place in (batch == row).nonzero().flatten())


@pytest.mark.parametrize("extras", [{}, {"window": 19, "soft_cap": 3.0}])
@pytest.mark.parametrize("H, G, P, Pv", [(4, 2, 64, 64), (6, 1, 20, 12), (2, 2, 16, 16)])
def test_an_attention_row_is_the_same_in_any_batch(backend, random, make_pages, H, G, P, Pv, extras):
    lengths = [90, 5, 33, 64]
    k_pages, v_pages, tables, _ = make_pages(lengths, G, P, Pv)
    extras = {**extras, "sinks": random(H)} if extras else {}
    rows = [(request, position) for request, n in enumerate(lengths) for position in range(n)]
    where = torch.tensor(rows, dtype=torch.int32)
    q = random(len(rows), H, P)

    def attend(batch):
        request, position = where[batch].T.contiguous()
        return ops.paged_attention(q[batch], k_pages, v_pages, tables, request, position, P**-0.5, **extras)

    together = attend(torch.arange(len(rows)))
    for row in range(0, len(rows), 17):
        alone = attend(torch.tensor([row]))[0]
        assert torch.equal(together[row], alone)
        for batch in batches_around(row, len(rows), random):
            out = attend(batch)
            assert all(torch.equal(out[place], alone) for place in (batch == row).nonzero().flatten())


@pytest.mark.parametrize("H, P", [(4, 64), (5, 20)])
def test_a_row_with_a_bias_by_distance_is_the_same_in_any_batch(backend, random, make_pages, H, P):
    lengths = [90, 5, 33, 64]
    k_pages, v_pages, tables, _ = make_pages(lengths, H, P)
    rows = [(request, place) for request, n in enumerate(lengths) for place in range(n)]
    where = torch.tensor(rows, dtype=torch.int32)
    last = torch.tensor(lengths, dtype=torch.int32) - 1
    q, bias = random(len(rows), H, P), random(H, 41)

    def attend(batch):
        request, place = where[batch].T.contiguous()
        seen = torch.where(batch % 2 == 0, last[request], place).int()  # all of the sequence, or the past
        return ops.biased_attention(q[batch], k_pages, v_pages, tables, request, seen, 0.3, bias, place)

    together = attend(torch.arange(len(rows)))
    for row in range(0, len(rows), 17):
        alone = attend(torch.tensor([row]))[0]
        assert torch.equal(together[row], alone)
        for batch in batches_around(row, len(rows), random):
            out = attend(batch)
            assert all(torch.equal(out[place], alone) for place in (batch == row).nonzero().flatten())


def test_norms_gates_and_sums_are_the_same_in_any_batch(backend, random):
    x, weight, logits, hidden = random(40, 100), random(100), random(40, 21), random(40, 100)
    slots, gate_weights = random.integers(41, (40, 3)) - 1, random(40, 3)
    cos, sin = ops.rope_table(40, 20, 10000.0)
    heads, positions = random(40, 5, 20), random.integers(40, (40,))
    w, sigmoids = ops.pack_linear(random(100, 100)), {"scores": "sigmoid", "selection_bias": random(21)}

    def run(batch):
        residual, rotated, capped = hidden[batch], heads[batch], hidden[batch]
        ops.soft_cap(capped, 2.0)
        ops.combine(x, slots[batch], gate_weights[batch], residual)
        ops.head_norm_rope(rotated, weight[:20], 1e-6, cos, sin, positions[batch])
        return (
            ops.rms_norm(x[batch], weight, 1e-6),
            *ops.gate_topk(logits[batch], 4, renormalise=True),
            *ops.gate_topk(logits[batch], 3, renormalise=True, num_groups=3, top_groups=2, **sigmoids),
            ops.linear(x[batch], w, bias=weight),
            capped,
            residual,
            rotated,
        )

    for row in range(0, 40, 7):
        alone = run(torch.tensor([row]))
        for batch in batches_around(row, 40, random):
            for one, many in zip(alone, run(batch), strict=True):
                assert all(torch.equal(many[place], one[0]) for place in (batch == row).nonzero().flatten())


@pytest.fixture
def on_every_isa(native):
    """on_every_isa(call) -> call's results on each instruction set this machine runs."""
    from kernels.cpu import _native

    best = _native.isa()

    def run(call):
        results = []
        for isa in _native.runnable_isas():
            backends.use_isa(isa)
            results.append(call())
        return results

    yield run
    backends.use_isa(best)


def assert_same_bits(results):
    for result in results[1:]:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("T, N, K", [(1, 130, 64), (2, 40, 33), (3, 90, 20), (7, 70, 48), (20, 100, 31)])
def test_linear_has_the_same_bits_on_every_isa(on_every_isa, random, T, N, K, dtype):
    x, w = random(T, K), ops.pack_linear(random(N, K).to(dtype))
    assert_same_bits(on_every_isa(lambda: ops.linear(x, w)))


@pytest.mark.parametrize(
    "activation", [{}, {"activation": "geglu_tanh"}, {"activation": "clamped_swiglu", "limit": 0.9}, {"activation": "relu"}]
)  # fmt: skip
@pytest.mark.parametrize("D, F, biases", [(33, 17, True), (64, 96, False)])
def test_grouped_ffn_has_the_same_bits_on_every_isa(
    on_every_isa, random, make_bank, D, F, biases, activation
):
    bank, _ = make_bank(4, D, F, biases=biases, **activation)
    x, rows, ids = random(9, D, scale=4.0), random.integers(9, (40,)), random.integers(4, (40,))
    assert_same_bits(on_every_isa(lambda: ops.grouped_ffn(x, rows, ids, bank)))


@pytest.mark.parametrize("extras", [{}, {"window": 9}, {"window": 30, "soft_cap": 2.0, "sinks": True}])
@pytest.mark.parametrize("H, G, P, Pv", [(4, 2, 64, 64), (6, 1, 20, 12), (9, 1, 40, 40)])
def test_attention_has_the_same_bits_on_every_isa(on_every_isa, random, make_pages, H, G, P, Pv, extras):
    k_pages, v_pages, tables, _ = make_pages([50, 7], G, P, Pv)
    extras = {**extras, "sinks": random(H)} if "sinks" in extras else extras
    request = torch.tensor([0] * 20 + [1, 0, 1], dtype=torch.int32)
    position = torch.tensor([*range(20, 40), 6, 49, 0], dtype=torch.int32)
    q = random(23, H, P, scale=3.0)
    assert_same_bits(
        on_every_isa(
            lambda: ops.paged_attention(q, k_pages, v_pages, tables, request, position, 0.3, **extras)
        )
    )


@pytest.mark.parametrize("reach", [4, 64])
def test_attention_with_a_bias_has_the_same_bits_on_every_isa(on_every_isa, random, make_pages, reach):
    k_pages, v_pages, tables, _ = make_pages([50, 7], 6, 20)
    request = torch.tensor([0] * 20 + [1, 0, 1], dtype=torch.int32)
    seen = torch.tensor([*[49] * 10, *range(10, 20), 6, 49, 0], dtype=torch.int32)
    own = torch.tensor([*range(20), 6, 30, 0], dtype=torch.int32)
    q, bias = random(23, 6, 20, scale=3.0), random(6, 2 * reach + 1)
    rows = k_pages, v_pages, tables, request, seen, 0.3, bias, own
    assert_same_bits(on_every_isa(lambda: ops.biased_attention(q, *rows)))


def test_norms_gates_and_sums_have_the_same_bits_on_every_isa(on_every_isa, random):
    x, weight, logits, hidden = random(9, 100), random(100), random(9, 37, scale=5.0), random(9, 100)
    slots, gate_weights = random.integers(10, (9, 3)) - 1, random(9, 3)
    cos, sin = ops.rope_table(40, 100, 10000.0)
    positions, biases, w = random.integers(40, (9,)), random(36), ops.pack_linear(random(30, 100))
    rules = (
        {"renormalise": True},
        {"renormalise": True, "scores": "softmax_of_top_k", "expert_scale": biases},
        {
            "renormalise": True,
            "scores": "sigmoid",
            "selection_bias": biases,
            "num_groups": 6,
            "top_groups": 3,
        },
    )

    def run():
        residual, rotated, capped = hidden.clone(), x.clone().view(9, 1, 100), x.clone()
        ops.combine(x, slots, gate_weights, residual)
        ops.head_norm_rope(rotated, weight, 1e-6, cos, sin, positions)
        ops.head_norm_rope(rotated, None, 1e-6, cos[:, :19].contiguous(), sin[:, :19].contiguous(), positions,
                           interleaved=True)  # fmt: skip
        ops.soft_cap(capped, 1.5)
        ops.linear(x, w, bias=biases[:30], out=residual[:, 3:33], add=True)
        chosen = [ops.gate_topk(logits[:, :36], 4, **rule) for rule in rules]
        parts = (ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x, None, 1e-6), residual, rotated, capped)
        parts += tuple(part for ids, weights in chosen for part in (ids.view(torch.float32), weights))
        return torch.cat([part.flatten() for part in parts])

    assert_same_bits(on_every_isa(run))


def test_tanh_is_within_two_units_in_the_last_place_on_every_isa(on_every_isa):
    from kernels.cpu import _native

    spread = 10.0 ** torch.linspace(-30, 1.5, 20_001)
    x = torch.cat([torch.linspace(-10, 10, 50_001), torch.linspace(-0.7, 0.7, 20_001), spread, -spread])
    edges = torch.tensor([-torch.inf, torch.inf, 1e30, -1e30, 0.0, torch.nan])

    def run(values):
        out = torch.empty_like(values)
        _native.tanh(values.data_ptr(), len(values), out.data_ptr())
        return out

    results = on_every_isa(lambda: run(x))
    assert_same_bits(results)
    true = x.double().tanh()
    size = true.abs().float()
    unit = torch.nextafter(size, torch.tensor(torch.inf)).double() - size.double()
    assert ((results[0].double() - true).abs() / unit).max() <= 2
    for result in on_every_isa(lambda: run(edges)):
        assert result[:5].tolist() == [-1, 1, 1, -1, 0] and result[5].isnan()


def test_exp_is_within_two_units_in_the_last_place_on_every_isa(on_every_isa):
    from kernels.cpu import _native

    x = torch.cat([torch.linspace(-87.3, 88.3, 50_001), torch.linspace(-1, 1, 10_001), torch.zeros(1)])
    edges = torch.tensor([-torch.inf, -1e30, -88.0, torch.nan])

    def run(values):
        out = torch.empty_like(values)
        _native.exp(values.data_ptr(), len(values), out.data_ptr())
        return out

    results = on_every_isa(lambda: run(x))
    assert_same_bits(results)
    true = x.double().exp()
    unit = torch.nextafter(true.float(), torch.tensor(torch.inf)).double() - true.float().double()
    assert ((results[0].double() - true).abs() / unit).max() <= 2
    for result in on_every_isa(lambda: run(edges)):
        assert result[:3].tolist() == [0, 0, 0] and result[3].isnan()


@pytest.fixture
def on_any_threads(native):
    """on_any_threads(call) -> call's results on 1, 2 and 5 threads."""

    def run(call):
        results = []
        for threads in (1, 2, 5):
            ops.set_num_threads(threads)
            results.append(call())
        return results

    yield run
    ops.set_num_threads(1)


@pytest.mark.parametrize("T, N, K", [(1, 8200, 256), (70, 1030, 129)])
def test_linear_has_the_same_bits_on_any_number_of_threads(on_any_threads, random, T, N, K):
    x, w = random(T, K), ops.pack_linear(random(N, K).bfloat16())
    assert_same_bits(on_any_threads(lambda: ops.linear(x, w)))


def test_grouped_ffn_has_the_same_bits_on_any_number_of_threads(on_any_threads, random, make_bank):
    bank, _ = make_bank(16, 128, 96)
    x, rows, ids = random(50, 128), random.integers(50, (400,)), random.integers(16, (400,))
    assert_same_bits(on_any_threads(lambda: ops.grouped_ffn(x, rows, ids, bank)))


def test_attention_has_the_same_bits_on_any_number_of_threads(on_any_threads, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([300, 30], 2, 64)
    request = torch.tensor([0] * 200 + [1] * 30, dtype=torch.int32)
    position = torch.tensor([*range(100, 300), *range(30)], dtype=torch.int32)
    q = random(230, 8, 64)
    assert_same_bits(
        on_any_threads(lambda: ops.paged_attention(q, k_pages, v_pages, tables, request, position, 0.125))
    )


def test_attention_with_a_bias_has_the_same_bits_on_any_number_of_threads(on_any_threads, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([300, 30], 4, 64)
    request = torch.tensor([0] * 300 + [1] * 30, dtype=torch.int32)
    own = torch.tensor([*range(300), *range(30)], dtype=torch.int32)
    seen = torch.tensor([299] * 300 + [29] * 30, dtype=torch.int32)
    q, bias = random(330, 4, 64), random(4, 257)
    rows = k_pages, v_pages, tables, request, seen, 0.125, bias, own
    assert_same_bits(on_any_threads(lambda: ops.biased_attention(q, *rows)))


def test_two_callers_share_the_threads_without_mixing_results(native, random):
    x, w = random(70, 128), ops.pack_linear(random(1030, 128).bfloat16())
    expected = ops.linear(x, w)
    ops.set_num_threads(3)
    try:
        with ThreadPoolExecutor(2) as callers:
            results = [callers.submit(ops.linear, x, w) for _ in range(40)]
            assert all(torch.equal(result.result(timeout=60), expected) for result in results)
    finally:
        ops.set_num_threads(1)


def test_threads_fall_asleep_and_are_roused_without_losing_a_part(native, random):
    x, small, large = random(4, 256), *(ops.pack_linear(random(N, 256).bfloat16()) for N in (512, 16384))
    expected = [ops.linear(x, w) for w in (small, large)]
    pause = Event()
    ops.set_num_threads(3)
    try:
        for turn in range(120):
            pause.wait(0.0001 * (turn % 8))  # on both sides of how long they look out
            results = [ops.linear(x, w) for w in (small, large)]
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    finally:
        ops.set_num_threads(1)
