"""Weights to codes and back: int8 by output, int4 by groups, MXFP4. Torch calls at load, on any device; one copy at a time.

Knows one weight [N, K]; nothing of tiles but the order in which two codes share a byte.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gpu.tiles import NIBBLE_BLOCK, NIBBLE_FORMATS
from kernels.reference import int4
from kernels.reference.formats import Weight, encode
from kernels.reference.mxfp4 import E2M1

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = (*FLOATS, "int8", *NIBBLE_FORMATS)
GROUP = 32
SCALE_DTYPE = {"int8": torch.float32, "int4": torch.float16, "mxfp4": torch.uint8}


class Codes(NamedTuple):
    """A packed weight. `values`: floats or int8 [N, K], or uint8 [ceil(K / 64), N, 32]; `scales`: None, [N] or [K / 32, N]."""

    values: Tensor
    scales: Tensor | None


def padded(K: int) -> int:
    """Columns of K that nibble formats store."""
    return -(-K // NIBBLE_BLOCK) * NIBBLE_BLOCK


def section_shapes(N: int, K: int, format: str) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of `Codes` for a weight [N, K]."""
    if format in NIBBLE_FORMATS:
        return (padded(K) // NIBBLE_BLOCK, N, NIBBLE_BLOCK // 2), (padded(K) // GROUP, N)
    return (N, K), ((N,) if format == "int8" else None)


def value_dtype(format: str) -> torch.dtype:
    """The dtype of `Codes.values`."""
    return FLOATS.get(format, torch.int8 if format == "int8" else torch.uint8)


def pair_nibbles(codes: Tensor) -> Tensor:
    """Codes [N, K] uint8 below 16, K a multiple of 64, to blocks [K / 64, N, 32]: column j low, column j + 32 high."""
    N, K = codes.shape
    low, high = codes.view(N, K // NIBBLE_BLOCK, 2, 32).unbind(2)
    return (low | (high << 4)).transpose(0, 1).contiguous()


def part_nibbles(blocks: Tensor) -> Tensor:
    """The inverse of `pair_nibbles`: [K / 64, N, 32] to [N, K]."""
    num_blocks, N, _ = blocks.shape
    both = torch.stack((blocks & 15, blocks >> 4), dim=2)
    return both.permute(1, 0, 2, 3).reshape(N, num_blocks * NIBBLE_BLOCK)


def quantise(weight: Weight, format: str) -> Codes:
    """Pack weight [N, K], a tensor or MXFP4. The codes are those of `kernels.reference.formats`."""
    encoded = encode(weight, format)
    if isinstance(encoded, Tensor):
        return Codes(encoded, None)
    if format == "int8":
        return Codes(encoded.values, encoded.scales)
    if format == "mxfp4":
        return from_mxfp4(encoded.values, encoded.scales)
    codes = int4.part(encoded.values).flatten(1) ^ 8  # counted from -8
    spare = padded(codes.shape[1]) - codes.shape[1]
    codes = torch.nn.functional.pad(codes, (0, spare), value=8)
    scales = torch.nn.functional.pad(encoded.scales, (0, spare // GROUP))
    return Codes(pair_nibbles(codes), scales.T.contiguous())


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Codes:
    """MXFP4 as checkpoints hold it, without rounding: blocks [N, K / 32, 16], column 2i low in byte i; scales [N, K / 32]."""
    N, num_groups, _ = blocks.shape
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(N, num_groups * GROUP)
    spare = padded(num_groups * GROUP) - num_groups * GROUP
    codes = torch.nn.functional.pad(codes, (0, spare))
    scales = torch.nn.functional.pad(scales, (0, spare // GROUP), value=127)
    return Codes(pair_nibbles(codes), scales.T.contiguous())


def dequantise(codes: Codes, K: int, format: str) -> Tensor:
    """What the packed weight stands for: float32 [N, K]."""
    values, scales = codes
    if format in FLOATS:
        return values.float()
    assert scales is not None
    if format == "int8":
        return values.float() * scales[:, None]
    N = values.shape[1]
    groups = part_nibbles(values).view(N, -1, GROUP)
    if format == "int4":
        wide = (groups.float() - 8) * scales.float().T[..., None]
    else:
        table = torch.tensor([*E2M1, *(-step for step in E2M1)], device=values.device)
        wide = torch.ldexp(table[groups.long()], scales.T.int()[..., None] - 127)
    return wide.flatten(1)[:, :K]
