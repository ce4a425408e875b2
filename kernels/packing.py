"""How many bytes a packed weight takes. Pure arithmetic for planners; knows no tensor and no backend."""

LANES = 16  # outputs per panel: one AVX-512 register of float32
KV_BLOCK_TOKENS = 16  # tokens per block of keys and values
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
BF16X2 = "bfloat16x2"  # stands in memory as bfloat16 does
GROUP = 32  # inputs that share a scale in int4 and mxfp4
GROUPS_PER_SCALES = {"int4": 2, "mxfp4": 4}  # groups whose scales fill one line of 64 bytes
FORMATS = (*ITEM_BYTES, BF16X2, "int8", *GROUPS_PER_SCALES)


def _panel_bytes(K: int, format: str | int) -> int:
    """Bytes of 16 rows of K columns: columns up to whole pairs (int8: fours, groups: 32), and the scales."""
    if format == "int8":
        return LANES * 4 + -(-K // 4) * 4 * LANES
    if format in GROUPS_PER_SCALES:
        groups = -(-K // GROUP)
        return groups * GROUP * LANES // 2 + -(-groups // GROUPS_PER_SCALES[str(format)]) * 64
    itemsize = format if isinstance(format, int) else ITEM_BYTES["bfloat16" if format == BF16X2 else format]
    return LANES * (K + K % 2) * itemsize


def packed_linear_bytes(N: int, K: int, format: str | int) -> int:
    """Bytes of a packed weight [N, K]: N up to a whole panel. `format` is one of FORMATS, or the bytes of a float."""
    return -(-N // LANES) * _panel_bytes(K, format)


def packed_expert_bytes(
    D: int, F: int, format: str | int, *, gated: bool = True, biases: bool = False
) -> int:
    """Bytes of one packed expert of width D and inner width F: gate (if gated) and up [F, D], down [D, F], biases float32."""
    first = 2 if gated else 1
    values = first * packed_linear_bytes(F, D, format) + packed_linear_bytes(D, F, format)
    bias_values = first * -(-F // LANES) * LANES + -(-D // LANES) * LANES
    return values + (4 * bias_values if biases else 0)
