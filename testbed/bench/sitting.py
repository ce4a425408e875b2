"""Our engine beside other engines on the same weights, in one sitting: rounds interleaved, medians with their spread.

Every engine is a process of its own with the same number of threads, and only one works at a time. Beside the rates stand
the machine's stream speed, measured in the same rounds, and what each cell is limited by.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any, NamedTuple

import psutil
import torch

from edge_runtime.clock import Clock
from edge_runtime.errors import ConfigError, EdgeError
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.tokenizer import Tokenizer
from kernels import ops, tuning
from testbed.bench.clusters import RunningCluster
from testbed.bench.floors import BLOCK_BYTES, Cost, Sizes, decode_cost, prefill_cost, sizes_of
from testbed.bench.peers import gguf_file
from testbed.bench.peers.engines import DaemonsEngine, Engine, Rate, Work, WorkerEngine

OWN, DAEMONS, TRANSFORMERS, VLLM, LLAMA = "own", "daemons", "transformers", "vllm", "llama.cpp"
ENGINES = (OWN, DAEMONS, TRANSFORMERS, VLLM, LLAMA)
GGUF_FORMATS = {"bf16": "bf16", "bf16x2": "bf16", "int8": "q8_0", "int4": "q4_0"}
"""What a format is called in a GGUF; llama.cpp is not measured in others."""
FORMATS = (*GGUF_FORMATS, "fp16", "fp32", "mxfp4")
"""As a topology file may call them too."""
CONTEXT_TOKENS = 2048
PROMPT_TOKENS = 32
GGUF_FOLDER = Path.home() / ".cache" / "edge-runtime" / "gguf"
STREAM_BYTES_MAX = 512 << 20
STREAM_INPUTS = 1024
STREAM_S = 0.15
PART_STEPS = 16
KV_TOKENS = 4096
MEMORY_SPARE_BYTES = 1 << 30
KV_ITEM_BYTES = {OWN: 4.0}
OTHERS_KV_ITEM_BYTES = 2.0
VLLM_SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class Sitting:
    """What is to be compared."""

    model: Path
    engines: tuple[str, ...] = ENGINES
    batches: tuple[int, ...] = (1, 8, 16)
    steps: int = 32
    """Decode steps that count in a round."""
    prompt_tokens: int = PROMPT_TOKENS
    prefill_tokens: int = 512
    rounds: int = 5
    vllm_python: Path | None = None
    """Python of the environment that has vLLM."""
    llama_python: Path | None = None
    """Python of the environment that has llama-cpp-python."""
    gguf: Path = GGUF_FOLDER
    """Where converted models are kept."""


class Cell(NamedTuple):
    """A column of the table."""

    kind: str
    requests: int
    tokens: int
    """Tokens of each prompt."""

    @property
    def title(self) -> str:
        return f"decode {self.requests}" if self.kind == "decode" else f"prefill {self.tokens}"


@dataclass
class Result:
    """One format at one number of threads: every engine's rates, round by round."""

    model: str
    format: str
    threads: int
    cells: tuple[Cell, ...]
    rates: dict[str, dict[str, list[Rate]]] = field(default_factory=dict)
    """engine -> title of a cell -> one rate per round."""
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """engine -> why it has no row."""
    stream_bps: list[float] = field(default_factory=list)
    """Bytes per second of processor time that all threads read together, one number per round and cell."""
    peak_flops: float = float("nan")
    costs: dict[str, dict[str, Cost]] = field(default_factory=dict)
    """engine -> title of a cell -> what one step (or the prompt) costs."""
    distinct_experts: dict[str, float] = field(default_factory=dict)
    """Title of a cell -> experts of a layer that a decode step reads, as counted in our engine."""
    step_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """Title of a cell -> part of our engine's step -> microseconds of processor time."""
    load_average: list[float] = field(default_factory=list)


def joined(results: Sequence[Result]) -> list[Result]:
    """Pieces of one sitting put together: those of the same model, format and threads become one, in the order they came.

    Rounds are added up; what is said once (costs, parts of a step) is the first piece's, and an engine is left out where no
    piece has it.
    """
    whole: dict[tuple[str, str, int], Result] = {}
    for piece in results:
        key = piece.model, piece.format, piece.threads
        if key not in whole:
            whole[key] = Result(*key, piece.cells, peak_flops=piece.peak_flops)
        into = whole[key]
        into.cells = tuple(dict.fromkeys((*into.cells, *piece.cells)))
        into.peak_flops = max(into.peak_flops, piece.peak_flops)
        for engine, by_cell in piece.rates.items():
            rates = into.rates.setdefault(engine, {})
            for title, found in by_cell.items():
                rates[title] = [*rates.get(title, ()), *found]
        for engine, costs in piece.costs.items():
            into.costs[engine] = {**costs, **into.costs.get(engine, {})}
        into.versions = {**piece.versions, **into.versions}
        into.left_out = {**piece.left_out, **into.left_out}
        into.distinct_experts = {**piece.distinct_experts, **into.distinct_experts}
        into.step_us = {**piece.step_us, **into.step_us}
        into.stream_bps = [*into.stream_bps, *piece.stream_bps]
        into.load_average = [*into.load_average, *piece.load_average]
    for each in whole.values():
        each.left_out = {name: why for name, why in each.left_out.items() if name not in each.rates}
    return list(whole.values())


class Corpus:
    """Token ids of real text, of which every prompt is a piece of its own."""

    def __init__(self, model: Path, text: str) -> None:
        self._ids = list(Tokenizer.open(model).encode(text))

    def prompts(self, count: int, length: int, turn: int) -> list[list[int]]:
        """`count` pieces of `length` tokens; other turns give others."""
        ids = self._ids * (1 + 4 * length // len(self._ids))
        starts = ((turn * count + i) * 37 % (len(ids) - length) for i in range(count))
        return [ids[start : start + length] for start in starts]


def cells_of(sitting: Sitting, context_tokens: int) -> tuple[Cell, ...]:
    """The columns; a prefill as long as asked for, or as the model allows with one token to come."""
    prefill = min(sitting.prefill_tokens, context_tokens - 1)
    decode = [Cell("decode", batch, sitting.prompt_tokens) for batch in sitting.batches]
    return (*decode, Cell("prefill", 1, prefill))


def measure(
    sitting: Sitting, corpus: Corpus, format: str, threads: int, clock: Clock, say: Callable[[str], None]
) -> Result:
    """Start what is installed, take turns, stop everything."""
    checkpoint = Checkpoint.open(sitting.model)
    context = min(checkpoint.spec.context_tokens, CONTEXT_TOKENS)
    cells = cells_of(sitting, context)
    result = Result(
        sitting.model.name, format, threads, cells, peak_flops=tuning.peak_gflops() * 1e9 * threads
    )
    sizes = sizes_of(checkpoint.config)
    stream = Stream(min(STREAM_BYTES_MAX, int(sizes.total * BLOCK_BYTES[format])), threads)
    result.load_average.append(os.getloadavg()[0])
    what = f"{sitting.model.name} {format}, {threads} thread{'s' * (threads > 1)}"
    with ExitStack() as up:
        engines: list[Engine] = []
        for name in sitting.engines:
            say(f"{what}: starting {name}")
            try:
                engine = _start(name, sitting, format, threads, context, clock, up)
            except EdgeError as error:
                result.left_out[name] = str(error)
                continue
            engines.append(engine)
            result.versions[name] = str(engine.facts.get("version", ""))
        for engine in list(engines):
            if isinstance(engine, WorkerEngine) and engine.name == OWN:
                try:
                    _note_parts(engine, result, corpus)
                except EdgeError as error:
                    result.left_out[engine.name] = str(error)
                    engines.remove(engine)
        result.costs = {
            engine.name: _costs(engine, format, sizes, cells, result.distinct_experts, sitting.steps)
            for engine in engines
        }
        try:
            for turn in range(sitting.rounds + 1):
                for cell in cells if engines else ():
                    work = Work(cell.kind, corpus.prompts(cell.requests, cell.tokens, turn), sitting.steps)
                    _turn(engines, work, cell.title, result, counts=turn > 0)
                    result.stream_bps.append(stream.bytes_per_s())
                say(f"{what}: round {turn} of {sitting.rounds}")
        except KeyboardInterrupt:
            if not result.rates:
                raise
            say(f"{what}: interrupted; what was measured so far is shown")
    result.load_average.append(os.getloadavg()[0])
    return result


def _turn(engines: list[Engine], work: Work, title: str, result: Result, *, counts: bool) -> None:
    """Every engine does the work once, one after another; one that fails takes no further part."""
    for engine in list(engines):
        try:
            rate = engine.run(work)
        except EdgeError as error:
            result.left_out[engine.name] = f"{title}: {error}"
            engines.remove(engine)
            continue
        if counts:
            result.rates.setdefault(engine.name, {}).setdefault(title, []).append(rate)


class Stream:
    """Reads memory as large as the model, over and over: what the machine gives `threads` threads just now.

    Two readers, a plain sum and our product of one row, which fetches ahead; the faster one counts.
    """

    def __init__(self, num_bytes: int, threads: int) -> None:
        self._threads = threads
        ops.set_num_threads(threads)
        torch.set_num_threads(threads)
        num_outputs = max(1, num_bytes // (2 * STREAM_INPUTS))
        weight = ops.pack_linear(torch.ones(num_outputs, STREAM_INPUTS, dtype=torch.bfloat16))
        numbers = torch.ones(num_bytes // 4)
        row, out = torch.ones(1, STREAM_INPUTS), torch.empty(1, num_outputs)
        self._readers = (
            (numbers.nbytes, numbers.sum),
            (weight.nbytes, lambda: ops.linear(row, weight, out=out)),
        )

    def bytes_per_s(self) -> float:
        """Per second of processor time, all threads together."""
        return max(self._rate(num_bytes, read) for num_bytes, read in self._readers)

    def _rate(self, num_bytes: int, read: Callable[[], object]) -> float:
        read()  # what else ran has the caches
        passes, began = 0, process_time()
        while (spent := process_time() - began) < STREAM_S * self._threads:
            read()
            passes += 1
        return passes * num_bytes / (spent / self._threads)


def _note_parts(engine: WorkerEngine, result: Result, corpus: Corpus) -> None:
    """Ask our engine what its decode steps are made of."""
    for cell in result.cells:
        if cell.kind == "decode":
            order = {
                "do": "parts",
                "prompts": corpus.prompts(cell.requests, cell.tokens, 1),
                "steps": PART_STEPS,
            }
            found = engine.ask(order)
            result.distinct_experts[cell.title] = found["distinct_experts"]
            result.step_us[cell.title] = found["step_us"]


def _costs(
    engine: Engine,
    format: str,
    sizes: Sizes,
    cells: Sequence[Cell],
    distinct: Mapping[str, float],
    steps: int,
) -> dict[str, Cost]:
    """What each cell costs this engine: its own bytes per number where it tells them, its format's otherwise."""
    facts = engine.facts
    trunk = expert = BLOCK_BYTES[format]
    if "expert_bytes" in facts:
        expert = facts["expert_bytes"] / (sizes.expert * sizes.experts * sizes.moe_layers)
        trunk = facts["trunk_bytes"] / (sizes.trunk + sizes.head)
    kv = KV_ITEM_BYTES.get(engine.name, OTHERS_KV_ITEM_BYTES)
    costs = {}
    for cell in cells:
        if cell.kind == "prefill":
            costs[cell.title] = prefill_cost(sizes, cell.tokens, trunk_bytes=trunk, expert_bytes=expert)
        elif cell.title in distinct:
            context, used = cell.tokens + steps / 2, distinct[cell.title]
            costs[cell.title] = decode_cost(
                sizes, cell.requests, context, used, trunk_bytes=trunk, expert_bytes=expert, kv_bytes=kv
            )
    return costs


def _start(
    name: str, sitting: Sitting, format: str, threads: int, context: int, clock: Clock, up: ExitStack
) -> Engine:
    """A running engine that ends with `up`; an EdgeError says why it cannot be had."""
    gguf_format = GGUF_FORMATS.get(format)
    _check_memory(sitting.model, BLOCK_BYTES[format])
    order: dict[str, Any] = {
        "model": str(sitting.model),
        "threads": threads,
        "context_tokens": context,
        "max_requests": max(sitting.batches),
    }
    if name in (OWN, DAEMONS):
        folder = Path(up.enter_context(TemporaryDirectory(prefix="edge-bench-")))
        topology = folder / "one_node.toml"
        topology.write_text(one_node(sitting, format, threads, context, free_ports(2)))
        if name == DAEMONS:
            running = up.enter_context(RunningCluster(topology, clock))
            client = up.enter_context(running.client())
            client.connect()
            facts = {"version": "edge-runtime, node, coordinator and client; processor time of the node"}
            return DaemonsEngine(name, client, facts, running.pids["solo"], threads)
        worker = WorkerEngine(
            name, ("-m", "testbed.bench.peers.own_worker"), {**order, "topology": str(topology)}
        )
    elif name == LLAMA:
        if sitting.llama_python is None:
            raise ConfigError("llama-cpp-python is looked for where --llama-python or EDGE_BENCH_LLAMA says")
        if gguf_format is None:
            raise ConfigError(f"{name} is compared in {', '.join(GGUF_FORMATS)} only")
        order |= {"gguf": str(gguf_of(sitting, gguf_format)), "kv_tokens": KV_TOKENS}
        worker = WorkerEngine(
            name, ("-m", "testbed.bench.peers.llama_worker"), order, str(sitting.llama_python.absolute())
        )
    elif gguf_format != "bf16":
        raise ConfigError(f"{name} is compared in bf16 only")
    elif name == TRANSFORMERS:
        worker = WorkerEngine(name, ("-m", "testbed.bench.peers.transformers_worker"), order)
    elif sitting.vllm_python is None:
        raise ConfigError("vLLM is looked for where --vllm-python or EDGE_BENCH_VLLM says")
    else:
        worker = WorkerEngine(
            name,
            ("-m", "testbed.bench.peers.vllm_worker"),
            order,
            str(sitting.vllm_python.absolute()),
            VLLM_SETTINGS,
        )
    worker.start()
    up.callback(worker.close)
    return worker


def one_node(sitting: Sitting, weight_format: str, threads: int, context: int, ports: Sequence[int]) -> str:
    """A topology file with one node that holds the whole model and steps as many rows as others do."""
    stored = sum(path.stat().st_size for path in sitting.model.glob("*.safetensors"))
    memory = (2 * stored + (2 << 30)) >> 20
    longest = sitting.prompt_tokens + sitting.steps + 1 + max(sitting.batches)  # all decode at the same time
    return f"""[cluster]
name = "bench-one-node"
model = "{sitting.model.resolve()}"
coordinator = "127.0.0.1:{ports[0]}"
kv_tokens = {max(KV_TOKENS, max(sitting.batches) * longest)}
context_tokens = {context}
max_batch_rows = {max(512, *sitting.batches)}
max_requests = {max(sitting.batches)}

[[node]]
name = "solo"
address = "127.0.0.1:{ports[1]}"
memory = "{memory} MiB"
threads = {threads}
weight_format = "{weight_format}"
trunk_format = "{weight_format}"
"""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def gguf_of(sitting: Sitting, format: str) -> Path:
    """The model as GGUF, converted the first time it is asked for."""
    file = sitting.gguf / f"{sitting.model.name}-{format}.gguf"
    if not file.is_file():
        sitting.gguf.mkdir(parents=True, exist_ok=True)
        gguf_file.convert(sitting.model, file, format)
    return file


def _check_memory(model: Path, bytes_per_weight: float) -> None:
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed = int(stored * max(2.0, bytes_per_weight) / 2 * 1.25) + MEMORY_SPARE_BYTES
    available = psutil.virtual_memory().available
    if available < needed:
        raise ConfigError(
            f"it needs about {needed >> 20} MiB beside those that are up, and {available >> 20} MiB are available; "
            "choose fewer with --engine"
        )
