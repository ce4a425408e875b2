"""kv_write and paged_attention: against their definition, and against torch on gathered keys and values."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels import ops


def rows_of(*pairs):
    """(request, position) pairs -> row_request, row_position."""
    return tuple(torch.tensor(column, dtype=torch.int32) for column in zip(*pairs, strict=True))


@pytest.mark.parametrize(
    "H, G, P", [(1, 1, 1), (2, 1, 10), (4, 2, 64), (16, 8, 16), (12, 1, 24), (9, 3, 144), (5, 1, 32)]
)
@pytest.mark.parametrize("lengths", [[1], [16], [17, 3], [40, 1, 70, 16]])
def test_decode_agrees_with_the_reference_and_with_torch(
    backend, by_reference, random, make_pages, H, G, P, lengths
):
    k_pages, v_pages, tables, plain = make_pages(lengths, G, P)
    q, rows = random(len(lengths), H, P), rows_of(*((i, n - 1) for i, n in enumerate(lengths)))
    out = ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5)
    expected = by_reference(lambda: ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5))
    torch.testing.assert_close(out, expected)
    for i, (k, v) in enumerate(plain):
        k, v = (x.transpose(0, 1).repeat_interleave(H // G, dim=0) for x in (k, v))
        torch.testing.assert_close(out[i], scaled_dot_product_attention(q[i][:, None], k, v)[:, 0])


@pytest.mark.parametrize("H, G, P", [(4, 2, 64), (2, 2, 20), (12, 1, 16)])
def test_prefill_chunks_and_decode_rows_in_one_call(backend, by_reference, random, make_pages, H, G, P):
    k_pages, v_pages, tables, plain = make_pages([50, 33, 7], G, P)
    rows = rows_of(*((0, t) for t in range(20, 50)), (1, 32), *((2, t) for t in range(7)))
    q = random(len(rows[0]), H, P)
    out = ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5)
    expected = by_reference(lambda: ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5))
    torch.testing.assert_close(out, expected)
    k, v = (x.transpose(0, 1).repeat_interleave(H // G, dim=0) for x in plain[2])
    causal = scaled_dot_product_attention(q[-7:].transpose(0, 1), k, v, is_causal=True)
    torch.testing.assert_close(out[-7:], causal.transpose(0, 1))


def test_rows_in_any_order_see_what_their_position_says(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([60, 30], 2, 16)
    pairs = [(0, 59), (0, 3), (1, 7), (0, 31), (0, 0), (1, 29), (1, 2)]
    q = random(len(pairs), 4, 16)
    together = ops.paged_attention(q, k_pages, v_pages, tables, *rows_of(*pairs), 0.25)
    for t, pair in enumerate(pairs):
        alone = ops.paged_attention(q[t : t + 1], k_pages, v_pages, tables, *rows_of(pair), 0.25)
        assert torch.equal(together[t], alone[0])


@pytest.mark.parametrize("length", [26_601, 32_768])
def test_a_row_at_the_end_of_a_long_context_sees_all_of_it(backend, random, make_pages, length):
    """Past every position where an offset of 16 bits, or a first buffer, would end. Few of its keys matter, far apart."""
    k_pages, v_pages, tables, [(k, v)] = make_pages([length], 1, 16)
    q = random(1, 2, 16)
    out = ops.paged_attention(q, k_pages, v_pages, tables, *rows_of((0, length - 1)), 2.0)
    k, v = (x.transpose(0, 1).repeat_interleave(2, dim=0) for x in (k, v))
    expected = scaled_dot_product_attention(q[0][:, None], k, v, scale=2.0)[:, 0]
    torch.testing.assert_close(out[0], expected)


def test_q_and_out_may_be_parts_of_larger_buffers(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([20, 9], 2, 16)
    rows = rows_of((0, 19), (1, 8))
    fused, buffer = random(2, 200), torch.full((5, 4, 16), 3.0)
    q = fused[:, 8:72].view(2, 4, 16)
    ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25, out=buffer[:2])
    assert torch.equal(buffer[:2], ops.paged_attention(q.contiguous(), k_pages, v_pages, tables, *rows, 0.25))
    assert (buffer[2:] == 3).all()


def test_extreme_scores_give_finite_weights(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([20], 1, 16)
    out = ops.paged_attention(random(1, 1, 16) * 1000, k_pages, v_pages, tables, *rows_of((0, 19)), 1.0)
    assert out.isfinite().all()


def test_no_rows_give_no_rows(backend, make_pages):
    k_pages, v_pages, tables, _ = make_pages([4], 2, 16)
    empty = torch.empty(0, dtype=torch.int32)
    assert ops.paged_attention(torch.empty(0, 4, 16), k_pages, v_pages, tables, empty, empty, 1.0).shape == (
        0,
        4,
        16,
    )


@pytest.mark.parametrize("T, G, P", [(1, 1, 1), (7, 3, 10), (20, 2, 64)])
def test_written_keys_and_values_are_read_back(backend, random, T, G, P):
    k_pages, v_pages = torch.zeros(4, G, P, 16), torch.zeros(4, G, 16, P)
    fused = random(T, 2 * G * P + 5)
    k, v = fused[:, 1 : 1 + G * P].view(T, G, P), fused[:, 3 + G * P : 3 + 2 * G * P].view(T, G, P)
    slots = random.permutation(64)[:T].int()
    ops.kv_write(k, v, k_pages, v_pages, slots)
    block, offset = slots.long() // 16, slots.long() % 16
    assert torch.equal(k_pages[block, :, :, offset], k) and torch.equal(v_pages[block, :, offset], v)
    assert k_pages.count_nonzero() == k.numel() and v_pages.count_nonzero() == v.numel()


def test_a_slot_outside_the_pages_is_refused_and_nothing_written(backend, random):
    k_pages, v_pages = torch.zeros(4, 2, 8, 16), torch.zeros(4, 2, 16, 8)
    for slot in (-1, 64):
        with pytest.raises(ValueError, match="slots"):
            ops.kv_write(
                random(2, 2, 8), random(2, 2, 8), k_pages, v_pages, torch.tensor([5, slot], dtype=torch.int32)
            )
    assert k_pages.count_nonzero() == 0


@pytest.mark.parametrize(
    "pair, name",
    [((1, 0), "row_request"), ((-1, 0), "row_request"), ((0, 48), "row_position"), ((0, 33), "block_tables")],
)
def test_a_row_that_points_nowhere_is_refused(backend, random, make_pages, pair, name):
    k_pages, v_pages, tables, _ = make_pages([20], 1, 16)
    with pytest.raises(ValueError, match=name):
        ops.paged_attention(random(1, 1, 16), k_pages, v_pages, tables, *rows_of(pair), 1.0)


EXTRAS = {
    "window 1": {"window": 1},
    "window 7": {"window": 7},
    "window 16": {"window": 16},
    "window 33": {"window": 33},
    "sinks": {"sinks": True},
    "soft cap": {"soft_cap": 2.0},
    "all": {"window": 20, "sinks": True, "soft_cap": 5.0},
}


def extras_of(name, random, H):
    return {key: random(H) if key == "sinks" else value for key, value in EXTRAS[name].items()}


def attended(q, k, v, position, window=None, sinks=None, soft_cap=None):
    """One row by its formula: q [H, P], k [n, G, P], v [n, G, Pv]."""
    first = 0 if window is None else max(0, position + 1 - window)
    k, v = (x[first : position + 1].repeat_interleave(len(q) // x.shape[1], dim=1).double() for x in (k, v))
    scores = torch.einsum("hp,nhp->hn", q.double(), k) * q.shape[1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].double()], dim=1)
    weights = scores.softmax(dim=-1)[:, : len(k)]
    return torch.einsum("hn,nhp->hp", weights, v).float()


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize("H, G, P, Pv", [(4, 2, 16, 16), (6, 1, 20, 12), (12, 1, 40, 32), (3, 3, 8, 33)])
def test_windows_sinks_caps_and_narrow_values_agree_with_the_reference_and_their_formula(
    backend, by_reference, random, make_pages, H, G, P, Pv, name
):
    k_pages, v_pages, tables, plain = make_pages([50, 33, 7], G, P, Pv)
    pairs = [*((0, t) for t in (14, 15, 16, 17, 47, 49)), (1, 32), (1, 3), (2, 0), (2, 6)]
    q, rows, extras = random(len(pairs), H, P), rows_of(*pairs), extras_of(name, random, H)
    out = ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5, **extras)
    assert out.shape == (len(pairs), H, Pv)
    expected = by_reference(
        lambda: ops.paged_attention(q, k_pages, v_pages, tables, *rows, P**-0.5, **extras)
    )
    torch.testing.assert_close(out, expected)
    for t, (request, position) in enumerate(pairs):
        torch.testing.assert_close(
            out[t], attended(q[t], *plain[request], position, **extras), rtol=1e-4, atol=1e-5
        )


def test_blocks_outside_the_window_are_neither_read_nor_looked_up(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([70], 2, 16)
    q, rows = random(6, 4, 16), rows_of(*((0, t) for t in range(64, 70)))
    clean = ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25, window=12)
    k_pages[tables[0, :3].long()], v_pages[tables[0, :3].long()] = torch.nan, torch.inf
    first = tables[0, 3].long()
    k_pages[first, :, :, :5], v_pages[first, :, :5] = torch.inf, torch.nan
    tables[0, :3] = -1
    assert torch.equal(ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25, window=12), clean)


def test_a_block_the_window_reaches_into_must_exist(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([70], 2, 16)
    tables[0, 2] = -1
    with pytest.raises(ValueError, match="block_tables"):
        ops.paged_attention(
            random(2, 4, 16), k_pages, v_pages, tables, *rows_of((0, 40), (0, 69)), 0.25, window=4
        )


def test_a_sink_far_above_all_scores_takes_all_weight(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([20], 1, 16)
    q, rows = random(1, 2, 16), rows_of((0, 19))
    sinks = torch.tensor([1e4, -1e4])
    out = ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25, sinks=sinks)
    assert (out[0, 0] == 0).all()
    plain = ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25)
    assert torch.equal(out[0, 1], plain[0, 1])


def test_strided_heads_and_values_that_share_memory_with_keys(backend, random):
    latent = random(3, 1, 40)
    k_pages, v_pages = torch.zeros(2, 1, 40, 16), torch.zeros(2, 1, 16, 32)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    ops.kv_write(latent, latent[..., :32], k_pages, v_pages, slots)
    assert torch.equal(v_pages[0, 0, :3], latent[:, 0, :32])
    assert torch.equal(k_pages[0, 0, :, :3].T, latent[:, 0])
    tables, wide, wide_out = (
        torch.zeros(1, 1, dtype=torch.int32),
        random(1, 6, 50),
        torch.full((1, 6, 60), 3.0),
    )
    q, out, rows = wide[..., 5:45], wide_out[..., 7:39], rows_of((0, 2))
    ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.2, out=out)
    expected = ops.paged_attention(q.contiguous(), k_pages, v_pages, tables, *rows, 0.2)
    assert torch.equal(out, expected)
    assert (wide_out[..., :7] == 3).all() and (wide_out[..., 39:] == 3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copied_blocks_equal_their_sources_and_the_others_stay(backend, dtype):
    pages = torch.arange(6 * 30).to(dtype).view(6, 2, 15)
    before = pages.clone()
    ops.kv_copy(pages, torch.tensor([4, 1], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32))
    assert torch.equal(pages[[0, 5]], before[[4, 1]]) and torch.equal(pages[1:5], before[1:5])
    ops.kv_copy(pages, torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32))
    for source, destination, name in ((6, 0, "source"), (0, -1, "destination")):
        with pytest.raises(ValueError, match=name):
            ops.kv_copy(
                pages,
                torch.tensor([source], dtype=torch.int32),
                torch.tensor([destination], dtype=torch.int32),
            )


@pytest.mark.parametrize("H, G, P, Pv", [(4, 4, 16, 16), (6, 1, 20, 12), (12, 12, 64, 64)])
@pytest.mark.parametrize("reach", [0, 3, 20, 200])
def test_a_bias_by_distance_agrees_with_the_reference_and_its_formula(
    backend, by_reference, random, make_pages, H, G, P, Pv, reach
):
    k_pages, v_pages, tables, plain = make_pages([50, 33, 7], G, P, Pv)
    # (request, last position seen, own position): all of a sequence, the past alone, or from far outside.
    places = [*((0, 49, t) for t in (0, 14, 16, 33, 49)), (1, 32, 32), (1, 3, 3), (2, 6, 0), (2, 6, 90)]
    requests, seen, own = (torch.tensor(column, dtype=torch.int32) for column in zip(*places, strict=True))
    q, bias = random(len(places), H, P), random(H, 2 * reach + 1)

    def attend():
        return ops.biased_attention(q, k_pages, v_pages, tables, requests, seen, 0.3, bias, own)

    torch.testing.assert_close(attend(), by_reference(attend))
    for t, (request, last, place) in enumerate(places):
        k, v = (x[: last + 1].repeat_interleave(H // G, dim=1).double() for x in plain[request])
        scores = torch.einsum("hp,nhp->hn", q[t].double(), k) * 0.3
        distance = (torch.arange(last + 1) - place).clamp(-reach, reach)
        weights = (scores + bias[:, distance + reach].double()).softmax(dim=-1)
        expected = torch.einsum("hn,nhp->hp", weights, v).float()
        torch.testing.assert_close(attend()[t], expected, rtol=1e-4, atol=1e-5)


def test_a_bias_of_nothing_changes_no_bit(backend, random, make_pages):
    k_pages, v_pages, tables, _ = make_pages([50, 33], 2, 16)
    q, rows = random(4, 4, 16), rows_of((0, 49), (0, 3), (1, 32), (1, 16))
    plain = ops.paged_attention(q, k_pages, v_pages, tables, *rows, 0.25)
    nothing = torch.zeros(4, 9)
    found = ops.biased_attention(q, k_pages, v_pages, tables, *rows, 0.25, nothing, rows[1])
    assert torch.equal(found, plain)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("bias", {"bias": torch.zeros(4, 8)}),
        ("bias", {"bias": torch.zeros(3, 9)}),
        ("bias", {"bias": torch.zeros(4, 9, dtype=torch.float64)}),
        ("own_position", {"own_position": torch.zeros(3, dtype=torch.int32)}),
        ("own_position", {"own_position": torch.zeros(2, dtype=torch.int64)}),
        ("row_position", {"row_position": torch.zeros(3, dtype=torch.int32)}),
    ],
)
def test_a_bias_that_does_not_fit_is_refused_by_name(backend, random, make_pages, name, changes):
    k_pages, v_pages, tables, _ = make_pages([20, 9], 2, 16)
    rows = rows_of((0, 19), (1, 8))
    given = {"q": random(2, 4, 16), "k_pages": k_pages, "v_pages": v_pages, "block_tables": tables}
    given |= {"row_request": rows[0], "row_position": rows[1], "scale": 1.0, "own_position": rows[1]}
    given |= {"bias": torch.zeros(4, 9), "out": torch.empty(2, 4, 16)}
    with pytest.raises(ValueError, match=f"^{name}: found"):
        ops.biased_attention(**(given | changes))
