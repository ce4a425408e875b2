"""Which chip runs, what it can hold, and the tile sizes for it. Knows sizes and chips, no kernel.

No size here has been measured: no GPU was at hand. Each was chosen from the arithmetic beside it and from what the
compiler says about registers and shared memory (the table in kernels/README.md). `python -m testbed.gpu_check` prints
the times that are missing.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
VERSION = tuple(int(number) for number in triton.__version__.split(".")[:2])
SHARED_BYTES = {
    # What one program may hold. sm_89 stands for its consumer relatives (sm_86, sm_120) too.
    "sm_80": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}
TARGETS = tuple(SHARED_BYTES)
AMPERE_AND_ADA = ("sm_80", "sm_89")

# Formats whose codes are two to a byte, and how many columns one block of 32 such bytes covers.
NIBBLE_FORMATS = ("int4", "mxfp4")
NIBBLE_BLOCK = 64


class Tile(NamedTuple):
    """One program of a matrix product: rows x outputs x columns of a step, and how it is compiled."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# Columns that one product of two tiles sums, for few rows and for more: the same, so that a row's sum is formed in the
# same steps whatever tile it is in. 128 columns are 256 bytes of every bfloat16 weight row, two full lines.
STEP = 128

# Few rows: weights stream once, so what counts is programs (one for each multiprocessor at least) and bytes in flight
# (about 20 KB each at 4 TB/s and 0.7 us). Dense: outputs of a program by the weight's N, so that N = 2048 is 128 programs;
# 16 x 128 columns x 2 bytes x 6 stages are 24 KB in flight. Experts: several at once, so 32 outputs each.
FEW_BY_OUTPUTS = (
    (4096, Tile(16, 16, STEP, 2, 6)),
    (16384, Tile(16, 32, STEP, 4, 4)),
    (1 << 31, Tile(16, 64, STEP, 4, 4)),
)
FEW_EXPERTS = Tile(16, 32, STEP, 4, 4)

# More rows, same bits as few: on sm_80 and sm_89 there is one matrix instruction (m16n8k16) whatever the tile, so the
# tile may be large. From sm_90 on 64 rows and 4 warps would switch to wgmma or tcgen05, which sum in another order, so
# rows stay at 32. gfx942: 16 x 16 instructions everywhere (see INSTRUCTION).
MORE = {
    "sm_80": Tile(64, 64, STEP, 4, 3),
    "sm_89": Tile(64, 64, STEP, 4, 2),
    "sm_90": Tile(32, 128, STEP, 4, 3),
    "sm_100": Tile(32, 128, STEP, 4, 3),
    "gfx942": Tile(64, 64, STEP, 4, 2),
}

# A prompt by itself, bits of its own: 2 x 128 x 128 products per (128 + 128) x 64 values read; wgmma and tcgen05 from
# sm_90 on. 8 warps hold two 128 x 128 accumulators (gate and up) in 128 registers of each thread.
PROMPT = {
    "sm_80": Tile(128, 64, 64, 8, 3),
    "sm_89": Tile(128, 64, 32, 8, 3),
    "sm_90": Tile(128, 128, 64, 8, 3),
    "sm_100": Tile(128, 128, 64, 8, 3),
    "gfx942": Tile(128, 64, 32, 8, 2),
}

# HIP only: one size of matrix instruction for every tile, so that rows do not depend on the tile they are in.
INSTRUCTION = {"matrix_instr_nonkdim": 16}

# Tokens that one program of decode attention reads. Constant: a row's splits depend on its position alone. 256 gives a
# single stream at 4096 tokens and 8 kv heads 128 programs, about one per multiprocessor.
SPLIT_TOKENS = 256


@functools.cache
def _chip(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return "gfx942"
    major, minor = properties.major, properties.minor
    if major == 8:
        return "sm_80" if minor in (0, 7) else "sm_89"
    return {9: "sm_90", 10: "sm_100", 11: "sm_100"}.get(major, "sm_89")


def target(device: torch.device) -> str:
    """The chip whose tiles serve tensors of this device; the interpreter takes those of sm_80."""
    if INTERPRETED or device.type == "cpu":
        return "sm_80"
    return _chip(device.index if device.index is not None else torch.cuda.current_device())


def product_tile(
    chip: str, M: int, N: int, K: int, format: str, *, experts: bool, pair: bool = False, prompt: bool = False
) -> Tile:
    """The tile for M rows of one weight [N, K]: few, more, or a prompt's; `pair` sums gate and up side by side.

    Only `prompt` changes bits; M does not.
    """
    if prompt:
        tile = PROMPT[chip]
        if format in NIBBLE_FORMATS and (pair or (chip in AMPERE_AND_ADA and VERSION < (3, 8))):
            # Unpacking takes registers too: 128 x 64 x 2 spilled, and before triton 3.8 128 x 64 as well.
            tile = tile._replace(BLOCK_N=tile.BLOCK_N // 2)
    elif M > 16:
        tile = MORE[chip]
        if pair:
            tile = tile._replace(BLOCK_N=tile.BLOCK_N // 2)
            if chip == "sm_89" and VERSION == (3, 8):
                tile = tile._replace(BLOCK_M=32)  # that compiler alone spilled 64 x 32 x 2
    elif experts:
        tile = FEW_EXPERTS
    else:
        tile = next(tile for limit, tile in FEW_BY_OUTPUTS if limit >= N)
    if chip == "gfx942":
        tile = tile._replace(num_stages=2)
    if format in NIBBLE_FORMATS:
        # Whole blocks of codes, several to a step so that enough bytes are in flight; as many as divide the columns.
        blocks, most = -(-K // NIBBLE_BLOCK), 4 if M <= 16 and not prompt else 1
        tile = tile._replace(BLOCK_K=NIBBLE_BLOCK * max(n for n in range(1, most + 1) if blocks % n == 0))
        if chip == "sm_80" and not prompt:
            tile = tile._replace(BLOCK_M=min(tile.BLOCK_M, 32))  # 64 rows of float32 spilled beside the codes
    elif format == "float32":
        # Twice the bytes, and no matrix instruction keeps all of float32: plain multiply-adds, small tiles.
        tile = tile._replace(BLOCK_M=min(tile.BLOCK_M, 32), BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)
    return tile


def launch_options(chip: str, num_warps: int, num_stages: int) -> dict[str, int]:
    """Keyword arguments of a launch that multiplies matrices."""
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return options | INSTRUCTION if chip.startswith("gfx") and not INTERPRETED else options


def operand_dtype(dtype: torch.dtype) -> tl.dtype:
    """What both sides of a product are rounded to. The interpreter holds bfloat16 wrongly, so it gets float32."""
    if INTERPRETED:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


class AttentionTile(NamedTuple):
    """One program of attention: rows times heads, and positions of a step."""

    BLOCK_M: int
    TILE_HEADS: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


# Bytes of keys and values that a program may hold in flight: what a chip has, less q, scores and a margin.
ATTENTION_BYTES = {
    "sm_80": 96 << 10,
    "sm_89": 64 << 10,
    "sm_90": 128 << 10,
    "sm_100": 128 << 10,
    "gfx942": 32 << 10,
}


def attention_tile(chip: str, heads: int, P: int, Pv: int, itemsize: int, *, prompt: bool) -> AttentionTile:
    """The tile for `heads` query heads per kv head. Never depends on how many rows there are.

    Decode: 16 rows of a matrix instruction are 16 heads of one position; 64 positions of 128 + 128 columns are 32 KB a
    step. A prompt: 64 rows (128 from sm_90 on, where wgmma wants them), so that keys are read once for all of them.
    Wide heads (latent attention: 576 + 512) take fewer positions, as many as fit two steps in flight, and 8 warps,
    since a tile of 16 x 512 sums is 64 registers of each thread at 4.
    """
    TILE_HEADS = min(16, triton.next_power_of_2(heads))
    wide = max(P, Pv) > 256
    BLOCK_M = 16
    if prompt:
        BLOCK_M = max(TILE_HEADS, 32 if wide else 128 if chip in ("sm_90", "sm_100") and P <= 128 else 64)
    buffers = 1 if chip == "gfx942" else 2
    BLOCK_N = 64
    while BLOCK_N > 16 and BLOCK_N * (P + Pv) * itemsize * buffers > ATTENTION_BYTES[chip]:
        BLOCK_N //= 2
    # Decode reads keys where a table says that was itself just read: one stage more, for the table.
    num_stages = 1 if chip == "gfx942" else 2 if prompt else 3
    if wide and not prompt and chip in AMPERE_AND_ADA and VERSION < (3, 8):
        num_stages = 1 if chip == "sm_89" else 2  # older compilers spilled what more stages hold
    num_warps = 8 if wide or BLOCK_M == 128 or (prompt and max(P, Pv) > 128) else 4
    return AttentionTile(BLOCK_M, TILE_HEADS, BLOCK_N, num_warps, num_stages)
