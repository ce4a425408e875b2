"""Kills, restarts, freezes, cuts and slows nodes of a cluster while it answers; every answer must be the undisturbed one.

Which trouble comes when follows from a seed (`next_trouble`, pure); the rest starts real daemons and does it to them. Knows
the client and the daemons' processes, nothing of how they cope.
"""

import contextlib
import os
import queue
import random
import signal
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_runtime import launch
from edge_runtime.client import Answer, Client, Prompt
from edge_runtime.clock import Clock
from edge_runtime.config import STATE_VARIABLE, state_dir
from edge_runtime.errors import ClusterError, EdgeError
from edge_runtime.protocol import ShapeLink, Tokens
from edge_runtime.spawner import Spawned
from edge_runtime.transport.keys import load_keys
from testbed import links
from topology.cluster import Cluster
from topology.files import read_cluster

ALL = "all"
KINDS = ("kill", "restart", "freeze", "cut", "slow")
READY_S = 180.0
REQUEST_S = 180.0  # a request that brings nothing for so long hangs
IDLE_S = 60.0  # how long the cluster may take to come to rest at the end
POLL_S = 0.1
MOST_AT_ONCE = 2  # nodes in trouble at the same time
GROWTH_BYTES = 48 << 20  # a process may have so much more resident at the end than at the beginning
SHAPE_VARIABLE = "EDGE_SHAPE"


@dataclass(frozen=True)
class Trouble:
    """One thing done to one node. length_s: until it is undone; peer: other end of the link, `all` for every link."""

    kind: str
    node: str
    length_s: float
    pause_s: float
    """After it began, until the next one may."""
    peer: str = links.ALL
    rtt_s: float = 0.0
    rate_bps: float = 0.0


def next_trouble(random_: random.Random, nodes: Sequence[str], busy: Sequence[str]) -> Trouble | None:
    """What comes next; None if enough nodes are in trouble. `busy` are those whose trouble is not over."""
    kind, node = random_.choice(KINDS), random_.choice(list(nodes))
    lengths = {
        "kill": (0.0, 8.0),
        "restart": (0.0, 1.0),
        "freeze": (0.5, 9.0),
        "cut": (0.5, 9.0),
        "slow": (2.0, 8.0),
    }
    length_s, pause_s = random_.uniform(*lengths[kind]), random_.uniform(0.5, 5.0)
    peer = random_.choice([links.ALL, *(name for name in nodes if name != node)])
    rtt_s, rate_bps = random_.uniform(0.01, 0.15), random_.uniform(5e6, 50e6)
    if len(busy) >= MOST_AT_ONCE or node in busy:
        return None
    if kind in ("cut", "slow"):
        return Trouble(kind, node, length_s, pause_s, peer, rtt_s, rate_bps)
    return Trouble(kind, node, length_s, pause_s)


@dataclass
class Record:
    """One request as it went. fault: empty if its answer was the undisturbed one."""

    entry: int
    began_s: float
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    homes: list[str] = field(default_factory=list)
    fault: str = ""


@dataclass
class Done:
    """A trouble that is over.

    pause_s      the longest wait for a next token, among the answers that ran when it began
    recovered_s  from its end (the undoing) until all nodes served again
    """

    trouble: Trouble
    began_s: float
    undone_s: float = 0.0
    pause_s: float = 0.0
    recovered_s: float | None = None


@dataclass(frozen=True)
class Report:
    """What came of it all."""

    seed: int
    requests: int
    right: int
    faults: dict[str, int]
    troubles: dict[str, int]
    moved: int
    """Answers that went on at another home."""
    calm_pause_s: float
    """Longest wait for a token in the undisturbed run."""
    pauses_s: dict[str, tuple[float, float]]
    """Kind of trouble, or ALL of them -> median and worst: the longest wait for a token while it lasted."""
    recoveries_s: dict[str, tuple[float, float]]
    """Likewise: from the undoing until the node served again."""
    not_at_rest: str
    """What was not as at the beginning once all was over; empty if all was."""
    seconds: float

    @property
    def is_well(self) -> bool:
        return self.right == self.requests and not self.not_at_rest

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.requests} requests in {self.seconds:.0f} s, {self.right} with the undisturbed text, "
            f"{self.moved} of them moved to another home",
            f"troubles: {', '.join(f'{count} {kind}' for kind, count in sorted(self.troubles.items())) or 'none'}",
            f"longest wait for a token while a trouble lasted, median and worst (undisturbed {self.calm_pause_s:.1f} s): "
            f"{_by_kind(self.pauses_s)}",
            f"from its end until the node served again: {_by_kind(self.recoveries_s)}",
            f"at rest: {self.not_at_rest or 'no request, all KV blocks free, memory as before'}",
        ]
        return "\n".join(lines + [f"{count} x {fault}" for fault, count in self.faults.items()])


def mixed_entries(prompts: Sequence[str], seed: int) -> list[Prompt]:
    """Requests of mixed length: short and long prompts, 2 to 64 tokens of answer."""
    random_ = random.Random(seed)
    entries = []
    for number, text in enumerate(prompts):
        body = text if number % 3 else " ".join(islice(cycle([text]), 3))
        sampling = {"max_tokens": random_.choice([2, 8, 16, 32, 64]), "ignore_eos": True, "temperature": 0.0}
        entries.append(Prompt(prompt=body[:700], sampling=sampling))
    return entries


class Chaos:
    """A cluster of this machine, up inside the `with` block, and what is done to it."""

    def __init__(self, topology: Path, clock: Clock, say: Any = None) -> None:
        self.cluster: Cluster = read_cluster(topology)
        self._topology = topology.absolute()
        self._clock = clock
        self._say = say or (lambda line: print(line, file=sys.stderr))
        self._folder = TemporaryDirectory(prefix="edge-chaos-")
        self._processes: dict[str, Spawned] = {}
        self._keys = load_keys(Path(self.cluster.keys), "client") if self.cluster.keys else None
        self._undisturbed: dict[int, list[int]] = {}

    def __enter__(self) -> "Chaos":
        os.environ[STATE_VARIABLE] = self._folder.name
        os.environ[SHAPE_VARIABLE] = "1"
        local = launch.start_local(self.cluster, self._topology)
        self._processes = dict(local.processes)
        try:
            launch.wait_ready(local, self.client, self._clock, READY_S, self._say)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        launch.stop_local(self._topology, self._clock, self._say)
        for process in self._processes.values():
            process.wait()
        self._folder.cleanup()

    def client(self) -> Client:
        return Client(self.cluster.coordinator, self._keys, self._clock)

    def logs(self) -> Path:
        return state_dir(self._topology)

    # Requests.

    def answer(
        self,
        entries: Sequence[Prompt],
        order: Sequence[int],
        streams: int,
        expected: Sequence[list[int]] | None,
    ) -> tuple[list[Record], list[threading.Thread]]:
        """Start answering `entries[i] for i in order`, `streams` at a time. The records fill up meanwhile."""
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in order:
            todo.put(index)
        records: list[Record] = []

        def work() -> None:
            with self.client() as client, contextlib.suppress(queue.Empty):
                client.connect(30.0)
                while True:
                    records.append(self._ask(client, entries, todo.get(block=False), expected))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(streams)]
        for thread in threads:
            thread.start()
        return records, threads

    def _ask(
        self, client: Client, entries: Sequence[Prompt], index: int, expected: Sequence[list[int]] | None
    ) -> Record:
        record = Record(index, self._clock.now())

        def took(answer: Answer, tokens: Tokens) -> None:
            record.token_s.append(self._clock.now())
            if not record.homes or record.homes[-1] != answer.node:
                record.homes.append(answer.node)

        try:
            [answer] = client.run([entries[index]], wait_ready_s=REQUEST_S, on_tokens=took, idle_s=REQUEST_S)
            error = answer.error()
            if error is not None:
                record.fault = f"failed: {error}"
            elif expected is not None and answer.token_ids != expected[index]:
                record.fault = f"wrong: {answer.token_ids} instead of {expected[index]} on {record.homes}"
            elif expected is None:
                self._undisturbed[index] = answer.token_ids
        except EdgeError as error:
            record.fault = f"lost: {error}"
            with contextlib.suppress(EdgeError):
                client.reconnect()
                client.connect(30.0)
        if record.fault:
            self._say(record.fault)
        record.ended_s = self._clock.now()
        return record

    # Trouble.

    def begin(self, trouble: Trouble) -> None:
        process = self._processes[trouble.node]
        match trouble.kind:
            case "kill":
                process.kill()
                process.wait()
            case "restart":
                process.send_signal(signal.SIGTERM)
                process.wait()
            case "freeze":
                process.send_signal(signal.SIGSTOP)
            case "cut":
                self._link(trouble, ShapeLink("", "", cut_s=trouble.length_s))
            case "slow":
                self._link(trouble, ShapeLink("", "", delay_s=trouble.rtt_s / 2, rate_bps=trouble.rate_bps))

    def undo(self, trouble: Trouble) -> None:
        match trouble.kind:
            case "kill" | "restart":
                started = launch.start_nodes(self.cluster, [trouble.node], self._topology, self.logs())
                self._processes |= started.processes
            case "freeze":
                self._processes[trouble.node].send_signal(signal.SIGCONT)
            case "cut" | "slow":
                self._link(trouble, ShapeLink("", "", reset=True))

    def _link(self, trouble: Trouble, change: ShapeLink) -> None:
        """Both ends of each link; one that is down or frozen just now learns nothing, and is as the file says when it is back."""
        for pair in links.pairs_of(self.cluster, trouble.node, trouble.peer, one_way=False):
            with contextlib.suppress(ClusterError):
                list(links.change_links(self.cluster, self._keys, [pair], change))

    # All of it.

    def run(self, entries: Sequence[Prompt], requests: int, streams: int, seed: int) -> Report:
        """Answer all entries once in peace, then `requests` of them in trouble, and see what is left."""
        began_s = self._clock.now()
        calm, threads = self.answer(entries, range(len(entries)), streams, None)
        for thread in threads:
            thread.join()
        if faults := [record.fault for record in calm if record.fault]:
            raise ClusterError(f"the undisturbed run failed: {faults[0]}")
        expected = [self._undisturbed[index] for index in range(len(entries))]
        with self.client() as client:
            client.connect(30.0)
            self._at_rest(client, None)
            base = {node["name"]: node["memory_used_bytes"] for node in client.status()["nodes"]}
            self._say(f"undisturbed: {len(calm)} answers in {self._clock.now() - began_s:.0f} s")
            random_ = random.Random(seed)
            order = [random_.randrange(len(entries)) for _ in range(requests)]
            began_s = self._clock.now()
            records, threads = self.answer(entries, order, streams, expected)
            troubles = self._trouble(client, random_, records, threads, requests)
            seconds = self._clock.now() - began_s
            not_at_rest = self._at_rest(client, base)
        for done in troubles:
            done.pause_s = _longest_pause(records, done)
        counts = Counter(record.fault for record in records if record.fault)
        missing = requests - len(records)
        if missing:
            counts["hung: no answer and no error"] = missing
        return Report(
            seed=seed,
            requests=requests,
            right=sum(not record.fault for record in records),
            faults=dict(counts),
            troubles=dict(Counter(done.trouble.kind for done in troubles)),
            moved=sum(len(record.homes) > 1 for record in records if not record.fault),
            calm_pause_s=max(map(_pause, calm), default=0.0),
            pauses_s=_over_kinds([(done.trouble.kind, done.pause_s) for done in troubles]),
            recoveries_s=_over_kinds(
                [(done.trouble.kind, done.recovered_s) for done in troubles if done.recovered_s is not None]
            ),
            not_at_rest=not_at_rest,
            seconds=seconds,
        )

    def _trouble(
        self,
        client: Client,
        random_: random.Random,
        records: Sequence[Record],
        threads: Sequence[threading.Thread],
        requests: int,
    ) -> list[Done]:
        """Trouble until all requests are through; then everything is undone and the nodes are waited for."""
        nodes = self.cluster.node_names
        done: list[Done] = []
        under_way: list[Done] = []
        next_s = report_s = self._clock.now()
        give_up_s: float | None = None
        while True:
            now = self._clock.now()
            is_over = not any(thread.is_alive() for thread in threads)
            if len(records) == requests or is_over:
                give_up_s = give_up_s or now + READY_S
            for one in [one for one in under_way if not one.undone_s]:
                if is_over or now >= one.began_s + one.trouble.length_s:
                    self.undo(one.trouble)
                    one.undone_s = self._clock.now()
            if any(one.undone_s for one in under_way):
                under_way = self._recovered(client, under_way)
            if now >= next_s and not is_over:
                busy = [one.trouble.node for one in under_way]
                trouble = next_trouble(random_, nodes, busy)
                if trouble is not None:
                    self._say(
                        f"{trouble.kind} {trouble.node}, {trouble.length_s:.1f} s; {len(records)} answers so far"
                    )
                    one = Done(trouble, self._clock.now())
                    self.begin(trouble)
                    done.append(one)
                    under_way.append(one)
                    next_s = now + trouble.pause_s
            if now >= report_s:
                report_s = now + 10.0
                self._say(
                    f"{len(records)} of {requests} answers, {sum(bool(r.fault) for r in records)} of them faulty"
                )
            if (is_over and not under_way) or (give_up_s is not None and now > give_up_s):
                return done
            self._clock.sleep(POLL_S)

    def _recovered(self, client: Client, under_way: Sequence[Done]) -> list[Done]:
        """Note those whose node serves again; the others stay under way."""
        nodes = {node["name"]: node for node in self._status(client).get("nodes", [])}
        if not nodes:
            return list(under_way)
        left = []
        for one in under_way:
            node = nodes[one.trouble.node]
            serves = node["state"] == "ready" and node["pid"] == self._processes[one.trouble.node].pid
            if one.undone_s and serves:
                one.recovered_s = self._clock.now() - one.undone_s
            else:
                left.append(one)
        return left

    def _status(self, client: Client) -> dict[str, Any]:
        """Nothing where the coordinator does not answer: a client that lost it asks over another connection next time."""
        try:
            return client.status(30.0)
        except EdgeError as error:
            self._say(f"no status: {error}")
            with contextlib.suppress(EdgeError):
                client.reconnect()
                client.connect(30.0)
            return {}

    def _at_rest(self, client: Client, base: dict[str, int] | None) -> str:
        """Wait until nothing runs and every block is free; what is not so after a while, and memory that grew."""
        until = self._clock.now() + IDLE_S
        while True:
            status = self._status(client)
            left = list(_unrest(status, base)) if status else ["the coordinator does not answer"]
            if not left or self._clock.now() > until:
                return "; ".join(left)
            self._clock.sleep(POLL_S)


def _unrest(status: dict[str, Any], base: dict[str, int] | None) -> Iterator[str]:
    if status["requests"]["in_flight"]:
        yield f"{status['requests']['in_flight']} requests in flight"
    if not status["ready"]:
        yield f"waiting for {status['waiting_for']}"
    if status["change"] is not None:
        yield f"a change is under way: {status['change']}"
    if status["experts_without_host"]:
        yield f"{status['experts_without_host']} experts without a host"
    for node in status["nodes"]:
        report, name = node["report"], node["name"]
        if report.get("kv_blocks_free") != report.get("kv_blocks_total"):
            yield f"{name} has {report['kv_blocks_free']} of {report['kv_blocks_total']} KV blocks free"
        if report.get("running") or report.get("waiting"):
            yield f"{name} has {report['running']} requests running and {report['waiting']} waiting"
        if base is not None and (grown := node["memory_used_bytes"] - base[name]) > GROWTH_BYTES:
            yield f"{name} has {grown / 2**20:.0f} MiB more resident than before"


def _pause(record: Record) -> float:
    """The longest wait of one request, for its first token or a next one."""
    moments = [record.began_s, *record.token_s, record.ended_s]
    return max(after - before for before, after in zip(moments, moments[1:], strict=False))


def _longest_pause(records: Sequence[Record], done: Done) -> float:
    """The longest wait for a token that began while this trouble lasted, or spanned its beginning."""
    over_s = (done.undone_s or done.began_s) + (done.recovered_s or 0.0)
    longest = 0.0
    for record in records:
        moments = [record.began_s, *record.token_s, record.ended_s]
        for before, after in zip(moments, moments[1:], strict=False):
            if before < over_s and after > done.began_s:
                longest = max(longest, after - before)
    return longest


def _over_kinds(found: Sequence[tuple[str, float]]) -> dict[str, tuple[float, float]]:
    """Kind -> median and worst, of all kinds together first."""
    by_kind: dict[str, list[float]] = {ALL: []}
    for kind, seconds in found:
        by_kind[ALL].append(seconds)
        by_kind.setdefault(kind, []).append(seconds)
    return {kind: (statistics.median(values), max(values)) for kind, values in by_kind.items() if values}


def _by_kind(times: dict[str, tuple[float, float]]) -> str:
    return ", ".join(
        f"{kind} {middle:.1f} and {worst:.1f} s" for kind, (middle, worst) in sorted(times.items())
    )
