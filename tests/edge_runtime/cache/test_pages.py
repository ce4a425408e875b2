"""The memory of the blocks: shapes, bytes, and that it is really there."""

import sys

import psutil
import pytest
import torch

from edge_runtime.cache.pages import KVPages, kv_bytes_per_block
from edge_runtime.model.spec import KVShape

SMALL = KVShape(num_heads=1, key_width=4, value_width=4)


def test_pages_have_the_kernels_layout():
    pages = KVPages(5, {3: KVShape(2, 8, 8), 4: KVShape(2, 8, 8)})
    for layer in (3, 4):
        assert pages.k(layer).shape == (5, 2, 8, 16) and pages.v(layer).shape == (5, 2, 16, 8)
        assert pages.k(layer).is_contiguous() and pages.v(layer).is_contiguous()
        assert pages.k(layer).dtype == pages.v(layer).dtype == torch.float32
        assert not pages.k(layer).any() and not pages.v(layer).any()


def test_layers_may_differ_in_heads_and_in_the_widths_of_keys_and_values():
    pages = KVPages(3, {0: KVShape(2, 8, 8), 1: KVShape(1, 20, 16)})
    assert pages.k(0).shape == (3, 2, 8, 16) and pages.v(0).shape == (3, 2, 16, 8)
    assert pages.k(1).shape == (3, 1, 20, 16) and pages.v(1).shape == (3, 1, 16, 16)
    assert pages.nbytes == sum(page(layer).nbytes for layer in (0, 1) for page in (pages.k, pages.v))


def test_layers_do_not_share_memory_unless_they_are_to():
    pages = KVPages(2, {0: SMALL, 1: SMALL, 2: SMALL._replace(shared_with=0)})
    pages.k(0).fill_(1)
    pages.v(1).fill_(1)
    assert not pages.k(1).any() and not pages.v(0).any()
    assert pages.k(2).data_ptr() == pages.k(0).data_ptr()
    assert pages.nbytes == KVPages(2, {0: SMALL, 1: SMALL}).nbytes


def test_a_layer_whose_keys_are_in_another_stage_is_refused():
    with pytest.raises(
        ValueError, match=r"layer 4 uses keys and values of layer 2, .*a stage must hold both"
    ):
        KVPages(2, {3: SMALL, 4: SMALL._replace(shared_with=2)})


def test_a_layer_of_another_stage_is_refused():
    pages = KVPages(2, {3: SMALL, 4: SMALL})
    for layer in (2, 5, -1):
        with pytest.raises(IndexError, match=rf"layer {layer} is not in \[3, 5\)"):
            pages.k(layer)


def test_bytes_are_counted_as_planned():
    shapes = dict.fromkeys(range(6), KVShape(2, 32, 32))
    assert KVPages(7, shapes).nbytes == 7 * kv_bytes_per_block(shapes) == 7 * 2 * 6 * 2 * 32 * 16 * 4


def test_all_memory_is_resident_at_once():
    before = psutil.Process().memory_info().rss
    pages = KVPages(1024, dict.fromkeys(range(8), KVShape(2, 32, 32)))
    assert psutil.Process().memory_info().rss - before > 0.9 * pages.nbytes


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems are told nothing of memory that is not wanted"
)
def test_pages_that_follow_others_take_memory_when_those_have_given_theirs_back():
    process, shapes = psutil.Process(), dict.fromkeys(range(8), KVShape(2, 32, 32))
    old = KVPages(1024, shapes)
    block = old.read([5])
    with_one = process.memory_info().rss
    new = KVPages(1024, shapes, touched=False)
    assert process.memory_info().rss - with_one < 0.1 * new.nbytes
    old.give_back()
    new.touch()
    assert abs(process.memory_info().rss - with_one) < 0.1 * new.nbytes
    new.write([5], block + 1)
    new.touch()
    assert torch.equal(new.read([5]), block + 1), "touched once"
    assert not old.read([5]).any(), "who still reads reads nothing"


def test_nothing_to_hold_is_refused():
    with pytest.raises(ValueError, match="no pages for 0 blocks of 1 layers"):
        KVPages(0, {0: SMALL})
    with pytest.raises(ValueError, match="no pages for 1 blocks of 0 layers"):
        KVPages(1, {})
