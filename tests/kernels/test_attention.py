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
