"""paged_attention and biased_attention: by pieces, prompts by tiles, every option, and what must not be read."""

import importlib

import pytest
import torch

from kernels import gpu, ops
from kernels.gpu import plain
from tests.support.gpu import make_pages

INT = torch.int32
paged = importlib.import_module("kernels.gpu.paged_attention")  # the function has its name in the package
LENGTHS = [90, 5, 300]  # inside a piece of 256, inside a block, across pieces
OPTIONS = [
    (4, 2, 32, 32, {}, False),
    (6, 1, 20, 16, {"window": 17}, False),  # six heads to a kv head, odd widths
    (3, 3, 16, 16, {"soft_cap": 5.0}, False),  # one head each
    (4, 2, 64, 64, {"sinks": True}, False),
    (16, 1, 80, 64, {}, True),  # latent: values are the first columns of the keys
    (20, 1, 48, 32, {}, True),  # more heads than one tile of heads
    (3, 1, 24, 24, {"window": 40, "sinks": True, "soft_cap": 3.0}, False),
    (2, 2, 16, 16, {"window": 270}, False),  # a window that begins in another piece
]


def rows_of(chosen, device):
    """Request and position lists, and tensors, of (request, positions) pairs."""
    request = [r for r, positions in chosen for _ in positions]
    position = [p for _, positions in chosen for p in positions]
    return request, position, *(torch.tensor(x, dtype=INT, device=device) for x in (request, position))


@pytest.mark.parametrize("H, G, P, Pv, options, shared", OPTIONS)
def test_decode_and_prompt_rows_attend_to_what_they_may_see(
    random, close, device, H, G, P, Pv, options, shared
):
    k_pages, v_pages, tables = make_pages(random, device, LENGTHS, G, P, Pv, shared=shared)
    options = options | ({"sinks": random(H)} if "sinks" in options else {})
    request, position, requests, positions = rows_of(
        [(0, [89]), (1, range(5)), (2, [299, 256]), (0, range(40, 77)), (2, [0])], device
    )
    q = random(len(request), H, P)
    expected = plain.paged_attention(q, k_pages, v_pages, tables, requests, positions, P**-0.5, **options)

    some = [0, 3, 6, 7, len(request) - 1]
    found = gpu.paged_attention(
        q[some], k_pages, v_pages, tables, requests[some], positions[some], P**-0.5, **options
    )
    close(found, expected[some])

    plan = gpu.attention_plan(request, position, device, prompt_rows=16)
    assert len(plan.prompt) == 1 + 3 and len(plan.decode) == 4
    found = gpu.paged_attention(
        q, k_pages, v_pages, tables, requests, positions, P**-0.5, plan=plan, **options
    )
    close(found, expected)


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"sinks": True}, {"soft_cap": 2.0}])
def test_attention_is_the_references(random, close, reference, device, options):
    k_pages, v_pages, tables = make_pages(random, device, [40, 3], 2, 16, 20)
    k_pages, v_pages = k_pages.nan_to_num(), v_pages.nan_to_num()
    _, _, requests, positions = rows_of([(0, [39, 10]), (1, [2])], device)
    q = random(3, 4, 16)
    options = options | ({"sinks": random(4)} if "sinks" in options else {})
    expected = ops.paged_attention(
        q.cpu(),
        k_pages.transpose(2, 3).contiguous().cpu(),  # there tokens are the lanes of keys
        v_pages.cpu(),
        tables.cpu(),
        requests.cpu(),
        positions.cpu(),
        0.25,
        **{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()},
    )
    found = gpu.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25, **options)
    close(found.cpu(), expected)
    truth = plain.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25, **options)
    close(truth.cpu(), expected)


@pytest.mark.parametrize("H, G, P, Pv, most", [(4, 2, 16, 20, 5), (3, 3, 24, 24, 40), (20, 1, 16, 16, 300)])
def test_biased_attention_adds_what_the_distance_says(random, close, device, H, G, P, Pv, most):
    """Rows of an encoder see what is behind them too, and rows of a decoder what is before all of it."""
    k_pages, v_pages, tables = make_pages(random, device, [300, 20, 7], G, P, Pv)
    _, own, requests, owns = rows_of([(1, range(20)), (0, [299, 3]), (2, [6, 0, 2])], device)
    last = [19] * 20 + [299, 270, 6, 6, 4]
    lasts, bias = torch.tensor(last, dtype=INT, device=device), random(H, 2 * most + 1)
    q = random(len(own), H, P)
    rows = tables, requests, lasts, 0.3
    expected = plain.paged_attention(q, k_pages, v_pages, *rows, bias=bias, own_position=owns)
    found = gpu.biased_attention(q, k_pages, v_pages, *rows, bias, owns)
    close(found, expected)
    for t in (0, 7, 20, 24):
        alone = gpu.biased_attention(
            q[t : t + 1], k_pages, v_pages, tables, requests[t : t + 1], lasts[t : t + 1], 0.3, bias,
            owns[t : t + 1],
        )  # fmt: skip
        assert torch.equal(alone[0], found[t])


def test_biased_attention_is_the_references(random, close, reference, device):
    k_pages, v_pages, tables = make_pages(random, device, [40, 3], 2, 16, 20)
    _, _, requests, positions = rows_of([(0, [39, 10]), (1, [2])], device)
    own = torch.tensor([12, 10, 9], dtype=INT, device=device)
    q, bias = random(3, 4, 16), random(4, 13)
    host = (x.cpu() for x in (tables, requests, positions))
    keys = k_pages.nan_to_num().transpose(2, 3).contiguous().cpu()  # there tokens are the lanes of keys
    values = v_pages.nan_to_num().cpu()
    expected = ops.biased_attention(q.cpu(), keys, values, *host, 0.25, bias.cpu(), own.cpu())
    found = gpu.biased_attention(q, k_pages, v_pages, tables, requests, positions, 0.25, bias, own)
    close(found.cpu(), expected)


def test_more_rows_than_the_pieces_of_one_launch_have_room_for(random, device, monkeypatch):
    k_pages, v_pages, tables = make_pages(random, device, [60, 9], 1, 16, 16)
    _, _, requests, positions = rows_of([(0, range(60)), (1, range(9))], device)
    q = random(69, 2, 16)
    rows = tables, requests, positions, 0.25
    at_once = gpu.paged_attention(q, k_pages, v_pages, *rows)
    monkeypatch.setattr(paged, "PART_VALUES", 16 * 2 * 16 * 2)
    assert torch.equal(gpu.paged_attention(q, k_pages, v_pages, *rows), at_once)


def test_heads_of_the_result_may_be_strided(random, close, device):
    k_pages, v_pages, tables = make_pages(random, device, [20], 2, 16, 16)
    _, _, requests, positions = rows_of([(0, [19, 3])], device)
    q, wide = random(2, 4, 16), torch.zeros(2, 4, 24, device=device)
    expected = gpu.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25)
    gpu.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25, out=wide[..., :16])
    assert torch.equal(wide[..., :16], expected) and not wide[..., 16:].any()


def test_a_row_that_sees_only_its_sink_and_itself(random, close, device):
    k_pages, v_pages, tables = make_pages(random, device, [1], 1, 16, 16)
    _, _, requests, positions = rows_of([(0, [0])], device)
    q, sinks = random(1, 1, 16), torch.tensor([50.0], device=device)
    found = gpu.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25, sinks=sinks)
    assert found.abs().max() < 1e-6  # the sink takes all
    found = gpu.paged_attention(q, k_pages, v_pages, tables, requests, positions, 0.25)
    close(found[0], v_pages[tables[0, 0].long(), 0, :1])


def test_a_wider_table_changes_no_bit(random, device):
    k_pages, v_pages, tables = make_pages(random, device, [70], 2, 16, 16)
    _, _, requests, positions = rows_of([(0, [69, 3])], device)
    q = random(2, 4, 16)
    wide = torch.cat((tables, torch.full((1, 60), 10**6, dtype=INT, device=device)), dim=1)
    narrow, broad = (
        gpu.paged_attention(q, k_pages, v_pages, table, requests, positions, 0.25) for table in (tables, wide)
    )
    assert torch.equal(narrow, broad)


def test_a_plan_tells_single_rows_from_runs():
    plan = gpu.attention_plan([3, 0, 0, 0, 0, 0, 1, 1], [9, 4, 5, 6, 7, 8, 2, 4], "cpu", prompt_rows=2)
    assert plan.decode.tolist() == [[0, 1], [6, 1], [7, 1]]
    assert plan.prompt.tolist() == [[1, 2], [3, 2], [5, 1]]
