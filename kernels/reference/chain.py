"""The one order in which dot products are summed: a chain of fused multiply-adds, in increasing k, from 0."""

import torch
from torch import Tensor

from kernels.packing import GROUP
from kernels.reference import bfloat16x2, int4, mxfp4
from kernels.reference.formats import Codes
from kernels.reference.integers import whole_rows
from kernels.reference.rounding import fma

INT8_BLOCK = 256
"""Inputs whose products with int8 codes add up to less than 2^31."""


def chain(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, both float32: [T, N], each output one chain over k."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = fma(x[:, k, None], weight[None, :, k], total)
    return total


def product(x: Tensor, weight: Tensor | Codes) -> Tensor:
    """x [T, K] times an encoded weight [N, K] transposed: [T, N], the order of its sums as the format defines it.

    floats       one chain over k
    bfloat16x2   rows in two terms (bfloat16x2.py), their sums as processors with matrix registers form them
    codes        with rows as whole numbers (integers.py), whose products with codes add up exactly:
    int8         the sum of each 256 inputs, rounded once; these added one after another; times (output's scale * row's)
    int4, mxfp4  the sum of each group of 32; a chain of scale times that over the groups; times the row's scale
    mxfp4        that of the row, plus that of what its whole numbers leave: a checkpoint's own weights are the model
    """
    if isinstance(weight, Tensor):
        return chain(x, weight.float())
    if weight.format == "bfloat16x2":
        return bfloat16x2.product(x, weight.values)
    if weight.format == "int4":
        return whole_product(x, weight)
    if weight.format == "mxfp4":
        return whole_product(x, weight) + whole_product(rest(x), weight)
    whole, row_scales = whole_rows(x)
    total = torch.zeros(len(x), weight.shape[0])
    for columns, codes in zip(whole.split(INT8_BLOCK, 1), weight.values.split(INT8_BLOCK, 1), strict=True):
        total = total + exact(columns, codes)
    return total * (weight.scales * row_scales[:, None])


def whole_product(x: Tensor, weight: Codes) -> Tensor:
    """Rows as whole numbers times groups of codes, each with a scale of its own."""
    if weight.format == "int4":
        values, scales = int4.values(weight.values), weight.scales.float()
    else:
        values, scales = mxfp4.values(weight.values), mxfp4.powers(weight.scales)
    whole, row_scales = whole_rows(x)
    total = torch.zeros(len(x), len(values))
    for g, columns in enumerate(whole.split(GROUP, dim=1)):
        total = fma(scales[:, g], exact(columns, values[:, g, : columns.shape[1]]), total)
    return total * row_scales[:, None]


def rest(x: Tensor) -> Tensor:
    """What a row's whole numbers leave of it, rounded once."""
    whole, row_scales = whole_rows(x)
    return fma(-whole, row_scales[:, None], x)


def exact(whole: Tensor, codes: Tensor) -> Tensor:
    """Sums of products of whole numbers (or halves) [T, k] and [N, k], rounded once to float32: [T, N]."""
    return (whole.double() @ codes.double().T).float()


def lane_sum(values: Tensor) -> Tensor:
    """Sum of the last dimension as the kernels form it: 16 partial sums, then lane i with i+8, i+4, i+2, i+1."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))
    lanes = torch.zeros(*values.shape[:-1], 16)
    for part in padded.split(16, dim=-1):
        lanes = lanes + part
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]
