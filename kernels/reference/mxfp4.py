"""MXFP4: blocks of 32 inputs, E2M1 codes and one E8M0 exponent. What the codes are and what they stand for.

Tensors are laid out as checkpoints hold them: blocks [..., K / 32, 16] uint8, input 2i in the low half of byte i, and
scales [..., K / 32] uint8.
"""

import torch
from torch import Tensor

from kernels.reference.int4 import GROUP, grouped, pair, part

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the codes 0..7; 8 is the sign."""


def e2m1_codes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., 32] to codes uint8 of that shape and exponents uint8 [...].

    The scale is the power of two that puts the largest magnitude in [4, 8), as the format is defined; values go to the
    nearest code, ties to the even one, and above 6 to 6.
    """
    magnitude = groups.abs()
    largest = magnitude.amax(dim=-1)
    exponent = torch.frexp(largest).exponent - 3  # largest is in [2^(e - 1), 2^e)
    exponent = torch.where(largest == 0, 0, exponent).clamp(-126, 127)
    scaled = torch.ldexp(magnitude, -exponent[..., None])
    steps = torch.tensor(E2M1, device=groups.device)
    middles = (steps[1:] + steps[:-1]) / 2
    codes = torch.bucketize(scaled.contiguous(), middles)  # a middle belongs to the code below it ...
    odd_middle = (codes % 2 == 1) & (scaled == middles[codes.clamp(max=6)])
    codes = codes + odd_middle  # ... unless that is odd
    return (codes + 8 * (groups < 0)).to(torch.uint8), (exponent + 127).to(torch.uint8)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] float32 to blocks [N, groups, 16] and scales [N, groups]; a last group is filled up with zeros."""
    codes, scales = e2m1_codes(grouped(weight))
    return pair(codes), scales


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] with K a multiple of 32 to blocks [..., K / 32, 16] and scales [..., K / 32]."""
    codes, scales = e2m1_codes(weight.float().unflatten(-1, (-1, GROUP)))
    return pair(codes), scales


def values(blocks: Tensor) -> Tensor:
    """What the codes count: float32 [..., groups, 32] in -6..6."""
    table = torch.tensor([*E2M1, *(-step for step in E2M1)], device=blocks.device)
    return table[part(blocks).long()]


def powers(scales: Tensor) -> Tensor:
    """2 ** (scale - 127) as float32."""
    bits = scales.int() << 23
    return torch.where(scales == 0, 0x00400000, bits).view(torch.float32)


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., K]: code times power of two, exact."""
    return (values(blocks) * powers(scales)[..., None]).flatten(-2)


def dequantise(codes: Tensor, scales: Tensor, K: int) -> Tensor:
    """float32 [N, K]."""
    return unpack(codes, scales)[:, :K]
