"""A node without the model's folder: gets its share from a peer or the coordinator, once, and answers as all others do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import LocalCluster, wait_for, write_topology
from tests.support.processes import CliProcess, accepts_connections
from topology.files import read_cluster

PROMPTS = ["Once upon a time", "How do I copy a folder?", "The lighthouse keeper", "In the kitchen"]
SCENARIO = """\
[cluster]
name = "apart"
model = "somewhere"
coordinator = "127.0.0.1:5550"
memory_ratio = 1.0
kv_tokens = 2048
heartbeat = "200 ms"
lost_after = "2 s"

[[node]]
name = "a"
address = "127.0.0.1:5551"
memory = "MEMORY"

[[node]]
name = "b"
address = "127.0.0.1:5552"
memory = "MEMORY"
"""

pytestmark = pytest.mark.timeout(120)


class Apart(LocalCluster):
    """Coordinator and node a with the model's folder; node b has another copy of the file, an empty folder and a cache."""

    def __init__(self, folder: Path, rate: str, memory: str) -> None:
        (folder / "there").mkdir(parents=True)
        (folder / "there" / "scenario.toml").write_text(SCENARIO.replace("MEMORY", memory))
        source = write_topology(
            folder / "here", folder / "there" / "scenario.toml", weights_rate=json.dumps(rate)
        )
        super().__init__(source)
        (folder / "there" / "empty").mkdir()
        self.other_file = folder / "there" / "topology.toml"
        text = source.read_text()
        [model] = [line for line in text.splitlines() if line.startswith("model = ")]
        self.other_file.write_text(text.replace(model, 'model = "empty"'))
        self.cache = folder / "cache"

    def up(self) -> None:
        self.start_coordinator()
        self.start_node("a")
        port = int(read_cluster(self.topology).coordinator.rpartition(":")[2])
        wait_for(lambda: accepts_connections(port), "the coordinator listens", 60.0)
        wait_for(lambda: self.is_ready("a"), "node a is ready", 40.0)

    up_at_once = up  # two files, so each by its own command

    def start_b(self, cache: Path | None = None) -> CliProcess:
        environment = self.env | {"EDGE_RUNTIME_CACHE": str(cache or self.cache)}
        process = CliProcess("node", "b", "--topology", self.other_file, env=environment)
        self._by_hand.append(process)
        return process

    def is_ready(self, name: str) -> bool:
        return self.node(name)["state"] == "ready"

    def numbers(self, name: str) -> dict[str, Any]:
        return self.node(name)["report"].get("numbers", {})

    def texts(self) -> list[tuple[str, str]]:
        """By prompt: text and home."""
        entries = [{"prompt": prompt, "max_tokens": 24, "temperature": 0.0} for prompt in PROMPTS]
        return [(answer["text"], answer["home"]) for answer in self.answers(entries)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Apart]]:
    started: list[Apart] = []

    def begin(rate: str, memory: str) -> Apart:
        started.append(Apart(tmp_path, rate, memory))
        return started[0].__enter__()

    yield begin
    for cluster in started:
        cluster.close()


def test_a_node_without_the_model_gets_its_share_from_a_peer_and_a_second_start_moves_nothing(
    start: Callable[[str, str], Apart], one_node: LocalCluster
) -> None:
    cluster = start("1 Gbit/s", "390 MiB")
    entries = [{"prompt": prompt, "max_tokens": 24, "temperature": 0.0} for prompt in PROMPTS]
    expected = [answer["text"] for answer in one_node.answers(entries)]

    refused = cluster.start_b(Path("/dev/null/cache")).finish(30.0)
    assert refused.exit_code == 2 and "Traceback" not in refused.stderr
    assert "cannot be written (Not a directory); name another one with EDGE_RUNTIME_CACHE" in refused.stderr

    b = cluster.start_b()
    cluster.wait_until_ready(60.0)
    fetched = wait_for(
        lambda: cluster.numbers("b").get("weights_fetched_bytes"), "b has told what it fetched"
    )
    served = wait_for(lambda: cluster.numbers("a").get("weights_served_bytes"), "a has told what it gave")
    weights = cluster.node("b")["weight_bytes"]
    assert 0.8 * weights < fetched < 1.2 * weights < 35e6 and served >= 0.9 * fetched
    found = cluster.texts()
    assert [text for text, _ in found] == expected and {home for _, home in found} == {"a", "b"}

    b.stop()  # a has no room for what b held: b gets its own share again
    cluster.start_b()
    cluster.wait_until_ready(60.0)
    wait_for(lambda: "weights_fetched_bytes" in cluster.numbers("b"), "b has told what it fetched")
    assert cluster.numbers("b")["weights_fetched_bytes"] == 0
    assert [text for text, _ in cluster.texts()] == expected


def test_a_source_killed_in_the_middle_is_replaced_by_the_coordinator(
    start: Callable[[str, str], Apart], one_node: LocalCluster
) -> None:
    """All of the model ends up on b, the only node left; what a had given by then is not fetched again."""
    cluster = start("60 Mbit/s", "420 MiB")
    entries = [{"prompt": prompt, "max_tokens": 24, "temperature": 0.0} for prompt in PROMPTS]
    expected = [answer["text"] for answer in one_node.answers(entries)]
    cluster.start_b()
    told = wait_for(lambda: cluster.node("b")["loading"], "b says from whom it fetches", 40.0)
    assert (
        "fetching weights from a at" in told and "(fetching weights from a" in cluster.status()["waiting_for"]
    )
    assert 0 < cluster.node("b")["loaded_bytes"]
    cluster.kill("a")
    wait_for(lambda: cluster.is_ready("b") and cluster.node("b")["experts"] == 192, "b has all experts", 60.0)
    assert [text for text, _ in cluster.texts()] == expected
    wait_for(
        lambda: cluster.numbers("b").get("weights_fetched_bytes", 0) > 34e6, "b has told what it fetched"
    )
    assert cluster.numbers("b")["weights_fetched_bytes"] < 36e6  # the model has 35.0 MB: nothing came twice
