"""How many bytes a packed weight takes. Pure arithmetic for planners; knows no tensor and no backend."""

LANES = 16  # outputs per panel: one AVX-512 register of float32
KV_BLOCK_TOKENS = 16  # tokens per block of keys and values
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def packed_linear_bytes(N: int, K: int, itemsize: int) -> int:
    """Bytes of a packed weight [N, K]: N up to a whole panel, K up to even, `itemsize` bytes each."""
    return -(-N // LANES) * LANES * (K + K % 2) * itemsize


def packed_expert_bytes(D: int, F: int, itemsize: int) -> int:
    """Bytes of one packed expert of width D and inner width F: gate and up [F, D] each, down [D, F]."""
    return 2 * packed_linear_bytes(F, D, itemsize) + packed_linear_bytes(D, F, itemsize)
