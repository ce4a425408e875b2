"""Nodes of the demo model on a GPU beside one on the processor, by real daemons: tokens and log probabilities.

In float32 both sides multiply alike but for the order of sums, so the best token is the same at every step. In the stored
format the GPU rounds rows to bfloat16, so what is compared is how likely the first token is.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import SystemClock
from edge_runtime.errors import ClusterError
from testbed.bench.clusters import RunningCluster
from testbed.bench.sitting import free_ports
from testbed.carried import DEMO_MODEL, PROMPTS
from topology.cluster import GPU_RESERVE_BYTES, MIB

NUM_PROMPTS = 8
MAX_TOKENS = 24
READY_S = 200.0  # kernels compile while a node gets ready
NATS_FLOAT32 = 1e-3
NATS_STORED = 0.15

HEAD = """
[cluster]
name = "gpu-check"
model = "{model}"
coordinator = "127.0.0.1:{port}"
kv_tokens = 4096
"""
NODE = """
[[node]]
name = "{name}"
address = "127.0.0.1:{port}"
memory = "{memory}"
device = "{device}"
weight_format = "{format}"
trunk_format = "{format}"
"""


def topology_text(nodes: list[tuple[str, int, str]], format: str, ports: list[int], roles: str = "") -> str:
    """A cluster of nodes (name, memory in MiB on a processor, device), all in one format; `roles` are those of the last."""
    reserve = {"cpu": 0}
    text = HEAD.format(model=DEMO_MODEL, port=ports[0])
    for (name, mib, device), port in zip(nodes, ports[1:], strict=True):
        memory = f"{mib + reserve.get(device, GPU_RESERVE_BYTES // MIB)} MiB"
        text += NODE.format(name=name, memory=memory, device=device, format=format, port=port)
    return text + roles


def answers(text: str, max_tokens: int = MAX_TOKENS) -> list[Answer]:
    """What a cluster answers to the first prompts of the testbed, all at once."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    sampling = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 1}
    prompts = [Prompt(prompt=json.loads(line)["prompt"], sampling=sampling) for line in lines]
    with TemporaryDirectory(prefix="edge-gpu-") as folder:
        path = Path(folder) / "topology.toml"
        path.write_text(text, encoding="utf-8")
        with RunningCluster(path, SystemClock(), READY_S) as running, running.client() as client:
            client.connect()
            found = client.run(prompts, wait_ready_s=READY_S)
    for answer in found:
        if answer.failed is not None:
            raise ClusterError(f"a prompt failed: {answer.failed.detail}")
    return found


def node_checks(device: str) -> Iterator[tuple[str, float, float]]:
    """(what, how far off, how far it may be) of nodes on this device."""
    ports = free_ports(3)

    def one(where: str, format: str) -> list[Answer]:
        return answers(topology_text([("solo", 1024, where)], format, ports[:2]))

    expected, found = one("cpu", "float32"), one(device, "float32")
    wrong = sum(a.token_ids != b.token_ids for a, b in zip(found, expected, strict=True))
    yield "node, float32: answers that differ", float(wrong), 0.5
    yield "node, float32: nats of the first token", _nats(found, expected), NATS_FLOAT32
    expected, found = one("cpu", "as_stored"), one(device, "as_stored")
    yield "node, as stored: nats of the first token", _nats(found, expected), NATS_STORED
    for home, host in ((device, "cpu"), ("cpu", device)):
        nodes = [("desk", 408, home), ("attic", 362, host)]
        text = topology_text(nodes, "as_stored", ports, 'roles = ["experts"]\n')
        found = answers(text)
        shares = [answer.as_json()["bill"]["exact_elsewhere"] for answer in found]
        yield f"home on {home}, experts on {host}: nats", _nats(found, expected), NATS_STORED
        yield f"home on {home}, experts on {host}: prompts without a call", float(shares.count(0.0)), 0.5


def _nats(found: list[Answer], expected: list[Answer]) -> float:
    """The largest distance of log probabilities of first tokens, of prompts whose first token is the same; inf if few are."""
    pairs = [(a.logprobs[0], b.logprobs[0]) for a, b in zip(found, expected, strict=True)]
    same = [abs(a.logprob - b.logprob) for a, b in pairs if a.token_id == b.token_id]
    return max(same) if len(same) > len(pairs) // 2 else float("inf")
