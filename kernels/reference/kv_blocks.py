"""kv_blocks: keys and values of one layer in blocks of 16 tokens."""

from torch import Tensor


def kv_write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Write each row's keys and values to its slot.

    k, v     [T, G, P]               float32; rows may be strided, heads are dense
    k_pages  [num_blocks, G, P, 16]  float32, tokens are the lanes, so that scores are chains over p
    v_pages  [num_blocks, G, 16, P]  float32
    slots    [T]                     int32, block * 16 + offset; outside the pages: ValueError
    """
    num_slots = len(k_pages) * 16
    for t, slot in enumerate(slots.tolist()):
        if not 0 <= slot < num_slots:
            raise ValueError(f"slots: entry {t} is {slot}, expected 0 to {num_slots - 1}")
    for t, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, 16)
        k_pages[block, :, :, offset] = k[t]
        v_pages[block, :, offset, :] = v[t]
