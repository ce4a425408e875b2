"""Weights that are quantised on disk, turned into plain numbers. Knows the two codes; knows no file and no model.

fp8     E4M3, one scale for each block of rows and columns; the last blocks of a matrix may be partial
mxfp4   E2M1, two to a byte, one power of two for each 32 along a row
"""

import torch
from torch import Tensor

from edge_runtime.model.architectures.table import Shape

FP8_DTYPE = "F8_E4M3"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP = 32  # columns that share a scale
MXFP4_BIAS = 127  # of the exponent that stands for a block's scale


def scale_name(name: str) -> str:
    """The tensor that holds the scales of an fp8 matrix."""
    return f"{name}_scale_inv"


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Shape of the scales of a matrix [..., rows, columns]: partial blocks have one too."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // block[0]), -(-columns // block[1]))


def fp8_to_bfloat16(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Each number times the scale of its block, rounded once to bfloat16.

    weight   [rows, columns] float8_e4m3fn
    scales   [rows / block, columns / block] rounded up, any float
    """
    wide = scales.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(block[1], 1)[:, : weight.shape[1]]
    return (weight.float() * wide).bfloat16()


def mxfp4_to_bfloat16(blocks: Tensor, scales: Tensor) -> Tensor:
    """[rows, columns] bfloat16, exactly.

    blocks   [rows, columns / 32, 16] uint8, the even column in the low half of each byte
    scales   [rows, columns / 32] uint8, the exponent of each block's scale plus 127
    """
    table = torch.tensor(FP4_VALUES, dtype=torch.float32)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32) - MXFP4_BIAS
    return torch.ldexp(table[codes.int()], exponents[..., None]).flatten(-2).bfloat16()


def mxfp4_columns(blocks: Tensor, scales: Tensor, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """A matrix with its columns in another order: column order[j] comes to j. None where that tears groups of 32 apart.

    blocks  [N, K / 32, 16] uint8, column 2i of a group in the low half of byte i; scales [N, K / 32] uint8
    order   [K] int64, a permutation. Columns may change places within a group, and groups as a whole
    """
    groups = order.view(-1, MXFP4_GROUP)
    sources = groups[:, 0] // MXFP4_GROUP
    if not torch.equal(groups // MXFP4_GROUP, sources[:, None].expand_as(groups)):
        return None
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # [N, K / 32, 32]
    within = (groups % MXFP4_GROUP).expand(len(blocks), -1, -1)
    moved = codes[:, sources].gather(2, within)
    return moved[..., 0::2] | (moved[..., 1::2] << 4), scales[:, sources]
