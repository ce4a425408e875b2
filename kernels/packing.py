"""How many bytes a packed weight takes. Pure arithmetic for planners; knows no tensor and no backend."""

LANES = 16  # outputs per panel: one AVX-512 register of float32
KV_BLOCK_TOKENS = 16  # tokens per block of keys and values
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def packed_linear_bytes(N: int, K: int, itemsize: int) -> int:
    """Bytes of a packed weight [N, K]: N up to a whole panel, K up to even, `itemsize` bytes each."""
    return -(-N // LANES) * LANES * (K + K % 2) * itemsize


def packed_expert_bytes(D: int, F: int, itemsize: int, *, gated: bool = True, biases: bool = False) -> int:
    """Bytes of one packed expert of width D and inner width F: gate (if gated) and up [F, D], down [D, F], biases float32."""
    first = 2 if gated else 1
    values = first * packed_linear_bytes(F, D, itemsize) + packed_linear_bytes(D, F, itemsize)
    bias_values = first * -(-F // LANES) * LANES + -(-D // LANES) * LANES
    return values + (4 * bias_values if biases else 0)
