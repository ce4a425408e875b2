"""Single operations of float32 arithmetic that torch has no name for."""

import torch
from torch import Tensor

SMALLEST = torch.finfo(torch.float32).smallest_normal


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once to float32.

    The product is exact in float64 and the sum nearly: where float64 rounds it onto the middle between two
    float32 values, the second rounding may go the other way, about once in 2^29 steps.
    """
    return (a.double() * b.double() + c.double()).float()


def flush(x: Tensor) -> Tensor:
    """x with numbers below the smallest normal one made 0, as processors do that are told to."""
    return torch.where(x.abs() < SMALLEST, 0.0, x)
