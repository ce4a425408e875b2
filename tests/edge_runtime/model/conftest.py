"""The kernels that serve a test."""

from collections.abc import Iterator

import pytest

from kernels import backends


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the backend that serves during the test; `indirect` names others."""
    before = backends.active().NAME
    try:
        backends.use(request.param)
    except ImportError as error:
        pytest.skip(f"this backend cannot be had here: {error}")
    yield request.param
    backends.use(before)
