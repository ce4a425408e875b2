"""Weights as numbers: plain tensors, or codes with scales. Turns one into the other; knows no packed layout.

Quantising goes by blocks of rows, so that no float32 copy of a weight is ever whole.
"""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from kernels.packing import FORMATS, ITEM_BYTES
from kernels.reference import bfloat16x2, int4, int8, mxfp4

BLOCK_VALUES = 1 << 18  # quantised at a time: 1 MiB in float32, so that the passes over it stay in the cache

QUANTISERS = {"bfloat16x2": bfloat16x2, "int8": int8, "int4": int4, "mxfp4": mxfp4}


class MXFP4(NamedTuple):
    """A weight [N, K] as checkpoints of gpt_oss hold it; rows may be strided."""

    blocks: Tensor
    """[N, K / 32, 16] uint8, column 2i in the low half of byte i"""
    scales: Tensor
    """[N, K / 32] uint8"""

    @property
    def shape(self) -> torch.Size:
        N, num_groups = self.scales.shape
        return torch.Size((N, num_groups * int4.GROUP))


class Codes(NamedTuple):
    """A quantised weight [N, K]."""

    format: str
    """`bfloat16x2`, `int8`, `int4` or `mxfp4`"""
    values: Tensor
    """bfloat16 or int8 [N, K], or uint8 [N, groups, 16]"""
    scales: Tensor
    """none [N, 0], float32 [N], float16 [N, groups], or uint8 [N, groups]"""
    num_inputs: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values), self.num_inputs))


Weight: TypeAlias = Tensor | MXFP4 | Codes
"""What is packed: a checkpoint's tensor, MXFP4 as it holds it, or what `encode` gave."""


def stored_format(weight: Weight) -> str:
    """The format a checkpoint's weight is in; a ValueError if none of ours."""
    if isinstance(weight, MXFP4):
        return "mxfp4"
    if isinstance(weight, Codes):
        return weight.format
    name = str(weight.dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise ValueError(f"found {name}, expected one of {', '.join(ITEM_BYTES)}")
    return name


def encode(weight: Weight, format: str) -> Tensor | Codes:
    """A weight [N, K] in the given format: a dense tensor of that dtype, or codes."""
    if isinstance(weight, MXFP4):
        if format == "mxfp4":
            return Codes(format, weight.blocks.contiguous(), weight.scales.contiguous(), weight.shape[1])
        weight = mxfp4.unpack(*weight)
    if isinstance(weight, Codes):
        if format == weight.format:
            return weight
        weight = decode(weight)
    weight = weight.detach()
    if format in ITEM_BYTES:
        return weight.to(getattr(torch, format)).contiguous()
    if format not in FORMATS:
        raise ValueError(f"format: found {format!r}, expected one of {', '.join(FORMATS)}")
    step = max(1, BLOCK_VALUES // max(1, weight.shape[1]))
    parts = [QUANTISERS[format].quantise(rows.float().contiguous()) for rows in weight.split(step)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return Codes(format, values, scales, weight.shape[1])


def decode(weight: Tensor | Codes) -> Tensor:
    """What an encoded weight stands for: float32 [N, K]."""
    if isinstance(weight, Tensor):
        return weight.float()
    return QUANTISERS[weight.format].dequantise(weight.values, weight.scales, weight.num_inputs)


def stacked(weights: list[Tensor | Codes]) -> Tensor | Codes:
    """Encoded weights of one format as one, rows one after another, in memory of its own."""
    first = weights[0]
    if isinstance(first, Tensor):
        return torch.cat([weight for weight in weights if isinstance(weight, Tensor)]).clone()
    codes = [weight for weight in weights if isinstance(weight, Codes)]
    values, scales = (torch.cat(parts) for parts in ([c.values for c in codes], [c.scales for c in codes]))
    return Codes(first.format, values, scales, first.num_inputs)
