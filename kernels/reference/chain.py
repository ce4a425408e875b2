"""The one order in which dot products are summed: a chain of fused multiply-adds, in increasing k, from 0."""

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once to float32.

    The product is exact in float64 and the sum nearly: where float64 rounds it onto the middle between two
    float32 values, the second rounding may go the other way, about once in 2^29 steps.
    """
    return (a.double() * b.double() + c.double()).float()


def chain(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] times weight [N, K] transposed, both float32: [T, N], each output one chain over k."""
    total = torch.zeros(len(x), len(weight))
    for k in range(x.shape[1]):
        total = fma(x[:, k, None], weight[None, :, k], total)
    return total


def lane_sum(values: Tensor) -> Tensor:
    """Sum of the last dimension as the kernels form it: 16 partial sums, then lane i with i+8, i+4, i+2, i+1."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 16))
    lanes = torch.zeros(*values.shape[:-1], 16)
    for part in padded.split(16, dim=-1):
        lanes = lanes + part
    for half in (8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]
