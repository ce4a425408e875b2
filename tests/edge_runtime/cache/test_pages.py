"""The memory of the blocks: shapes, bytes, and that it is really there."""

import psutil
import pytest
import torch

from edge_runtime.cache.pages import KVPages, kv_bytes_per_block


def test_pages_have_the_kernels_layout():
    pages = KVPages(5, num_kv_heads=2, head_width=8, first_layer=3, last_layer=5)
    for layer in (3, 4):
        assert pages.k(layer).shape == (5, 2, 8, 16) and pages.v(layer).shape == (5, 2, 16, 8)
        assert pages.k(layer).is_contiguous() and pages.v(layer).is_contiguous()
        assert pages.k(layer).dtype == pages.v(layer).dtype == torch.float32
        assert not pages.k(layer).any() and not pages.v(layer).any()


def test_layers_do_not_share_memory():
    pages = KVPages(2, num_kv_heads=1, head_width=4, first_layer=0, last_layer=2)
    pages.k(0).fill_(1)
    pages.v(1).fill_(1)
    assert not pages.k(1).any() and not pages.v(0).any()


def test_a_layer_of_another_stage_is_refused():
    pages = KVPages(2, num_kv_heads=1, head_width=4, first_layer=3, last_layer=5)
    for layer in (2, 5, -1):
        with pytest.raises(IndexError, match=rf"layer {layer} is not in \[3, 5\)"):
            pages.k(layer)


def test_bytes_are_counted_as_planned():
    pages = KVPages(7, num_kv_heads=2, head_width=32, first_layer=0, last_layer=6)
    assert pages.nbytes == 7 * kv_bytes_per_block(6, 2, 32) == 7 * 2 * 6 * 2 * 32 * 16 * 4


def test_all_memory_is_resident_at_once():
    before = psutil.Process().memory_info().rss
    pages = KVPages(1024, num_kv_heads=2, head_width=32, first_layer=0, last_layer=8)
    assert psutil.Process().memory_info().rss - before > 0.9 * pages.nbytes


def test_nothing_to_hold_is_refused():
    with pytest.raises(ValueError, match=r"no pages for 0 blocks of layers \[0, 1\)"):
        KVPages(0, num_kv_heads=1, head_width=4, first_layer=0, last_layer=1)
    with pytest.raises(ValueError, match=r"layers \[2, 2\)"):
        KVPages(1, num_kv_heads=1, head_width=4, first_layer=2, last_layer=2)
