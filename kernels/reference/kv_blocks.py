"""kv_blocks: keys and values of one layer in blocks of 16 tokens."""

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write each row's keys and values to its slot.

    k        [T, G, P]                float32; rows and heads may be strided
    v        [T, G, Pv]               float32, likewise; may share memory with k
    k_pages  [num_blocks, G, P, 16]   float32, tokens are the lanes, so that scores are chains over p
    v_pages  [num_blocks, G, 16, Pv]  float32
    slots    [T]                      int32, block * 16 + offset; outside the pages: ValueError
    """
    num_slots = len(k_pages) * 16
    for t, slot in enumerate(slots.tolist()):
        if not 0 <= slot < num_slots:
            raise ValueError(f"slots: entry {t} is {slot}, expected 0 to {num_slots - 1}")
    for t, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 16)
        k_pages[block, :, :, offset] = k[t]
        v_pages[block, :, offset, :] = v[t]


def kv_copy(pages: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy whole blocks of a cache: keys, values or counts.

    pages        [num_blocks, ...]  any dtype, dense
    source       [n]                int32; outside the pages: ValueError
    destination  [n]                int32, likewise; no block is in both lists
    """
    for name, blocks in (("source", source), ("destination", destination)):
        for i, block in enumerate(blocks.tolist()):
            if not 0 <= block < len(pages):
                raise ValueError(f"{name}: entry {i} is {block}, expected 0 to {len(pages) - 1}")
    pages[destination.long()] = pages[source.long()]
