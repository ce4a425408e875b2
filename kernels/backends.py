"""Which implementation of the kernels serves: compiled, plain torch, or the reference. Chosen once, when first asked.

EDGE_KERNELS=native|torch|reference forces one, EDGE_CPU_ISA=amx|avx512vnni|avx512|avx2|portable forces the compiled
kernels' instruction set, EDGE_THREADS sets the number of threads (1 unless set). All compiled instruction sets and all numbers of
threads give the same bits.
"""

import importlib
import logging
import os
import platform
import shutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kernels.interface import OtherInterface

log = logging.getLogger(__name__)

MODULES = {
    "native": "kernels.cpu.compiled",
    "torch": "kernels.cpu.fallback",
    "reference": "kernels.reference",
}

_active: ModuleType | None = None


def load(name: str) -> ModuleType:
    """The backend of that name. ImportError says why the native one cannot be had."""
    if name not in MODULES:
        raise ValueError(f"backend: found {name!r}, expected one of {', '.join(MODULES)}")
    return importlib.import_module(MODULES[name])


def choose(environment: Mapping[str, str]) -> ModuleType:
    """The backend these variables ask for, set up as they say: native if it was built and nothing forbids it, else torch."""
    wanted = environment.get("EDGE_KERNELS", "")
    try:
        backend = load(wanted or "native")
    except ImportError as error:
        if wanted:
            raise
        if isinstance(error, OtherInterface):  # where nothing was built, nobody expects it
            log.warning("%s; until then plain torch serves, and answers come slower", error)
        backend = load("torch")
    if backend.NAME == "native" and (isa := environment.get("EDGE_CPU_ISA", "")):
        use_isa(isa)
    if threads := environment.get("EDGE_THREADS", ""):
        backend.set_num_threads(_checked_threads(int(threads) if threads.isdecimal() else 0))
    return backend


def use_isa(isa: str) -> None:
    """Let the compiled kernels use this instruction set, from the next call on."""
    from kernels.cpu import _native  # type: ignore[attr-defined]

    runnable = _native.runnable_isas()
    if isa not in runnable:
        raise ValueError(
            f"EDGE_CPU_ISA: found {isa!r}, expected one of {', '.join(runnable)} on this machine"
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
    active().set_num_threads(_checked_threads(threads))


def _checked_threads(threads: int) -> int:
    if threads < 1:
        raise ValueError(f"threads (EDGE_THREADS): found {threads}, expected 1 or more")
    return threads


def use(name: str) -> ModuleType:
    """Let this backend serve from now on. Weights packed before keep the backend that packed them."""
    global _active
    _active = load(name)
    return _active


def describe() -> dict[str, Any]:
    """What serves and why, for `edge-runtime doctor`.

    backend, threads, isa (None unless native), runnable_isas, machine, compiler (path or None), native_error (None if native
    can be had).
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
    }
