"""Run test files in a child process whose triton interprets: the variable must stand before triton is imported."""

import os
import platform
import subprocess
import sys
from pathlib import Path

# The interpreter's products are numpy's. Its BLAS gives a row of 16 x 16 other bits at another place of the tile where it
# has the kernels of processors with AVX2 and no AVX-512 (396 of 450 shapes differ on an EPYC), with older ones never; on a
# GPU a row's sum has one order wherever it stands.
SUMS_BY_ROW = {"OPENBLAS_CORETYPE": "Nehalem"} if platform.machine() == "x86_64" else {}


def interpreted(path: Path, repository: Path, **variables: str) -> None:
    """Run the tests of a file there; what failed is what is said."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | SUMS_BY_ROW | variables
    arguments = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", str(path)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
