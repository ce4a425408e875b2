"""Which implementation of the kernels serves, and where: compiled, plain torch or the reference on the host, Triton on a GPU.

Chosen once: by `use_device` where a GPU is asked for, else when first asked. EDGE_KERNELS=native|torch|reference|triton
forces one; triton on the host needs TRITON_INTERPRET=1 and is for tests: the very code that a GPU would run, slowly.
EDGE_CPU_ISA=amx|avx512vnni|avx512|avx2|portable forces the compiled kernels' instruction set, EDGE_THREADS sets the number
of threads (1 unless set). All compiled instruction sets and all numbers of
threads give the same bits.
"""

import functools
import importlib
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from kernels.interface import OtherInterface
from kernels.settings import (
    BACKENDS,
    ISA_VARIABLE,
    ISAS,
    KERNELS_VARIABLE,
    THREADS_VARIABLE,
    SettingError,
    checked_threads,
    one_of,
)

log = logging.getLogger(__name__)

MODULES = {
    "native": "kernels.cpu.compiled",
    "torch": "kernels.cpu.fallback",
    "reference": "kernels.reference",
    "triton": "kernels.gpu.backend",
}
assert tuple(MODULES) == BACKENDS, "what may be asked for is what there is"
HOST = torch.device("cpu")

_active: ModuleType | None = None
_device = HOST


def load(name: str) -> ModuleType:
    """The backend of that name. ImportError says why the native one cannot be had."""
    return importlib.import_module(MODULES[name])


def choose(environment: Mapping[str, str]) -> ModuleType:
    """The backend these variables ask for, set up as they say: native if it was built and nothing forbids it, else torch.

    SettingError for what cannot be had.
    """
    wanted = one_of(environment, KERNELS_VARIABLE, BACKENDS)
    isa = one_of(environment, ISA_VARIABLE, ISAS)
    if wanted == "triton" and environment.get("TRITON_INTERPRET") != "1":
        raise SettingError(
            "EDGE_KERNELS: found triton, whose kernels run on a GPU; name one by `device` in the topology file, or set "
            "TRITON_INTERPRET=1 to have them interpreted on the processor"
        )
    try:
        backend = load(wanted or "native")
    except ImportError as error:
        if wanted:
            raise SettingError(
                f"{KERNELS_VARIABLE}: found {wanted!r}, which cannot be had here: {error}; leave it unset, or run `make install`"
            ) from error
        if isinstance(error, OtherInterface):  # where nothing was built, nobody expects it
            _tell(str(error))
        backend = load("torch")
    if backend.NAME == "native" and isa:
        use_isa(isa)
    if threads := environment.get(THREADS_VARIABLE, ""):
        backend.set_num_threads(checked_threads(threads, THREADS_VARIABLE))
    return backend


@functools.cache  # once a process
def _tell(why: str) -> None:
    log.warning("%s; until then plain torch serves, and answers come slower", why)


def use_isa(isa: str) -> None:
    """Let the compiled kernels use this instruction set, from the next call on."""
    from kernels.cpu import _native  # type: ignore[attr-defined]

    runnable = _native.runnable_isas()
    if isa not in runnable:
        raise SettingError(
            f"{ISA_VARIABLE}: found {isa!r}, expected one of {', '.join(runnable)} on this machine"
        )
    _native.use_isa(isa)


def active() -> ModuleType:
    """The backend that serves, chosen by the environment of the process when first asked."""
    global _active
    if _active is None:
        _active = choose(os.environ)
    return _active


def set_num_threads(threads: int) -> None:
    """Let the backend that serves share large calls between this many threads, the caller's included."""
    active().set_num_threads(checked_threads(threads))


def use(name: str, device: torch.device = HOST) -> ModuleType:
    """Let this backend serve from now on, on that device. Weights packed before keep the backend that packed them."""
    global _active, _device
    _active, _device = load(name), device
    return _active


def device() -> torch.device:
    """Where weights, pages and rows of the backend that serves live."""
    return _device


def is_on_host() -> bool:
    """Whether that is the host's memory."""
    return _device is HOST


def keys_end_in_tokens() -> bool:
    """Whether pages of keys are [num_blocks, G, P, 16], as processors want them, and not [num_blocks, G, 16, P]."""
    return getattr(active(), "KEYS_END_IN_TOKENS", True)


def page_dtype(format: str) -> torch.dtype:
    """How keys and values are kept beside an attention whose matrices are of this format."""
    chosen = getattr(active(), "page_dtype", None)
    return torch.float32 if chosen is None else chosen(format)


def numerics() -> str:
    """A word for the bits that come out: equal words, equal bits."""
    return getattr(active(), "numerics", lambda: active().NAME)()


def resident_bytes() -> int | None:
    """What this process has of the device's memory for tensors; None on the host."""
    return None if is_on_host() else torch.cuda.memory_reserved(_device)


def free_bytes() -> int | None:
    """What of the device's memory nobody has; None on the host."""
    return None if is_on_host() else torch.cuda.mem_get_info(_device)[0]


def for_host() -> ModuleType:
    """A backend for tensors in the host's memory, whatever serves."""
    try:
        return load("native")
    except ImportError:
        return load("torch")


def gpus() -> list[str]:
    """What torch can compute on beside the processor, as doctor says it; none if it was built without."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    return found


def check_device(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """SettingError where this machine cannot compute on `cpu`, `cuda` or `cuda:N`. Changes nothing."""
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return
    if (forced := one_of(environment, KERNELS_VARIABLE, BACKENDS) or "triton") != "triton":
        raise SettingError(
            f"device: found {name!r}, which needs the triton kernels, but {KERNELS_VARIABLE} is {forced!r}"
        )
    there, index = gpus(), int(number or 0)
    if index >= len(there):
        what = "; ".join(there) if there else f"no GPU (torch {torch.__version__})"
        raise SettingError(
            f'device: found {name!r}, but torch sees {what} on this machine; write "cpu", or install a torch for its GPU'
        )
    try:
        load("triton")
    except ImportError as error:
        raise SettingError(
            f"device: found {name!r}, but triton cannot be imported: {error}; install it"
        ) from None


def use_device(name: str, environment: Mapping[str, str] = os.environ) -> None:
    """Compute where a topology file says: `cpu`, `cuda` or `cuda:N`. SettingError where that cannot be."""
    check_device(name, environment)
    kind, _, number = name.partition(":")
    if kind != "cpu":
        use("triton", torch.device("cuda", int(number or 0)))


def describe() -> dict[str, Any]:
    """What serves and why, for `edge-runtime doctor`.

    backend, threads, isa (None unless native), runnable_isas, machine, compiler (path or None), native_error (None if native
    can be had), device, gpus.
    """
    try:
        load("native")
        from kernels.cpu import _native  # type: ignore[attr-defined]

        native_error = None
    except ImportError as error:
        _native, native_error = None, f"kernels.cpu._native cannot be used: {error}"
    serving = active().NAME
    return {
        "backend": serving,
        "threads": active().num_threads(),
        "isa": _native.isa() if _native is not None and serving == "native" else None,
        "runnable_isas": _native.runnable_isas() if _native is not None else [],
        "machine": platform.machine(),
        "compiler": next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None),
        "native_error": native_error,
        "device": str(_device),
        "gpus": gpus(),
    }
