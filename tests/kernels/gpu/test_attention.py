"""paged_attention: decode by pieces and prompts by tiles, every option, and what must not be read."""

import pytest
import torch

from kernels import gpu, ops
from kernels.gpu import plain
from tests.support.gpu import make_pages

INT = torch.int32
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
