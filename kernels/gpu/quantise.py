"""Weights to codes and back: int8 by output, int4 by groups, MXFP4. Torch calls at load, on any device; one copy at a time.

Knows one weight [N, K]; nothing of tiles but the order in which two codes share a byte.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gpu.tiles import NIBBLE_BLOCK, NIBBLE_FORMATS

FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
FORMATS = (*FLOATS, "int8", *NIBBLE_FORMATS)
GROUP = 32
SCALE_DTYPE = {"int8": torch.float32, "int4": torch.float16, "mxfp4": torch.uint8}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


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


def _groups(weight: Tensor) -> Tensor:
    """[N, K] as float32 [N, K / 32, 32], zeros behind K."""
    N, K = weight.shape
    return torch.nn.functional.pad(weight.float(), (0, padded(K) - K)).view(N, -1, GROUP)


def quantise(weight: Tensor, format: str) -> Codes:
    """Pack weight [N, K] bfloat16, float16 or float32.

    int8   symmetric, scale = largest / 127 of each output
    int4   symmetric, -8..7 in groups of 32 columns, float16 scale; of the two scales that put the largest value on
           7 or on -8, the one with the smaller squared error
    mxfp4  E2M1 in groups of 32 columns, E8M0 scale: the power of two that puts the largest value in [4, 8), as in the
           format's definition; values to the nearest, ties to the even code
    """
    if format in FLOATS:
        return Codes(weight.detach().to(FLOATS[format]).contiguous(), None)
    if format == "int8":
        wide = weight.float()
        scale = wide.abs().amax(dim=1) / 127
        codes = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
        return Codes(codes.clamp(-127, 127).to(torch.int8), scale)
    groups = _groups(weight)
    if format == "int4":
        return _int4(groups)
    if format == "mxfp4":
        codes, exponents = e2m1_codes(groups)
        return Codes(pair_nibbles(codes.flatten(1)), exponents.T.contiguous())
    raise ValueError(f"format: found {format!r}, expected one of {', '.join(FORMATS)}")


def _int4(groups: Tensor) -> Codes:
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    largest = torch.where(-low > high, low, high)
    best_codes = best_error = best_scale = None
    for limit in (-8.0, 7.0):
        scale = (largest / limit if limit < 0 else largest.abs() / limit).to(torch.float16)
        wide = scale.float()[..., None]
        codes = torch.where(wide == 0, 0.0, groups / wide).round().clamp(-8, 7)
        error = (codes * wide - groups).square().sum(dim=2)
        if best_codes is None or best_error is None or best_scale is None:
            best_codes, best_error, best_scale = codes, error, scale
        else:
            better = error < best_error
            best_codes = torch.where(better[..., None], codes, best_codes)
            best_scale = torch.where(better, scale, best_scale)
    assert best_codes is not None and best_scale is not None
    return Codes(pair_nibbles((best_codes + 8).to(torch.uint8).flatten(1)), best_scale.T.contiguous())


def e2m1_codes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., 32] to codes uint8 of that shape and E8M0 exponents uint8 [...]."""
    largest = groups.abs().amax(dim=-1)
    exponent = (
        torch.frexp(largest).exponent - 1 - 2
    )  # largest is below 2 ** frexp, and 4 = 2 ** 2 is E2M1's top binade
    exponent = torch.where(largest == 0, 0, exponent).clamp(-126, 127)
    scaled = torch.ldexp(groups.abs(), -exponent[..., None])
    steps = torch.tensor(E2M1, device=groups.device)
    middles = (steps[1:] + steps[:-1]) / 2
    codes = torch.bucketize(scaled, middles)  # a middle belongs below ...
    on_middle = (scaled == middles[codes.clamp(max=6)]) & (codes < 7)
    codes = codes + (on_middle & (codes % 2 == 1))  # ... unless the code below is odd
    return (codes + 8 * (groups < 0)).to(torch.uint8), (exponent + 127).to(torch.uint8)


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
