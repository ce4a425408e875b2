"""What people were shown is what they get: a preview's placement is the one that applying the same file begins."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from edge_runtime.clock import ManualClock
from edge_runtime.coordinator.planner import Planner
from edge_runtime.coordinator.routes import Routes
from edge_runtime.coordinator.state import Beat
from edge_runtime.coordinator.wishes import PROMISE_S, Wishes
from edge_runtime.protocol import Apply, Applying, Message, NodeReport, Planned
from tests.edge_runtime.coordinator.test_epochs import PARTS, World
from topology.files import read_cluster_text
from topology.speeds import NodeSpeed

FILE = """
[cluster]
name = "test"
model = "model"
coordinator = "127.0.0.1:5600"
kv_tokens = 1024
max_batch_rows = 16

[[node]]
name = "n1"
address = "127.0.0.1:5601"
memory = "357 MiB"

[[node]]
name = "n2"
address = "127.0.0.1:5602"
memory = "354 MiB"
roles = ["experts"]

[[node]]
name = "n3"
address = "127.0.0.1:5603"
memory = "354 MiB"
roles = ["experts"]
"""
EDITED = FILE.replace("max_batch_rows", "memory_ratio = 1.0\nmax_batch_rows")


class Asked:
    """A coordinator with three nodes, whose clients ask one thing after another."""

    def __init__(self, folder: Path) -> None:
        self.source = str(folder / "topology.toml")
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({"model_type": "olmoe"}))
        self.cluster = read_cluster_text(FILE, Path(self.source))
        self.world, self.clock = World(self.cluster), ManualClock()
        for name in self.cluster.node_names:
            self.world.start(name)
        self.world.settle(1.0)
        self.woken = threading.Event()
        self.planner = Planner(self.woken.set)
        self.wishes = Wishes(
            self.world.epochs,
            self.planner,
            Routes(self.cluster, PARTS, None, seed=0),
            self.clock,
            footprint=PARTS,
            keys=None,
            carry_out=lambda commands: None,
        )

    def told(self, what: str, text: str) -> Message:
        answers: list[Message] = []
        getattr(self.wishes, what)(Apply(text, self.source), answers.append)
        while not answers:
            assert self.woken.wait(20.0), "no answer came"
            self.woken.clear()
            self.planner.deliver()
        return answers[0]

    def measure(self, name: str, bytes_per_s: float) -> None:
        """The node reports another speed, as it does all the time."""
        speed = NodeSpeed(memory_bytes_per_s=bytes_per_s)
        self.world.call("apply", Beat(name, NodeReport(epoch=1, speed=speed)))

    def held(self) -> dict[str, int]:
        """What the change under way has nodes hold, in bytes."""
        placement = self.world.epochs.plans[self.world.epochs.newest].placement
        return {share.node: share.trunk_bytes + share.expert_bytes for share in placement.nodes}


@pytest.fixture
def asked(tmp_path):
    found = Asked(tmp_path)
    yield found
    found.planner.stop()


def promised(planned: Message) -> dict[str, int]:
    assert isinstance(planned, Planned), planned
    return {name: holds["weight_bytes"] for name, holds in planned.body["holds"].items()}


@pytest.mark.parametrize("later_s, is_kept", [(PROMISE_S - 1, True), (PROMISE_S, False)])
def test_what_a_preview_showed_is_applied_though_nodes_report_other_speeds(asked, later_s, is_kept):
    shown = promised(asked.told("preview", EDITED))
    asked.measure("n2", 1e8)
    asked.measure("n3", 40e9)
    fresh = asked.world.epochs.work_out(asked.world.epochs.ask(read_cluster_text(EDITED, Path(asked.source))))
    other = {share.node: share.trunk_bytes + share.expert_bytes for share in fresh.plan.placement.nodes}
    assert other != shown, "made from what is measured now it would be another"
    asked.clock.advance(later_s)
    assert isinstance(asked.told("apply", EDITED), Applying)
    assert asked.held() == (shown if is_kept else other)


def test_another_file_is_not_what_was_shown(asked):
    shown = promised(asked.told("preview", EDITED))
    wanted = replace(asked.cluster, memory_ratio=3.0)
    assert isinstance(
        asked.told("apply", EDITED.replace("memory_ratio = 1.0", "memory_ratio = 3.0")), Applying
    )
    assert asked.world.epochs.plans[asked.world.epochs.newest].cluster == wanted
    assert asked.held() != shown
