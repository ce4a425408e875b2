"""The native CPU kernels as an optional extension. All metadata stands in pyproject.toml.

Installing never fails for want of a compiler: the runtime then works on its torch path, and `edge-runtime doctor`
says so.
"""

import platform
from pathlib import Path
from typing import Any

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu/native")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",  # only what is written as fma is fused, on every machine
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",  # these two: GCC 12's own AVX-512 header
    "-Wno-uninitialized",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
ISA_FLAGS = {  # one unit per instruction set, all of the same source; products in whole numbers have units of their own
    "isa_avx512.cpp": AVX512,
    "isa_avx2.cpp": AVX2,
    "integer_amx.cpp": [*AVX512, "-mavx512vnni"],  # tiles are written in assembler
    "integer_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "integer_avx512.cpp": AVX512,
    "integer_avx2.cpp": AVX2,
}


class BuildNative(build_ext):
    """Compiles each ISA unit with its own flags; on other machines than x86-64 those units are empty."""

    def build_extension(self, ext: Any) -> None:
        compile_one = self.compiler._compile

        def compile_unit(
            obj: str, src: str, ext_name: str, cc_args: list, extra: list, pp_opts: list
        ) -> None:
            flags = ISA_FLAGS.get(Path(src).name, [])
            if platform.machine().lower() not in ("x86_64", "amd64"):
                flags = []
            compile_one(obj, src, ext_name, cc_args, [*extra, *flags], pp_opts)

        self.compiler._compile = compile_unit
        try:
            super().build_extension(ext)
        finally:
            self.compiler._compile = compile_one


native = Pybind11Extension(
    "kernels.cpu._native",
    sources=sorted(str(path) for path in FOLDER.glob("*.cpp")),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    include_dirs=[str(FOLDER)],
    extra_compile_args=FLAGS,
    optional=True,
)

setup(ext_modules=[native], cmdclass={"build_ext": BuildNative})
