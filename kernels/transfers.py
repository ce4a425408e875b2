"""Tensors on their way between the host's memory and where the backend that serves computes.

On a node without a GPU nothing moves: the very tensor is given back. Else the host's side is pinned, so that the device
fetches and brings by itself; torch keeps such memory and gives it out again once no copy uses it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kernels import backends

T = TypeVar("T")


def on_host(tensor: Tensor) -> Tensor:
    """The tensor in the host's memory, ready to be read; waits for the device."""
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def on_device(value: T) -> T:
    """A tensor, or a named tuple of such and of other things, where the backend computes; does not wait."""
    if backends.is_on_host():
        return value
    return _moved(value)


def on_device_as_one(parts: Sequence[np.ndarray]) -> Tensor:
    """Rows of several float32 arrays [n, D] one after another where the backend computes, in one copy."""
    ends = np.cumsum([len(part) for part in parts])
    whole = torch.empty(int(ends[-1]), parts[0].shape[1], pin_memory=not backends.is_on_host())
    for part, end in zip(parts, ends.tolist(), strict=True):
        whole.numpy()[end - len(part) : end] = part
    return whole.to(backends.device(), non_blocking=True)


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_cpu:
            return value
        pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)
        return pinned.to(backends.device(), non_blocking=True)
    if isinstance(value, tuple):
        parts = map(_moved, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
