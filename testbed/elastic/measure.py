"""`testbed elastic`: what fewer sub-experts cost and save, measured on one model in this process.

Perplexity against K over validation text, processor time per token against K and against whole experts as they lie in the
checkpoint, and mixed requests run at the full tier, in their order at each batch's highest tier, and tier by tier. Writes a
CSV and a plot of each beside the tables. `testbed segments`: steps layer by layer beside steps on what is kept ready.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calibration.elastic_eval import perplexity_table
from calibration.partition import PartitionSettings
from calibration.plain_model import PlainModel
from calibration.prism import check_model
from calibration.proxy_fit import GATE_NEURONS
from calibration.tune import split_artifact, tuned_rows
from calibration.windows import read_windows
from edge_runtime.artifacts import Artifact
from edge_runtime.cache.block_pool import BlockPool, blocks_for
from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import SystemClock
from edge_runtime.elastic.batching import Flow, Queue
from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import LayerParts, SubExperts
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.model.build import add_experts, empty_store, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.sampling import Sampler
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.node.share import num_experts
from kernels.replay import Recorder
from testbed.bench.peers.own_worker import kernel_seconds
from testbed.elastic.steps import CountingExperts, Read, Taken, step_bytes
from topology.ids import ExpertId

Row = dict[str, Any]
Say = Callable[[str], None]

BUDGETS = 16
"""Budgets that a table of segments is filled with."""
SHAPES = (1, 2, 4, 8, 16)


class Load(NamedTuple):
    """What is asked of an engine.

    prompt_tokens, answer_tokens  of each request
    rows                          most rows of a step, prompts of several requests together
    trunk_format, weight_format   how attention and head are kept, and how experts are
    uneven                        answers of the mixed run are of unlike lengths, log-normal around `answer_tokens`
    """

    prompt_tokens: int = 16
    answer_tokens: int = 32
    rows: int = 512
    trunk_format: str = "as_stored"
    weight_format: str = "as_stored"
    uneven: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return 2 * self.answer_tokens if self.uneven else self.answer_tokens

    @property
    def context_tokens(self) -> int:
        """Whole blocks for both."""
        return 16 * blocks_for(self.prompt_tokens + self.longest)


PLAIN = Load()


class Bench:
    """A model in this process, and engines over it.

    parts  how its experts are split; None: whole experts as they lie in the checkpoint
    size   requests that run together
    """

    def __init__(
        self, checkpoint: Checkpoint, parts: SubExperts | None, size: int, load: Load = PLAIN
    ) -> None:
        self._checkpoint, self._size, self.load = checkpoint, size, load
        self._asked = 0
        spec = checkpoint.spec
        self.gates = None if parts is None else ProxyGates(checkpoint, parts, spec.moe_layers)
        self.full = 0 if self.gates is None else self.gates.elasticity.full_tier
        store = self._store = empty_store(spec)
        experts = [ExpertId(layer, index) for layer in spec.moe_layers for index in range(num_experts(spec))]

        def order(expert: ExpertId) -> Tensor | None:
            return None if parts is None else parts.layers[expert.layer].permutation[expert.index]

        add_experts(store, checkpoint, experts, order_of=order, weight_format=load.weight_format)
        tokens, format_ = load.context_tokens, load.trunk_format
        self._trunk = load_trunk(
            checkpoint, spec, 0, spec.num_layers, context_tokens=tokens, trunk_format=format_
        )
        self._port = PlacedExperts(
            node="here",
            store=store,
            hosts=dict.fromkeys(experts, ("here",)),
            links=(),
            num_layers=spec.num_layers,
            num_experts=num_experts(spec),
            epoch=1,
            deadline_s=1.0,
            clock=SystemClock(),
        )

    def engine(
        self,
        *,
        joins: bool = True,
        record: Recorder | None = None,
        counting: CountingExperts | None = None,
    ) -> Engine:
        """A fresh one: nothing cached."""
        spec, clock, size, tokens = (
            self._checkpoint.spec,
            SystemClock(),
            self._size,
            self.load.context_tokens,
        )
        num_blocks = size * blocks_for(tokens)
        rows = max(self.load.rows, size)
        decoder = Decoder(
            spec, self._trunk, KVPages(num_blocks, spec.kv_shapes(0, spec.num_layers)), max_rows=rows
        )
        table = RequestTable(size, tokens)
        port: Any = counting or self._port
        runner = Runner(decoder, port, table, clock, gates=self.gates, joins=joins, record=record)
        settings = SchedulerSettings(
            vocab_size=spec.vocab_size, context_tokens=tokens, max_rows=rows, max_running=size
        )
        scheduler = Scheduler(settings, BlockPool(num_blocks), model_hash="", tokenizer_hash="")
        return Engine(scheduler, runner, Sampler(spec.vocab_size), clock)

    def seconds(
        self,
        batches: Sequence[Sequence[int]],
        *,
        batch_max: bool = False,
        engine: Engine | None = None,
    ) -> float:
        """Processor time to answer batches of prompts, one batch after another; each prompt is its tier."""
        if self.gates is not None:
            self.gates.batch_max = batch_max
        engine, began = engine or self.engine(), process_time()
        for batch in batches:
            self.tokens(batch, engine)
        spent = process_time() - began
        if self.gates is not None:
            self.gates.batch_max = False
        return spent

    def tokens(self, batch: Sequence[int], engine: Engine) -> list[list[int]]:
        """What an engine answers to prompts that are asked at once; each prompt is its tier."""
        found = {self._ask(engine, tier, self.load.answer_tokens): list[int]() for tier in batch}
        while not engine.is_idle:
            for output in engine.step():
                if output.ended is not None:
                    found[output.request_id] = list(output.ended.request.output_ids)
        return list(found.values())

    def taken(self, tier: int, size: int, engine: Engine | None = None) -> Taken:
        """What a batch of prompts of a tier takes, and of it each step in which all are decoded."""
        engine, found, begun = engine or self.engine(), Taken(), set[str]()
        began = process_time()
        for _ in range(size):
            self._ask(engine, tier, self.load.answer_tokens)
        while not engine.is_idle:
            decodes, at, in_kernels = len(begun) == size, process_time(), kernel_seconds()
            begun |= {output.request_id for output in engine.step()}
            if decodes:
                found.steps.append(process_time() - at)
                found.experts += [kernel_seconds()[-1] - in_kernels[-1]] if in_kernels else []
        found.total = process_time() - began
        return found

    def read(self, tier: int, size: int) -> Read:
        """What a decode step of prompts of a tier reads, and how long its experts take; layer by layer."""
        assert self.gates is not None, "slices are of split experts"
        counting = CountingExperts(self._port, self.gates.elasticity.num_parts, size)
        found = self.taken(tier, size, self.engine(joins=False, counting=counting))
        experts, beside = step_bytes(
            self._checkpoint.spec,
            self._store,
            self._trunk,
            self.gates,
            counting.touched,
            num_rows=size,
            context=self.load.prompt_tokens + self.load.answer_tokens / 2,
            is_full=tier == self.full,
        )
        return Read(experts, beside, median(found.experts) if found.experts else None)

    def flowed(self, flow: Flow, tiers: Sequence[int], lengths: Sequence[int]) -> float:
        """Processor time to answer prompts of these tiers with so many tokens each, as `flow` lets them begin."""
        engine, began, clock = self.engine(), process_time(), SystemClock()
        places: dict[str, int] = {}
        ended = True
        while ended or not engine.is_idle:
            if ended:
                for place in flow.next(clock.now()):
                    places[self._ask(engine, tiers[place], lengths[place])] = place
            ended = False
            for output in engine.step():
                if output.ended is not None:
                    place, ended = places[output.request_id], True
                    flow.ended(place, lengths[place])
        return process_time() - began

    def _ask(self, engine: Engine, tier: int, answer_tokens: int) -> str:
        """Submit a prompt of its own. Returns the request's id."""
        number = self._asked = self._asked + 1
        most = min(500, self._checkpoint.spec.vocab_size - 3)
        ids = [3 + (17 * number + 31 * i) % most for i in range(self.load.prompt_tokens)]
        params = SamplingParams(max_tokens=answer_tokens, seed=0, ignore_eos=True)
        engine.submit(Request(f"r{number}", ids, params, 0.0, tier=0 if tier == self.full else tier))
        return f"r{number}"


def open_parts(model: Path, artifact_folder: Path) -> tuple[Checkpoint, Artifact, SubExperts]:
    """A model and how its experts are split. ArtifactError where they are not."""
    checkpoint = Checkpoint.open(model)
    return checkpoint, *split_artifact(artifact_folder, checkpoint)


def split_as_they_lie(model: Path, num_parts: int) -> tuple[Checkpoint, SubExperts]:
    """A model and its experts cut where they lie, all slices foretold alike: enough for times, and for random weights.

    UserError where the widths cannot be cut so.
    """
    checkpoint = Checkpoint.open(model)
    check_model(checkpoint, PartitionSettings(num_parts), str(model))
    spec = checkpoint.spec
    E, F = num_experts(spec), spec.layers[spec.moe_layers[0]].ffn.width
    alike = LayerParts(torch.arange(F).repeat(E, 1), torch.ones(E, num_parts), torch.zeros(E, num_parts))
    return checkpoint, SubExperts(num_parts, GATE_NEURONS, dict.fromkeys(spec.moe_layers, alike))


def perplexity_rows(
    model: Path,
    checkpoint: Checkpoint,
    artifact: Artifact,
    parts: SubExperts,
    corpus: Path,
    windows: int,
    say: Say,
) -> list[Row]:
    """The table of `perplexity_table` at every second tier."""
    plain = PlainModel(checkpoint)
    tokens = min(512, checkpoint.spec.context_tokens)
    text = read_windows(
        corpus, "validation", Tokenizer.open(model), window_tokens=tokens, num_windows=windows
    )
    full = parts.num_parts * max(layer.gate.top_k for layer in checkpoint.spec.layers if layer.gate)
    tuned = tuned_rows(artifact, checkpoint.spec)
    tiers = range(parts.num_parts, full + 1, 2)
    return perplexity_table(
        plain,
        parts,
        text,
        tiers,
        tuned=tuned,
        progress=lambda name, done, total: say(f"{name}: {done} of {total}"),
    )


def time_rows(
    bench: Bench,
    sizes: Sequence[int],
    rounds: int,
    stream_bps: float | None = None,
    tiers: Sequence[int] = (),
) -> list[Row]:
    """Processor time of a token against K, prompts included, and of a decode step beside the bytes that it reads.

    Rounds take turns; of a token's time the quickest round counts, of steps the median. Times of experts are of a round layer
    by layer, None without compiled kernels.

    stream_bps  bytes per second that the machine reads; with it, what the bytes alone would take
    tiers       those besides the full one; none: eighths of it from two on
    """
    tiers = sorted({*(tiers or [max(1, bench.full * share // 8) for share in range(2, 8)]), bench.full})
    cells = [(size, tier) for size in sizes for tier in tiers]
    found: dict[tuple[int, int], list[Taken]] = {cell: [] for cell in cells}
    for _ in range(rounds):
        for size, tier in cells:
            found[size, tier].append(bench.taken(tier, size))
    best = {(n, K): min(each.total for each in taken) / n for (n, K), taken in found.items()}
    steps = {cell: median(step for each in taken for step in each.steps) for cell, taken in found.items()}
    read = {(n, K): bench.read(K, n) for n, K in cells}
    return [
        {
            "n": n,
            "K": K,
            "us_per_token": 1e6 * best[n, K] / bench.load.answer_tokens,
            "of_full": best[n, K] / best[n, bench.full],
            "step_ms": 1e3 * steps[n, K],
            "step_of_full": steps[n, K] / steps[n, bench.full],
            "read_of_full": read[n, K].total / read[n, bench.full].total,
            "floor_ms": 1e3 * read[n, K].total / stream_bps if stream_bps else None,
            "experts_ms": None if (seconds := read[n, K].seconds) is None else 1e3 * seconds,
            "experts_MB": read[n, K].experts / 1e6,
            "experts_of_full": read[n, K].experts / read[n, bench.full].experts,
            "beside_MB": read[n, K].beside / 1e6,
        }
        for n, K in cells
    ]


def offline_rows(
    bench: Bench, tiers: Sequence[int], size: int, times: Sequence[Row], rounds: int
) -> list[Row]:
    """The same prompts four ways: all at the full tier; in order, each step at its highest tier; in order, each row at its
    own; tier by tier. As answers end, others take their places. Ratios are of one round each: their median, least and most.
    """
    profile = {(row["n"], row["K"]): row["us_per_token"] * row["n"] / 1e6 for row in times}
    lengths = answer_lengths(len(tiers), bench.load)
    all_full, alike = [bench.full] * len(tiers), dict.fromkeys(range(len(tiers)), 1)
    spent: dict[str, list[float]] = {}

    def measured(name: str, asked: Sequence[int], *, by_tier: bool = False, batch_max: bool = False) -> None:
        queue = Queue(dict(enumerate(asked)) if by_tier else alike)
        flow = Flow(queue, asked, profile if by_tier else {}, size)
        assert bench.gates is not None, "tiers are of split experts"
        bench.gates.batch_max = batch_max
        try:
            spent.setdefault(name, []).append(bench.flowed(flow, asked, lengths))
        finally:
            bench.gates.batch_max = False

    for _ in range(rounds):
        measured("full tier", all_full)
        measured("in order, batch maximum", tiers, batch_max=True)
        measured("in order, own tiers", tiers)
        measured("tier by tier", tiers, by_tier=True)
    num_tokens, fixed = sum(lengths), spent["full tier"]
    ratios = {
        name: [full / own for full, own in zip(fixed, seconds, strict=True)]
        for name, seconds in spent.items()
    }
    rows: list[Row] = [
        {
            "way": name,
            "tokens_per_cpu_s": num_tokens / median(seconds),
            "slowest": num_tokens / max(seconds),
            "of_full": median(ratios[name]),
            "least": min(ratios[name]),
            "most": max(ratios[name]),
        }
        for name, seconds in spent.items()
    ]
    for name, column in (("T(n, K) allows", "us_per_token"), ("bytes allow", "read_of_full")):
        costs = {row["K"]: row[column] for row in times if row["n"] == size}
        rows.append(dict.fromkeys(rows[0]) | {"way": name, "of_full": most_by_tiers(tiers, lengths, costs)})
    return rows


def most_by_tiers(tiers: Sequence[int], lengths: Sequence[int], costs: Mapping[int, float]) -> float:
    """How many times as fast as all at the highest tier prompts end if every step is full and of one tier.

    costs  tier -> of a token in a full batch, in any unit
    """
    return sum(lengths) * costs[max(costs)] / sum(n * costs[K] for n, K in zip(lengths, tiers, strict=True))


def answer_lengths(count: int, load: Load) -> list[int]:
    """Tokens of each answer, the same every time: all alike, or log-normal around so many, at most twice as many."""
    if not load.uneven:
        return [load.answer_tokens] * count
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(2)).mul(0.6).exp()
    return [min(load.longest, max(1, round(load.answer_tokens * factor))) for factor in drawn.tolist()]


def whole_rows(split: Bench, whole: Bench, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Processor time per token at the full tier, experts split and as they lie in the checkpoint, in rounds that take turns."""
    rows: list[Row] = []
    for size in sizes:
        spent: dict[str, list[float]] = {"split": [], "whole": []}
        for _ in range(rounds):
            for name, bench in (("whole", whole), ("split", split)):
                spent[name].append(bench.seconds([[bench.full] * size]))
        ratios = [a / b for a, b in zip(spent["split"], spent["whole"], strict=True)]
        us = {name: 1e6 * min(each) / (size * split.load.answer_tokens) for name, each in spent.items()}
        rows.append(
            {"n": size, "whole_us": us["whole"], "split_us": us["split"], "median_ratio": median(ratios)}
        )
    return rows


def segment_rows(
    bench: Bench, sizes: Sequence[int], rounds: int, record: Recorder | None = None
) -> list[Row]:
    """Processor time per token at the full tier and at half of it, layer by layer and on segments that are kept ready.

    record  how they are recorded; None: layers that run together, on buffers
    """
    rows: list[Row] = []
    for size in sizes:
        for tier in (bench.full, bench.full // 2):
            engines = {
                "by layer": bench.engine(joins=False),
                "segments": bench.engine(joins=record is None, record=record),
            }
            for engine in engines.values():  # what is recorded when first used is recorded here
                bench.seconds([[tier] * size], engine=engine)
            spent: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(rounds):
                for name, engine in engines.items():
                    spent[name].append(bench.seconds([[tier] * size], engine=engine))
            ratios = [b / a for a, b in zip(spent["by layer"], spent["segments"], strict=True)]
            each = size * bench.load.answer_tokens
            rows.append(
                {
                    "n": size,
                    "K": tier,
                    "by_layer_us": 1e6 * median(spent["by layer"]) / each,
                    "segments_us": 1e6 * median(spent["segments"]) / each,
                    "ratio": median(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                }
            )
    return rows


def kept_rows(bench: Bench) -> list[Row]:
    """What is kept ready for 16 budgets at each of some shapes, and what as many whole steps would take."""
    runner = bench.engine().runner
    table = runner.prepared.table
    budgets = sorted({1 + place * (bench.full - 1) // (BUDGETS - 1) for place in range(BUDGETS)})
    for rows in SHAPES:
        for budget in budgets:
            table.get(rows, 0 if budget == bench.full else budget)
    counts = table.counts()
    return [
        {"kept": "segments", "entries": counts.attention + counts.experts, "bytes": counts.num_bytes},
        {"kept": "whole steps", "entries": counts.whole, "bytes": counts.whole_bytes},
        {"kept": "share spared", "entries": None, "bytes": counts.spared},
    ]


def mixed_tiers(low: int, full: int, count: int) -> list[int]:
    """Half of the prompts at each tier, in random order that is the same every time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    return [low if place % 2 else full for place in order]


def write_rows(folder: Path, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A CSV, and a plot where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    if "K" not in rows[0]:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for column in rows[0]:
        points = [(row["K"], row[column]) for row in rows if row[column] is not None]
        if column not in ("K", "n") and not column.endswith(("_ms", "_MB", "us_per_token")):
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                linestyle="-" if "n" not in rows[0] else "",
                label=column,
            )
    axes.set_xlabel("sub-experts per token, K")
    axes.legend()
    figure.savefig(folder / f"{name}.svg")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_shown(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
