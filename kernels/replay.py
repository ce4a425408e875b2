"""Work on tensors that stay where they are, recorded once and run again: by calling it, compiled, or as a CUDA graph.

All three run the same function on the same tensors, so who uses them need not know which it is. Knows no model.
"""

import functools
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import backends
from kernels.settings import COMPILE_VARIABLE, GRAPHS_VARIABLE, SettingError, is_on

COMPILER_S = 20.0

Work = Callable[..., object]


class Replay(Protocol):
    """Recorded work."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds beside the tensors it was given."""

    def __call__(self) -> None:
        """Run it on what stands in its tensors now."""


class Recorder(Protocol):
    """A way to record."""

    name: str

    def __call__(self, work: Work, *arguments: Any, restored: Sequence[Tensor] = ()) -> Replay:
        """Record work(*arguments), whose tensors stay where they are; what stands in `restored` is as before afterwards."""


class Repeating:
    """A call that is made again: what the others must equal."""

    nbytes = 0

    def __init__(self, work: Work, *arguments: Any, restored: Sequence[Tensor] = ()) -> None:
        self._call = partial(work, *arguments)

    def __call__(self) -> None:
        self._call()


class Compiled:
    """A call that torch.compile has made one piece of. Compiled when first run, once for all arguments of one shape."""

    nbytes = 0

    def __init__(
        self, work: Work, *arguments: Any, restored: Sequence[Tensor] = (), backend: str = "inductor"
    ) -> None:
        compiled = torch.compile(work, dynamic=False, fullgraph=True, backend=backend)
        self._call = partial(compiled, *arguments)

    def __call__(self) -> None:
        with torch.no_grad():
            self._call()


class CudaGraph:
    """Launches that a GPU repeats by itself. All graphs of a process share one pool: they run one after another."""

    _pool: Any = None

    def __init__(self, work: Work, *arguments: Any, restored: Sequence[Tensor] = ()) -> None:
        device = backends.device()
        before = [tensor.clone() for tensor in restored]
        stream, own = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(own)
        with torch.cuda.stream(stream):  # kernels compile and tables fill, which no graph may hold
            work(*arguments)
        own.wait_stream(stream)
        if CudaGraph._pool is None:
            CudaGraph._pool = torch.cuda.graph_pool_handle()
        reserved = torch.cuda.memory_reserved(device)
        self._graph = torch.cuda.CUDAGraph()
        # Another thread answers calls of peers meanwhile, and may allocate.
        with torch.cuda.graph(self._graph, pool=CudaGraph._pool, capture_error_mode="thread_local"):
            work(*arguments)
        self.nbytes = torch.cuda.memory_reserved(device) - reserved
        for tensor, kept in zip(restored, before, strict=True):
            tensor.copy_(kept)

    def __call__(self) -> None:
        self._graph.replay()


class Recording:
    """A Recorder of one of these kinds."""

    def __init__(self, name: str, kind: Callable[..., Replay]) -> None:
        self.name, self._kind = name, kind

    def __call__(self, work: Work, *arguments: Any, restored: Sequence[Tensor] = ()) -> Replay:
        return self._kind(work, *arguments, restored=restored)


def compiled_by(backend: str) -> Recording:
    """Compiled by one of torch's backends."""
    return Recording("compiled", partial(Compiled, backend=backend))


REPEATING, COMPILED, CUDA_GRAPH = (
    Recording("calls", Repeating),
    compiled_by("inductor"),
    Recording("graphs", CudaGraph),
)


def recorder(environment: Mapping[str, str] = os.environ) -> Recorder | None:
    """How segments of steps are recorded by the backend that serves; None where that gains nothing.

    The compiled kernels run whole layers as one call already (kernels.layer_runs). SettingError where compiling is
    asked for and cannot be.
    """
    backend = backends.active().NAME
    if not backends.is_on_host():
        return CUDA_GRAPH if is_on(environment, GRAPHS_VARIABLE, unset=True) else None
    if not is_on(environment, COMPILE_VARIABLE) or backend != "torch":
        return None
    _try_compiler(environment)
    torch._dynamo.config.recompile_limit = max(
        torch._dynamo.config.recompile_limit, 256
    )  # shapes of one function
    return COMPILED


@functools.cache  # asked for every share that a node loads
def _fault_of(compiler: str) -> str:
    """Why a program does not run as a compiler does; empty if it does."""
    try:
        tried = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"ends with code {tried.returncode}" if tried.returncode else ""


def _try_compiler(environment: Mapping[str, str]) -> None:
    """SettingError unless there is a C++ compiler that runs."""
    names = shlex.split(environment.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    advice = (
        "which torch.compile needs; install one, with which `make install` builds the compiled kernels as well, "
        "or start without --compile"
    )
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise SettingError(
            f"--compile ({COMPILE_VARIABLE}): found no C++ compiler ({', '.join(names)}) on PATH, {advice}"
        )
    if fault := _fault_of(found):
        raise SettingError(
            f"--compile ({COMPILE_VARIABLE}): `{found} --version` {fault}, so there is no C++ compiler that runs, {advice}"
        )


def why_not_compiled(environment: Mapping[str, str] = os.environ) -> str | None:
    """What to tell a person who asks for compiling where the kernels need none; None where they do, or nobody asked."""
    backend = backends.active().NAME
    if not is_on(environment, COMPILE_VARIABLE) or (backends.is_on_host() and backend == "torch"):
        return None
    there = "keep captured graphs" if not backends.is_on_host() else "are compiled ahead of time"
    return f"--compile changes nothing here: the {backend} kernels {there}; it is for those of plain torch (EDGE_KERNELS=torch)"
