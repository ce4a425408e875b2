"""A node's daemon and a coordinator that is played by hand: shares that are released before they are there."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime.model.checkpoint import Checkpoint, Known
from edge_runtime.node.daemon import NodeDaemon
from edge_runtime.protocol import Deploy, Deployed, DeployFailed, DeployProgress, Heartbeat, Release, Share
from edge_runtime.weights.manifest import digest_of, head_chunks
from edge_runtime.weights.stores import CacheFolder, FullFolder
from tests.support.clusters import free_ports_to_listen, wait_for
from tests.support.givers import CLOCK, Giver
from topology.cluster import MIB, Cluster, Node

SETTINGS = {"context_tokens": 128, "max_batch_rows": 32, "max_requests": 4, "call_deadline_s": 1.0}
SLOW_BPS = 40e6  # 5 MB/s: a layer of experts takes a good second


@pytest.fixture
def coordinator(demo_model: Path) -> Iterator[Giver]:
    """Has the model, and gives it away slowly."""
    full = FullFolder(Checkpoint.open(demo_model))
    with Giver("coordinator", full, gives_digests=True, rate_bps=SLOW_BPS) as giver:
        yield giver


@pytest.fixture
def node(coordinator: Giver, demo_model: Path, tmp_path: Path) -> Iterator[NodeDaemon]:
    """A node whose cache has the heads of the model's files, running."""
    full = FullFolder(Checkpoint.open(demo_model))
    cache = CacheFolder(tmp_path / "cache", full.manifest)
    for chunk in head_chunks(full.manifest):
        cache.write(chunk, full.read(chunk), digest_of(full.read(chunk)))
    known = Known(full.manifest.model_hash, full.manifest.tied_head, cache.is_here)
    me = Node(
        name="n1",
        address=f"127.0.0.1:{free_ports_to_listen(1)[0]}",
        memory_bytes=500 * MIB,
        roles=frozenset({"experts"}),
    )
    cluster = Cluster(
        name="test", model="", nodes=(me,), coordinator=coordinator.address.address, heartbeat_s=0.1
    )
    daemon = NodeDaemon(cluster, me, Checkpoint.open(cache.folder, known), None, CLOCK, cache)
    faults: list[BaseException] = []

    def run() -> None:
        try:
            daemon.run()
        except BaseException as fault:
            faults.append(fault)
            raise

    thread = threading.Thread(target=run, name="node")
    thread.start()
    yield daemon
    daemon.stop()
    thread.join(20.0)
    assert not thread.is_alive() and not faults


def share_of(epoch: int, *experts: int) -> Deploy:
    return Deploy(epoch, Share(0, 0, [list(experts)] * 6), settings=SETTINGS)


def said(coordinator: Giver, kind: type) -> list:
    return [message for message in coordinator.heard if isinstance(message, kind)]


def test_a_share_released_while_its_weights_come_is_dropped_and_the_next_one_loads(
    coordinator: Giver, node: NodeDaemon
) -> None:
    coordinator.tell(share_of(1, *range(32)))
    wait_for(lambda: said(coordinator, DeployProgress), "epoch 1 begins to load")
    coordinator.tell(Release(1), share_of(2, 0))
    wait_for(lambda: said(coordinator, Deployed), "epoch 2 is loaded")
    assert [message.epoch for message in said(coordinator, Deployed)] == [2]
    assert not said(coordinator, DeployFailed)
    wait_for(lambda: said(coordinator, Heartbeat)[-1].report.epoch == 2, "epoch 2 is what it serves")


def test_a_share_that_waits_for_another_to_load_may_be_released_too(
    coordinator: Giver, node: NodeDaemon
) -> None:
    coordinator.tell(share_of(1, 0, 1), share_of(2, *range(32)), Release(2))
    wait_for(lambda: said(coordinator, Deployed), "epoch 1 is loaded")
    coordinator.tell(share_of(3, 1))
    wait_for(lambda: len(said(coordinator, Deployed)) == 2, "epoch 3 is loaded")
    assert [message.epoch for message in said(coordinator, Deployed)] == [1, 3]


def test_what_the_coordinator_does_not_name_again_is_dropped_while_it_loads_and_nothing_else_is(
    coordinator: Giver, node: NodeDaemon
) -> None:
    """The connection was cut while a change was called off: a node that is back is told what there is now."""
    beside = msgspec.structs.replace(share_of(2, *range(32)), counts_now=False)
    coordinator.tell(share_of(1, 0))
    wait_for(lambda: said(coordinator, Deployed), "epoch 1 is loaded")
    coordinator.tell(beside)
    wait_for(lambda: said(coordinator, DeployProgress)[-1].epoch == 2, "epoch 2 begins to load")
    coordinator.tell(share_of(1, 0), msgspec.structs.replace(share_of(3, 0, 1), counts_now=False))
    wait_for(lambda: len(said(coordinator, Deployed)) == 3, "epochs 1 and 3 are loaded")
    assert [message.epoch for message in said(coordinator, Deployed)] == [1, 1, 3]
    assert not said(coordinator, DeployFailed)


def test_what_counts_now_is_loaded_though_another_share_comes_while_it_waits(
    coordinator: Giver, node: NodeDaemon
) -> None:
    coordinator.tell(
        share_of(1, 0, 1), share_of(2, 1), msgspec.structs.replace(share_of(3, 0), counts_now=False)
    )
    wait_for(lambda: len(said(coordinator, Deployed)) == 3, "all are loaded")
    assert [message.epoch for message in said(coordinator, Deployed)] == [1, 2, 3]
    wait_for(lambda: said(coordinator, Heartbeat)[-1].report.epoch == 2, "epoch 2 is what it serves")


def test_a_node_told_to_stop_while_it_fetches_stops_at_once(coordinator: Giver, node: NodeDaemon) -> None:
    coordinator.tell(share_of(1, *range(32)))
    wait_for(lambda: said(coordinator, DeployProgress), "epoch 1 begins to load")
    node.stop()
    loaders = lambda: [t for t in threading.enumerate() if t.name == "share-loader"]  # noqa: E731
    wait_for(lambda: not loaders(), "the loader has ended", 5.0)
    assert psutil.Process().is_running()
