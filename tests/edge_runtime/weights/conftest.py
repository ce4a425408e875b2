"""A tiny model, the store of its whole folder, and caches of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.weights.stores import CacheFolder, FullFolder
from tests.support.tiny_models import write_tiny_qwen3_moe


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model folder with everything in it."""
    folder = write_tiny_qwen3_moe(tmp_path_factory.mktemp("whole") / "tiny", tie_word_embeddings=False)
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    return Checkpoint.open(folder)


@pytest.fixture(scope="session")
def full(whole: Checkpoint) -> FullFolder:
    return FullFolder(whole)


@pytest.fixture
def new_cache(tmp_path: Path, full: FullFolder) -> Callable[[], CacheFolder]:
    """Makes a further process's view of one cache folder."""
    return lambda: CacheFolder(tmp_path / "cache", full.manifest)
