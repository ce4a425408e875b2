"""What every test may count on: one compute thread, no hub, a bounded hypothesis profile, the demo model's folder."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Before the first import of torch, and for every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile(
    "commit",
    max_examples=50,
    deadline=None,  # two shared cores: a slow example is not a wrong one
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", parent=settings.get_profile("commit"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "commit"))

ROOT = Path(__file__).resolve().parent.parent


INTEGRATION = "tests/integration/"


class FilesAndClusters(LoadScopeScheduling):
    """Which tests stay together where two processes share them: a file's, and all that run clusters.

    Clusters share daemons and mind the time, so one at a time is enough; what else there is runs beside them.
    """

    def _split_scope(self, nodeid: str) -> str:
        return INTEGRATION if _has_cluster(nodeid) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndClusters:
    """The processes of `--numprocesses` share tests so, whatever `--dist` says."""
    return FilesAndClusters(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters first: they take almost half of the time, and the rest runs beside them."""
    items.sort(key=lambda item: not _has_cluster(item.nodeid))


def _has_cluster(nodeid: str) -> bool:
    return nodeid.startswith(INTEGRATION) and not nodeid.startswith(f"{INTEGRATION}gpu/")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of the trained model that every clone carries."""
    return ROOT / "testbed" / "models" / "edge-moe-demo"
