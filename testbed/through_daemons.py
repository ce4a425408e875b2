"""The same comparison through real daemons: a shaped cluster for each placement, requests that come at random, and what
answers and nodes say of them. Knows no model.
"""

import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edge_runtime.client import Answer, Prompt
from edge_runtime.clock import Clock
from edge_runtime.errors import ClusterError
from testbed.bench import READY_S, RunningCluster, difference, settled
from testbed.experiment import Policy

SHAPE_VARIABLE = "EDGE_SHAPE"


def shaped_file(source: Path, folder: Path, policy: Policy, rtt: str, bandwidth: str) -> Path:
    """A copy of a topology file with equal links and the policy's placement and selector."""
    text = source.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^\[\[link\]\].*?(?=^\[|\Z)", "", text)
    text = re.sub(r"(?ms)^\[default_link\].*?(?=^\[|\Z)", "", text)
    text = re.sub(r"(?m)^(placement|selector) *=.*\n", "", text)
    model = re.search(r'(?m)^model *= *"([^"]+)"', text)
    if model is not None:
        absolute = (source.parent / model[1]).resolve().as_posix()
        text = text.replace(model[0], f'model = "{absolute}"')
    settings = f'placement = "{policy.placement}"\nselector = "{policy.selector}"\n'
    if policy.ratio is not None:
        text = re.sub(r"(?m)^memory_ratio *=.*\n", "", text)
        settings += f"memory_ratio = {policy.ratio}\n"
    text = text.replace("[cluster]\n", f"[cluster]\n{settings}", 1)
    text += f'\n[default_link]\nrtt = "{rtt}"\nbandwidth = "{bandwidth}"\n'
    path = folder / "topology.toml"
    path.write_text(text, encoding="utf-8")
    return path


def through_daemons(
    topology: Path,
    policies: Sequence[Policy],
    prompts: Sequence[str],
    clock: Clock,
    *,
    rtt: str,
    bandwidth: str,
    num_requests: int,
    rate_per_s: float,
    max_tokens: int,
    seed: int,
    progress: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    """One row for each policy, all with the same arrivals."""
    rows = []
    for policy in policies:
        with TemporaryDirectory(prefix="edge-stand-ins-") as folder:
            path = shaped_file(topology, Path(folder), policy, rtt, bandwidth)
            os.environ[SHAPE_VARIABLE] = "1"
            try:
                with RunningCluster(path, clock) as running:
                    rows.append(
                        _measured(running, policy, prompts, clock, num_requests, rate_per_s, max_tokens, seed)
                    )
            finally:
                del os.environ[SHAPE_VARIABLE]
        progress("daemons", len(rows), len(policies))
    return rows


def _measured(
    running: RunningCluster,
    policy: Policy,
    prompts: Sequence[str],
    clock: Clock,
    num_requests: int,
    rate_per_s: float,
    max_tokens: int,
    seed: int,
) -> dict[str, Any]:
    draw = random.Random(seed)
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1, "quality": policy.budget}
    due, moments = clock.now() + 0.5, []
    for _ in range(num_requests):
        due += draw.expovariate(rate_per_s)
        moments.append(due)
    answers: list[Answer | None] = [None] * num_requests

    def ask(index: int) -> None:
        clock.sleep(max(0.0, moments[index] - clock.now()))
        with running.client() as client:
            client.connect()
            prompt = Prompt(prompt=prompts[index % len(prompts)], sampling=sampling)
            [answers[index]] = client.run([prompt], wait_ready_s=READY_S)

    with running.client() as client:
        client.connect()
        before = settled(client, clock)
        began = clock.now()
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(num_requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = clock.now() - began
        counted = difference(before, settled(client, clock))
    results = [answer.as_json() for answer in answers if answer is not None and answer.finished is not None]
    if len(results) < num_requests:
        raise ClusterError(f"{policy.name}: {num_requests - len(results)} of {num_requests} requests failed")
    tpot = np.array([result["timing"]["home"]["tpot_s"] for result in results]) * 1e3
    tokens = sum(result["usage"]["completion_tokens"] for result in results)

    def mean(key: str) -> float:
        return fmean(result["bill"][key] for result in results)

    return {
        "policy": policy.name,
        "placement": policy.placement,
        "budget": policy.budget,
        "tpot_ms": float(tpot.mean()),
        "tpot_p50_ms": float(np.median(tpot)),
        "tpot_p95_ms": float(np.quantile(tpot, 0.95)),
        "mb_per_1000_tokens": (counted["bytes_out"] + counted["bytes_in"]) / tokens / 1e3,
        "calls_per_token": counted["calls_made"] / tokens,
        "local_exact": mean("exact_here"),
        "local_substitute": mean("substituted"),
        "remote": mean("exact_elsewhere"),
        "tokens_per_s": tokens / seconds,
        "spent_per_token": sum(result["bill"]["budget_spent"] for result in results) / tokens,
    }
