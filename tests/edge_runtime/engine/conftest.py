"""The demo model in memory for the engine's tests, on one thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.engines import Whole, whole_model


@pytest.fixture(scope="module")
def whole(demo_model) -> Iterator[Whole]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield whole_model(demo_model)
    torch.set_num_threads(threads)
