"""The kernels' own tests, run in a child whose triton interprets."""

from pathlib import Path

import pytest

from tests.support.interpreter import interpreted

HERE = Path(__file__).resolve().parent
FILES = ("test_attention.py", "test_backend.py", "test_invariance.py", "test_products.py", "test_rows.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # 30 s at most on a free core
@pytest.mark.parametrize("name", FILES)
def test_the_kernels_agree_with_the_reference_in_the_interpreter(name, repository):
    interpreted(HERE / name, repository, EDGE_KERNELS="")


def test_every_file_of_kernel_tests_is_run_by_someone():
    alone = {"test_compiled.py", "test_interpreter.py", "test_quantise.py"}
    assert {path.name for path in HERE.glob("test_*.py")} == alone | set(FILES)
