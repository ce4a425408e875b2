"""`testbed elastic`: what fewer sub-experts cost and save, measured on one model in this process.

Perplexity against K over validation text, processor time per token against K, and mixed requests run at the full tier, in
their order at each batch's highest tier, and tier by tier. Writes a CSV and a plot of each beside the tables.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch

from calibration.elastic_eval import perplexity_table
from calibration.plain_model import PlainModel
from calibration.tune import tuned_rows
from calibration.windows import read_windows
from edge_runtime.artifacts import Artifact
from edge_runtime.cache.block_pool import BlockPool, blocks_for
from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import SystemClock
from edge_runtime.elastic.batching import Profile, Prompt, after, next_batch
from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.elastic.sub_experts import SubExperts, read_sub_experts
from edge_runtime.engine.engine import Engine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import Runner
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.errors import ArtifactError
from edge_runtime.model.build import add_experts, empty_store, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import Decoder
from edge_runtime.model.sampling import Sampler
from edge_runtime.model.tokenizer import Tokenizer
from edge_runtime.node.remote import PlacedExperts
from topology.ids import ExpertId

Row = dict[str, Any]
Say = Callable[[str], None]

PROMPT_TOKENS, ANSWER_TOKENS, CONTEXT_TOKENS = 16, 32, 64


class Bench:
    """A model with split experts in this process, and engines over it."""

    def __init__(self, checkpoint: Checkpoint, parts: SubExperts, size: int) -> None:
        self._checkpoint, self._size = checkpoint, size
        spec = checkpoint.spec
        self.gates = ProxyGates(checkpoint, parts, spec.moe_layers)
        self.full = self.gates.elasticity.full_tier
        store = empty_store(spec)
        experts = [
            ExpertId(layer, index)
            for layer, each in parts.layers.items()
            for index in range(len(each.permutation))
        ]
        add_experts(store, checkpoint, experts, order_of=lambda e: parts.layers[e.layer].permutation[e.index])
        self._trunk = load_trunk(checkpoint, spec, 0, spec.num_layers, context_tokens=CONTEXT_TOKENS)
        self._port = PlacedExperts(
            node="here",
            store=store,
            hosts=dict.fromkeys(experts, ("here",)),
            links=(),
            num_layers=spec.num_layers,
            num_experts=max(len(each.permutation) for each in parts.layers.values()),
            epoch=1,
            deadline_s=1.0,
            clock=SystemClock(),
        )

    def engine(self) -> Engine:
        """A fresh one: nothing cached."""
        spec, clock, size = self._checkpoint.spec, SystemClock(), self._size
        num_blocks = size * blocks_for(CONTEXT_TOKENS)
        rows = max(64, size)
        decoder = Decoder(
            spec, self._trunk, KVPages(num_blocks, spec.kv_shapes(0, spec.num_layers)), max_rows=rows
        )
        runner = Runner(decoder, self._port, RequestTable(size, CONTEXT_TOKENS), clock, gates=self.gates)
        settings = SchedulerSettings(
            vocab_size=spec.vocab_size, context_tokens=CONTEXT_TOKENS, max_rows=rows, max_running=size
        )
        scheduler = Scheduler(settings, BlockPool(num_blocks), model_hash="", tokenizer_hash="")
        return Engine(scheduler, runner, Sampler(spec.vocab_size), clock)

    def seconds(self, batches: Sequence[Sequence[int]], *, batch_max: bool = False) -> float:
        """Processor time to answer batches of prompts, one batch after another; each prompt is its tier."""
        self.gates.batch_max = batch_max
        engine, number, began = self.engine(), 0, process_time()
        for batch in batches:
            for tier in batch:
                ids = [3 + (17 * number + 31 * i) % 500 for i in range(PROMPT_TOKENS)]
                params = SamplingParams(max_tokens=ANSWER_TOKENS, seed=0, ignore_eos=True)
                engine.submit(Request(f"r{number}", ids, params, 0.0, tier=0 if tier == self.full else tier))
                number += 1
            while not engine.is_idle:
                engine.step()
        self.gates.batch_max = False
        return process_time() - began


def open_parts(model: Path, artifact_folder: Path) -> tuple[Checkpoint, Artifact, SubExperts]:
    """A model and how its experts are split. ArtifactError where they are not."""
    checkpoint = Checkpoint.open(model)
    artifact = Artifact.open(artifact_folder, model_hash=checkpoint.model_hash)
    parts = read_sub_experts(artifact, checkpoint.spec)
    if parts is None:
        raise ArtifactError(
            f"calibration artifact {artifact_folder} has no section partition; run `edge-runtime calibrate prism`"
        )
    return checkpoint, artifact, parts


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


def time_rows(bench: Bench, sizes: Sequence[int], rounds: int) -> list[Row]:
    """Processor time per token against K, minima of interleaved rounds, beside the plain path."""
    tiers = sorted({max(1, bench.full * share // 8) for share in range(2, 9)})
    best: dict[tuple[int, int], float] = {}
    for _ in range(rounds):
        for size in sizes:
            for tier in tiers:
                seconds = bench.seconds([[tier] * size]) / (size * ANSWER_TOKENS)
                best[size, tier] = min(best.get((size, tier), seconds), seconds)
    return [
        {
            "n": size,
            "K": tier,
            "us_per_token": 1e6 * best[size, tier],
            "of_full": best[size, tier] / best[size, bench.full],
        }
        for size in sizes
        for tier in tiers
    ]


def offline_rows(
    bench: Bench, tiers: Sequence[int], size: int, times: Sequence[Row], rounds: int
) -> list[Row]:
    """The same prompts three ways: all at the full tier; in order, each batch at its highest tier; tier by tier."""
    profile = Profile({(row["n"], row["K"]): row["us_per_token"] * row["n"] for row in times})
    in_order = [tiers[i : i + size] for i in range(0, len(tiers), size)]
    waiting, by_tier = [Prompt(i, tier) for i, tier in enumerate(tiers)], []
    while waiting:
        batch = next_batch(waiting, size, profile)
        by_tier.append([tiers[i] for i in batch.indices])
        waiting = after(waiting, batch)
    ways: Mapping[str, tuple[Sequence[Sequence[int]], bool]] = {
        "full tier": ([[bench.full] * len(batch) for batch in in_order], False),
        "in order, batch maximum": (in_order, True),
        "in order, own tiers": (in_order, False),
        "tier by tier": (by_tier, False),
    }
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, (batches, batch_max) in ways.items():
            seconds = bench.seconds(batches, batch_max=batch_max)
            best[name] = min(best.get(name, seconds), seconds)
    num_tokens = len(tiers) * ANSWER_TOKENS
    return [
        {"way": name, "tokens_per_cpu_s": num_tokens / seconds, "of_full": best["full tier"] / seconds}
        for name, seconds in best.items()
    ]


def mixed_tiers(low: int, full: int, count: int) -> list[int]:
    """Half of the prompts at each tier, in random order that is the same every time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    return [low if place % 2 else full for place in order]


def write_rows(folder: Path, name: str, rows: Sequence[Row]) -> None:
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
        if column not in ("K", "n", "us_per_token"):
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                linestyle="-" if "n" not in rows[0] else "",
                label=column,
            )
    axes.set_xlabel("sub-experts per token, K")
    axes.legend()
    figure.savefig(folder / f"{name}.svg")


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_shown(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
