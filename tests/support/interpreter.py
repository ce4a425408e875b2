"""Run test files in a child process whose triton interprets: the variable must stand before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def interpreted(path: Path, repository: Path, **variables: str) -> None:
    """Run the tests of a file there; what failed is what is said."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | variables
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
