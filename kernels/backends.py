"""Which implementation of the kernels serves: compiled, plain torch, or the reference. Chosen once, when first asked.

EDGE_KERNELS=native|torch|reference forces one, EDGE_CPU_ISA=avx512|avx2|portable forces the compiled kernels' instruction
set, EDGE_THREADS sets the number of threads (1 unless set). All compiled instruction sets and all numbers of threads give
the same bits.
"""

import importlib
import os
import platform
import shutil
from types import ModuleType
from typing import Any

MODULES = {
    "native": "kernels.cpu.compiled",
    "torch": "kernels.cpu.fallback",
    "reference": "kernels.reference",
}
ISAS = ("avx512", "avx2", "portable")

_active: ModuleType | None = None


def load(name: str) -> ModuleType:
    """The backend of that name. ImportError says why the native one cannot be had."""
    if name not in MODULES:
        raise ValueError(f"backend: found {name!r}, expected one of {', '.join(MODULES)}")
    module = importlib.import_module(MODULES[name])
    if name == "native":
        use_isa(os.environ.get("EDGE_CPU_ISA", ""))
    return module


def use_isa(isa: str) -> None:
    """Let the compiled kernels use this instruction set; an empty string keeps the one in use, at first the best."""
    from kernels.cpu import _native  # type: ignore[attr-defined]

    if not isa:
        return
    runnable = _native.runnable_isas()
    if isa not in runnable:
        raise ValueError(
            f"EDGE_CPU_ISA: found {isa!r}, expected one of {', '.join(runnable)} on this machine"
        )
    _native.use_isa(isa)


def active() -> ModuleType:
    """The backend that serves: EDGE_KERNELS if set, else native if it was built, else torch."""
    global _active
    if _active is None:
        wanted = os.environ.get("EDGE_KERNELS", "")
        if wanted:
            _active = load(wanted)
        else:
            try:
                _active = load("native")
            except ImportError:
                _active = load("torch")
        if threads := os.environ.get("EDGE_THREADS", ""):
            set_num_threads(int(threads) if threads.isdecimal() else 0)
    return _active


def set_num_threads(threads: int) -> None:
    """Let the backend that serves share large calls between this many threads, the caller's included."""
    if threads < 1:
        raise ValueError(f"threads (EDGE_THREADS): found {threads}, expected 1 or more")
    active().set_num_threads(threads)


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
        from kernels.cpu import _native  # type: ignore[attr-defined]

        native_error = None
    except ImportError as error:
        _native, native_error = None, f"kernels.cpu._native cannot be imported: {error}"
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
