"""The kernels' own tests, run in a child whose triton interprets: the variable must stand before triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILES = ("test_attention.py", "test_invariance.py", "test_products.py", "test_rows.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # 30 s at most on a free core
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_agree_with_the_reference_in_the_interpreter(name, repository):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["-q", "-x", "--no-header", "-p", "no:cacheprovider", str(HERE / name)]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]


def test_every_file_of_kernel_tests_is_run_by_someone():
    alone = {"test_compiled.py", "test_interpreter.py", "test_quantise.py"}
    assert {path.name for path in HERE.glob("test_*.py")} == alone | set(FILES)
