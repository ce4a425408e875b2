"""A stand-in for a GPU: tensors that say they are on `cuda:0` and keep apart from the host's, in the host's memory.

With it the whole path of a node on a GPU runs where there is none, kernels in triton's interpreter. What a real device
refuses is refused: reading its memory by numpy, and calls that mix its tensors with the host's.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels import backends

DEVICE = torch.device("cuda", 0)
MAY_MIX = {Tensor.copy_, Tensor.set_, Tensor.__getitem__, Tensor.index_put_}
READS = {Tensor.numpy, Tensor.__array__}
ABOUT = {
    Tensor.is_cpu.__get__: lambda tensor: not isinstance(tensor, OnDevice),
    Tensor.is_cuda.__get__: lambda tensor: isinstance(tensor, OnDevice),
}


class OnDevice(Tensor):
    """A tensor of the stand-in."""


@contextmanager
def stand_in_device() -> Iterator[None]:
    """The triton kernels serve on a stand-in device, in this thread."""
    before, place = backends.active().NAME, backends.device()
    backends.use("triton", DEVICE)
    try:
        with _StandIn():
            yield
    finally:
        backends.use(before, place)


class _StandIn(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT:
                return ABOUT[func](*args)
            if func == Tensor.device.__get__:
                return DEVICE if isinstance(args[0], OnDevice) else func(*args)
            if func in READS and isinstance(args[0], OnDevice):
                raise TypeError("numpy cannot read what is on a GPU")
            if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
                return _sent(func, args, kwargs)
            kwargs.pop("pin_memory", None)
            if "device" in kwargs and kwargs["device"] is not None:
                here = torch.device(kwargs["device"]).type == "cpu"
                found = func(*args, **(kwargs | {"device": "cpu"}))
                return found if here else _marked(found)
            return _apart(func, args, kwargs)


def _sent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What `to` gives: a copy if it goes over, else what it gives on the host."""
    tensor, *rest = args
    kwargs.pop("non_blocking", None)
    asked = [kwargs.pop("device", None), *(each for each in rest if isinstance(each, str | torch.device))]
    asked += ["cpu"] if func is Tensor.cpu else ["cuda"] if func is Tensor.cuda else []
    wanted = next((torch.device(each) for each in asked if each is not None), None)
    is_there = isinstance(tensor, OnDevice)
    goes_there = is_there if wanted is None else wanted.type == "cuda"
    others = [each for each in rest if not isinstance(each, str | torch.device)]
    found = Tensor.to(tensor, *others, **kwargs) if others or kwargs else tensor
    if is_there == goes_there:
        return _marked(found) if goes_there else found
    return _marked(found.clone()) if goes_there else found.clone().as_subclass(Tensor)


def _apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what all its tensors agree on."""
    tensors = list(_tensors((args, kwargs)))
    is_there = any(isinstance(tensor, OnDevice) for tensor in tensors)
    others = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim() > 0]
    if func is Tensor.__setitem__:  # indices may be the host's, and with plain ones it is a copy
        value = args[2] if any(True for _ in _tensors((args[1],))) else None
        others = [each for each in _tensors((value,)) if each.dim() and not isinstance(each, OnDevice)]
        is_there = isinstance(args[0], OnDevice)
    if is_there and others and func not in MAY_MIX:
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"{name}: all tensors are expected on one device, found {DEVICE} and cpu")
    if func in MAY_MIX:
        is_there = isinstance(args[0], OnDevice)
    found = func(*args, **kwargs)
    return _marked(found) if is_there else found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _marked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if isinstance(value, OnDevice) else value.as_subclass(OnDevice)
    if isinstance(value, tuple) and any(True for _ in _tensors(value)):
        parts: Iterable[Any] = map(_marked, value)
        return tuple(parts) if type(value) is tuple or not hasattr(value, "_fields") else type(value)(*parts)
    if isinstance(value, list):
        return [_marked(each) for each in value]
    return value
