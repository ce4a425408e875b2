"""Clusters that several modules share: each starts once and is left as it was found."""

from collections.abc import Iterator

import pytest

from tests.support.clusters import LocalCluster, write_topology


@pytest.fixture(scope="session")
def eight_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The scenario of `make demo`, running. Nobody kills a node of it."""
    with LocalCluster(write_topology(tmp_path_factory.mktemp("eight"), "eight_nodes")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The whole model on one node, running."""
    with LocalCluster(write_topology(tmp_path_factory.mktemp("one"), "one_node")) as cluster:
        yield cluster
