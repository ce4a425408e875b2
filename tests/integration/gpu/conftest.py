"""These run in a child whose triton interprets, see `test_in_interpreter.py`; elsewhere they are not collected."""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path):
    here = collection_path.parent.name == "gpu" and collection_path.name.startswith("test_on_")
    return True if here and not INTERPRETED else None


def pytest_collection_modifyitems(items):
    """The child has a deadline as a whole; a loaded machine must not fail one of its tests before."""
    for item in items:
        if INTERPRETED:
            item.add_marker(pytest.mark.timeout(0))
