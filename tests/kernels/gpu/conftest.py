"""Where the kernels can run, their tests run here; elsewhere `test_interpreter.py` runs the same files in a child."""

import os

import pytest
import torch

from kernels import backends
from tests.support import gpu

EVERYWHERE = {"test_compiled.py", "test_interpreter.py", "test_quantise.py"}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path):
    here = collection_path.parent.name == "gpu" and collection_path.name.startswith("test_")
    if here and collection_path.name not in EVERYWHERE and not (INTERPRETED or torch.cuda.is_available()):
        return True
    return None


def pytest_collection_modifyitems(items):
    """The child has a deadline as a whole; a loaded machine must not fail one of its tests before."""
    if INTERPRETED:
        for item in items:
            item.add_marker(pytest.mark.timeout(0))


@pytest.fixture
def device():
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def random(device):
    """Normal float32 values of a shape, the same in every run."""
    generator = torch.Generator().manual_seed(11)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    draw.integers = lambda high, shape: torch.randint(high, shape, generator=generator).int().to(device)
    return draw


@pytest.fixture
def close():
    """Assert that a result is what float64 says, as near as the operands allow: see `gpu.error`."""

    def check(found, expected, operand=torch.float32):
        assert gpu.error(found, expected) < (2e-6 if INTERPRETED else gpu.BOUND[operand])

    return check


@pytest.fixture
def reference():
    """The plain definition serves behind `kernels.ops`."""
    return backends.use("reference")
