"""The table of counts beside the blocks."""

import numpy as np
import pytest
import torch

from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.errors import ConfigError
from kernels import ops
from kernels.ops import Counting


def choose(cache: SignatureCache, layer: int, logits: torch.Tensor, slots: list[int]) -> None:
    """The gate of one layer, counting every row."""
    slots_of = torch.tensor(slots, dtype=torch.int32)
    counted = cache.begin_step(len(slots), [])
    ops.gate_topk(logits, 2, renormalise=True, counting=Counting(cache.counts[:, layer], slots_of, counted))


def test_the_gate_counts_into_blocks_and_a_block_that_begins_anew_forgets():
    cache = SignatureCache(4, 2, 8, max_rows=16)
    logits = torch.zeros(3, 8)
    logits[:, 3], logits[:, 5] = 2.0, 1.0
    choose(cache, 1, logits, [32, 33, 34])
    assert cache.total([2]).tolist() == [[0] * 8, [0, 0, 0, 3, 0, 3, 0, 0]]
    choose(cache, 1, logits, [35, 0, 1])
    assert cache.total([2, 0])[1].tolist() == [0, 0, 0, 6, 0, 6, 0, 0]
    choose(cache, 1, logits[:1], [32])  # evicted and reused
    assert cache.total([2])[1].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]


def test_a_step_that_is_computed_again_replaces_what_it_counted_and_the_next_one_adds():
    cache = SignatureCache(3, 1, 4, max_rows=8)
    cache.counts[1, 0] = torch.tensor([1, 2, 3, 4], dtype=torch.int8)
    for _ in range(3):
        cache.begin_step(1, [([1], 5, 1)])
        cache.counts[1, 0, 2] += 1
        assert cache.total([1]).tolist() == [[1, 2, 4, 4]]
    cache.begin_step(1, [([1], 6, 1)])
    cache.counts[1, 0, 0] += 1
    assert cache.total([1]).tolist() == [[2, 2, 4, 4]]


def test_a_block_that_begins_anew_knows_nothing_of_its_last_owner():
    cache = SignatureCache(3, 1, 4, max_rows=8)
    cache.begin_step(1, [([1], 5, 1)])
    cache.counts[1] = 1  # of the last owner
    cache.begin_step(5, [([0, 1], 0, 21)])
    cache.counts[1, 0] = torch.tensor([5, 0, 0, 0], dtype=torch.int8)
    cache.begin_step(1, [([0, 1], 21, 1)])
    assert cache.total([1]).tolist() == [[5, 0, 0, 0]]


def test_counts_go_along_when_a_block_is_copied_or_handed_on():
    source, target = SignatureCache(3, 2, 4, max_rows=8), SignatureCache(5, 2, 4, max_rows=8)
    source.counts.copy_(torch.arange(24).view(3, 2, 4))
    source.copy(1, 2)
    assert (source.counts[2] == source.counts[1]).all()
    target.write([4, 0], source.read([1, 0]))
    assert (target.total([4, 0]) == source.total([1, 0])).all()


def test_sums_pass_what_a_byte_holds():
    cache = SignatureCache(100, 1, 2, max_rows=8)
    cache.counts.fill_(16)
    found = cache.total(range(100))
    assert found.dtype == np.int16 and found.tolist() == [[1600, 1600]]


@pytest.mark.parametrize("block_tokens", [0, 128, 256])
def test_blocks_whose_counts_would_not_fit_are_refused(block_tokens):
    with pytest.raises(ConfigError, match=f"KV blocks have {block_tokens} tokens"):
        SignatureCache(4, 2, 8, max_rows=8, block_tokens=block_tokens)


def test_of_a_prompt_that_no_int16_counts_the_first_tokens_are_counted():
    cache = SignatureCache(2, 1, 2, max_rows=8)
    cache.counts[0], cache.counts[1] = 16, 5
    found = cache.total([0] * 2047 + [1] * 500)
    assert found.dtype == np.int16 and found.tolist() == [[32752, 32752]]
