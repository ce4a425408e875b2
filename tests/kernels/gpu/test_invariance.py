"""A row's bits do not depend on the rows beside it, on every path that decodes: each alone against random batches."""

import pytest
import torch

from kernels import gpu
from tests.support.gpu import make_bank, make_pages

BATCHES = (2, 7, 17, 40)  # one tile, several, and the larger tiles of more than 16 rows
ROWS = (0, 33)


def batches_around(row, random):
    """Index tensors into 70 rows that hold the row at some place."""
    for size in BATCHES:
        others = random.integers(70, (size,)).long()
        others[int(random.integers(size, (1,)))] = row
        yield others


def assert_same(batch, row, found, alone):
    for place in (batch == row).nonzero().flatten().tolist():
        assert torch.equal(found[place], alone), f"row {row} among {len(batch)}"


@pytest.mark.parametrize("format", ["bfloat16", "float32", "int8", "int4", "mxfp4"])
def test_a_dense_row(random, format):
    x, w = random(70, 200), gpu.pack_linear(random(40, 200), format=format)
    for row in ROWS:
        alone = gpu.linear(x[row : row + 1], w)[0]
        for batch in batches_around(row, random):
            assert_same(batch, row, gpu.linear(x[batch], w), alone)


@pytest.mark.parametrize("format", ["bfloat16", "int4"])
def test_an_expert_row(random, device, format):
    bank = make_bank(random, device, range(3), 3, 144, 72, format=format)
    x = random(70, 144)
    for row in ROWS[1:]:
        alone = gpu.grouped_ffn(
            x, *(torch.tensor([i], dtype=torch.int32, device=device) for i in (row, 1)), bank
        )[0]
        for batch in batches_around(row, random):
            ids = random.integers(3, (len(batch),))
            ids[batch == row] = 1
            assert_same(batch, row, gpu.grouped_ffn(x, batch.int(), ids, bank), alone)


def test_an_attention_row(random, device):
    lengths = [300, 5, 33]
    k_pages, v_pages, tables = make_pages(random, device, lengths, 2, 32, 32)
    where = torch.tensor(
        [(r, p) for r, n in enumerate(lengths) for p in range(n)], dtype=torch.int32, device=device
    )
    where = where[random(len(where)).argsort()[:70]]
    q, options = random(70, 4, 32), {"window": 200, "sinks": random(4)}
    for row in ROWS:

        def attend(batch):
            request, position = where[batch].T.contiguous()
            return gpu.paged_attention(q[batch], k_pages, v_pages, tables, request, position, 0.2, **options)

        alone = attend(torch.tensor([row], device=device))[0]
        for batch in list(batches_around(row, random))[:2]:
            assert_same(batch, row, attend(batch), alone)


def test_rows_of_a_prompt_share_tiles_and_keep_their_bits(random, device):
    """Whatever rows of the request run in the step, and whoever stands between them."""
    k_pages, v_pages, tables = make_pages(random, device, [290, 40], 1, 16, 16)
    where = [(0, p) for p in range(250, 290)] + [(1, p) for p in range(40)]
    where = torch.tensor(where, dtype=torch.int32, device=device)
    q, options = random(80, 4, 16), {"window": 45, "sinks": random(4)}

    def attend(batch):
        request, position = where[batch].T.contiguous()
        return gpu.paged_attention(q[batch], k_pages, v_pages, tables, request, position, 0.2, **options)

    whole = attend(torch.arange(80, device=device))
    for batch in ([3], [0, 1, 2, 3, 4], [79, 5, 6, 7, 41, 42, 8], list(range(7, 20))):
        assert torch.equal(attend(torch.tensor(batch, device=device)), whole[batch])


def test_a_prompt_row_does_not_depend_on_its_tile(random, device):
    k_pages, v_pages, tables = make_pages(random, device, [120], 1, 32, 32)
    q = random(120, 2, 32)

    def attend(begin, end):
        positions = list(range(begin, end))
        plan = gpu.attention_plan([0] * len(positions), positions, device, prompt_rows=16)
        at = torch.tensor(positions, dtype=torch.int32, device=device)
        return gpu.paged_attention(
            q[begin:end], k_pages, v_pages, tables, torch.zeros_like(at), at, 0.2, plan=plan, window=50
        )

    whole = attend(0, 120)
    for begin, end in ((0, 64), (3, 40), (77, 120), (100, 102)):
        assert torch.equal(attend(begin, end), whole[begin:end])


@pytest.mark.parametrize("T", [1, 3, 9])
def test_rows_that_are_only_read(random, device, T):
    x, weight, logits = random(9, 300), random(300), random(9, 33)
    assert torch.equal(gpu.rms_norm(x[:T], weight, 1e-6), gpu.rms_norm(x, weight, 1e-6)[:T])
    some, every = (gpu.gate_topk(logits[:n], 4, renormalise=True) for n in (T, 9))
    assert torch.equal(some[0], every[0][:T]) and torch.equal(some[1], every[1][:T])
    expert_out, slots, weights = random(20, 300), random.integers(20, (9, 2)), random(9, 2)
    together = x.clone()
    gpu.combine(expert_out, slots, weights, together)
    gpu.combine(expert_out, slots[:T], weights[:T], x[:T])
    assert torch.equal(x[:T], together[:T])
