"""Small stores of KV blocks, empty or filled with random numbers, for tests."""

import torch

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.cache.block_store import BlockStore
from edge_runtime.cache.pages import KVPages
from edge_runtime.cache.signatures import SignatureCache
from edge_runtime.model.spec import KVShape

NAMES = [bytes([i]) * 16 for i in range(8)]
SHAPES = {0: KVShape(2, 4, 4), 1: KVShape(1, 8, 6), 2: KVShape(1, 8, 6, shared_with=1)}


def store(num_blocks: int = 6, *, counts: bool = True) -> BlockStore:
    signatures = SignatureCache(num_blocks, 2, 5, max_rows=8) if counts else None
    return BlockStore(BlockPool(num_blocks), KVPages(num_blocks, SHAPES), signatures)


def filled(names: list[bytes], seed: int = 0, **options: object) -> BlockStore:
    """A store whose cache holds these, each of other numbers."""
    found = store(**options)
    generator = torch.Generator().manual_seed(seed)
    blocks = found.pool.allocate(len(names))
    for page in found.pages._own:
        page[blocks] = torch.randn(len(names), *page.shape[1:], generator=generator)
    if found.signatures is not None:
        found.signatures.counts[blocks] = torch.randint(0, 16, (len(names), 2, 5), generator=generator).to(
            torch.int8
        )
    for name, block in zip(names, blocks, strict=True):
        found.pool.register(block, name)
    found.pool.release(blocks)
    return found
