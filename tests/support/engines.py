"""Engines on one model that this process holds whole, for tests: build one, give it requests, take what comes out."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_runtime.cache.block_pool import BlockPool
from edge_runtime.cache.block_store import BlockStore
from edge_runtime.cache.pages import KVPages
from edge_runtime.clock import Clock, ManualClock
from edge_runtime.engine.engine import Ended, Engine, Output
from edge_runtime.engine.later_stage import LaterStage
from edge_runtime.engine.pipeline import PipelineEngine
from edge_runtime.engine.request import Request, SamplingParams
from edge_runtime.engine.request_table import RequestTable
from edge_runtime.engine.runner import HostedExperts, Runner
from edge_runtime.engine.scheduler import Scheduler, SchedulerSettings
from edge_runtime.engine.stage_step import StageLimits
from edge_runtime.model.build import load_experts, load_trunk
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.encoder_decoder import decoder_of
from edge_runtime.model.layers import Trunk
from edge_runtime.model.moe import Beside, ExpertStore, Missing
from edge_runtime.model.sampling import Sampler
from edge_runtime.node.remote import PlacedExperts
from edge_runtime.node.share import signatures_for
from edge_runtime.protocol import StageResult, StageStep, decode, encode
from tests.support.decoders import all_experts


@dataclass(frozen=True)
class Whole:
    """A model in memory. Trunks of ranges of its layers are read once each."""

    checkpoint: Checkpoint
    store: ExpertStore
    trunk: Callable[[int, int], Trunk]


@cache
def whole_model(folder: Path, context_tokens: int = 512) -> Whole:
    """The model of a folder, read once in a process."""
    checkpoint = Checkpoint.open(folder)
    spec = checkpoint.spec
    store = load_experts(checkpoint, spec, all_experts(spec))
    trunk = cache(
        lambda first, last: load_trunk(checkpoint, spec, first, last, context_tokens=context_tokens)
    )
    return Whole(checkpoint, store, trunk)


def placed_experts(whole: Whole, name: str = "n1", **changes: object) -> PlacedExperts:
    """An ExpertPort whose every expert is here."""
    spec = whole.checkpoint.spec
    options = {
        "node": name,
        "store": whole.store,
        "hosts": dict.fromkeys(all_experts(spec), (name,)),
        "links": (),
        "num_layers": spec.num_layers,
        "num_experts": max((layer.gate.num_experts for layer in spec.layers if layer.gate), default=0),
        "epoch": 1,
        "deadline_s": 1.0,
        "clock": ManualClock(),
    }
    return PlacedExperts(**(options | changes))  # type: ignore[arg-type]


class Lacking:
    """An ExpertPort that lacks one expert of one layer from a certain step on; the others come."""

    def __init__(self, port: HostedExperts, layer: int, expert: int, *, from_step: int = 1) -> None:
        self.host_names = port.host_names
        self.why = f"no living node holds layer {layer} expert {expert} on n9"
        self._port, self._layer, self._expert, self._from_step = port, layer, expert, from_step
        self._steps = 0

    def begin_step(self) -> None:
        self._steps += 1
        self._port.begin_step()

    def may_be_replaced(self) -> bool:
        return False

    def served_by(self) -> object:
        return self._port.served_by()

    def add_here(self, *arguments: object) -> None:
        """Never all in one: some may lack."""

    def run(
        self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor, beside: Beside = None
    ) -> Missing | None:
        self.last_run = layer, expert_ids
        missing = self._port.run(layer, x, expert_ids, out, beside)
        slots = (expert_ids.reshape(-1) == self._expert).nonzero().view(-1)
        if layer != self._layer or self._steps < self._from_step or not len(slots):
            return missing
        out[slots] = torch.nan  # whoever reads them shows
        return Missing(slots, self.why)


def scheduler_of(settings: SchedulerSettings, num_blocks: int) -> Scheduler:
    return Scheduler(settings, BlockPool(num_blocks), model_hash="model", tokenizer_hash="tokenizer")


def engine_of(
    whole: Whole,
    *,
    num_blocks: int = 128,
    max_rows: int = 64,
    max_running: int = 8,
    context_tokens: int = 512,
    eos_ids: tuple[int, ...] = (),
    port: HostedExperts | None = None,
    clock: Clock | None = None,
) -> Engine:
    """An engine over the whole model."""
    spec, clock = whole.checkpoint.spec, clock or ManualClock()
    runner = _runner_of(
        whole, (0, spec.num_layers), port or placed_experts(whole), num_blocks, max_rows, max_running, clock
    )
    settings = SchedulerSettings(
        vocab_size=spec.vocab_size,
        context_tokens=context_tokens,
        eos_ids=eos_ids,
        max_rows=max_rows,
        max_running=max_running,
    )
    scheduler = scheduler_of(settings, num_blocks)
    assert runner.pages is not None, "just made"
    blocks = BlockStore(scheduler.pool, runner.pages, runner.signatures)
    return Engine(scheduler, runner, Sampler(spec.vocab_size), clock, blocks)


def _runner_of(
    whole: Whole,
    layers: tuple[int, int],
    port: HostedExperts,
    num_blocks: int,
    max_rows: int,
    max_running: int,
    clock: Clock,
) -> Runner:
    """Of layers [first, last), counting which experts prompts choose."""
    spec = whole.checkpoint.spec
    pages = KVPages(num_blocks, spec.kv_shapes(*layers))
    signatures = signatures_for(spec, *layers, num_blocks, max_rows)
    counts = signatures.counts if signatures is not None else None
    decoder = decoder_of(spec, whole.trunk(*layers), pages, max_rows=max_rows, counts=counts)
    return Runner(decoder, port, RequestTable(max_running, 512), clock, signatures=signatures, pages=pages)


class ChainedStages:
    """The stages after the first, in this process: what is sent is computed at once and waits in `results`.

    lose  steps that are sent and never heard of; cut: why nothing can be sent, empty if it can
    """

    def __init__(
        self, nodes: Sequence[str], stages: Sequence[LaterStage], ports: Sequence[HostedExperts]
    ) -> None:
        self.nodes = list(nodes)
        self.stages, self.ports = list(stages), list(ports)
        self.results: deque[tuple[Any, ...]] = deque()  # StageResult and its tensors
        self.sent: list[tuple[StageStep, Any]] = []
        self.lose: set[int] = set()
        self.cut = ""

    def look(self) -> str:
        return self.cut

    def send(self, step: StageStep, tensors: Sequence[Any]) -> str:
        if self.cut:
            return self.cut
        self.sent.append((step, tuple(np.array(tensor) for tensor in tensors)))
        if step.step not in self.lose:
            self.run(step, self.sent[-1][1])
        return ""

    def run(self, step: StageStep, tensors: Any) -> None:
        """Every stage after another, each as the wire brings it: written, and read again."""
        for stage, port in zip(self.stages, self.ports, strict=True):
            envelope = decode(encode(step, tensors=tensors))
            done = stage.run(envelope.message, envelope.tensors, port)
            if done is None:
                return
            step, tensors = done
            if isinstance(step, StageResult):
                break
        found = decode(encode(step, tensors=tensors))
        self.results.append((found.message, *found.tensors))


def pipeline_of(
    whole: Whole,
    cuts: Sequence[int],
    *,
    num_blocks: int = 128,
    max_rows: int = 64,
    max_running: int = 8,
    context_tokens: int = 512,
    port: Callable[[str], HostedExperts] | None = None,
    clock: Clock | None = None,
    patience_s: float = 10.0,
) -> PipelineEngine:
    """An engine of the first stage, with the others behind it in `stages`, a ChainedStages; nodes n1, n2, ..."""
    spec, clock = whole.checkpoint.spec, clock or ManualClock()
    nodes = [f"n{index + 1}" for index in range(len(cuts) + 1)]
    port = port or (lambda name: placed_experts(whole, name))
    ports = [port(name) for name in nodes]
    runners = [
        _runner_of(whole, layers, own, num_blocks, max_rows, max_running, clock)
        for layers, own in zip(pairwise([0, *cuts, spec.num_layers]), ports, strict=True)
    ]
    limits = StageLimits(max_rows, num_blocks, context_tokens, spec.vocab_size, spec.encoder is not None)
    later = [
        LaterStage(
            runner, Sampler(spec.vocab_size) if runner.last_layer == spec.num_layers else None, clock, limits
        )
        for runner in runners[1:]
    ]
    settings = SchedulerSettings(
        vocab_size=spec.vocab_size, context_tokens=context_tokens, max_rows=max_rows, max_running=max_running
    )
    scheduler = scheduler_of(settings, num_blocks)
    return PipelineEngine(scheduler, runners[0], ChainedStages(nodes, later, ports[1:]), clock, patience_s)


def turn(engine: Engine) -> list[Output]:
    """One turn of the engine's thread: what came back from later stages, then a step. Keeps stages as busy as can be."""
    if not isinstance(engine, PipelineEngine):
        return engine.step()
    outputs = engine.step()
    results = engine.stages.results  # type: ignore[attr-defined]
    if results and engine.rest_s() != 0:
        outputs += engine.take(*results.popleft())
        engine.woken()
    return outputs


def request_of(name: str, prompt_ids: Sequence[int], **options: object) -> Request:
    """Greedy, 16 tokens, no end token, unless `options` say otherwise."""
    params = {"max_tokens": 16, "ignore_eos": True} | options
    return Request(name, prompt_ids, SamplingParams(**params), 0.0)  # type: ignore[arg-type]


def run_to_end(engine: Engine, seen: list[Output] | None = None) -> dict[str, Ended]:
    """Step until nothing is left: how every request ended.

    Each was told exactly the tokens of its answer from now on, and nothing of it remains in the engine.
    """
    ended: dict[str, Ended] = {}
    told: dict[str, list[int]] = {}
    while not engine.is_idle:
        outputs = turn(engine)
        for output in outputs:
            if seen is not None:
                seen.append(output)
            if output.token_id is not None:
                told.setdefault(output.request_id, []).append(output.token_id)
            if output.ended is not None:
                mine = told.get(output.request_id, [])
                assert mine == output.ended.request.output_ids[-len(mine) :] or not mine
                assert output.request_id not in ended, f"{output.request_id} ended twice"
                ended[output.request_id] = output.ended
        engine.scheduler.check()
    assert_nothing_left(engine)
    return ended


def assert_nothing_left(engine: Engine) -> None:
    """No block, seat or account is held by anybody."""
    engine.scheduler.check()
    assert engine.is_idle
    assert engine.scheduler.free_blocks == engine.scheduler.pool.num_blocks
    assert engine.num_accounts == 0


def answers_of(
    engine: Engine, prompts: Mapping[str, Sequence[int]], **options: object
) -> dict[str, list[int]]:
    """Run all prompts together: their tokens."""
    for name, prompt_ids in prompts.items():
        engine.submit(request_of(name, prompt_ids, **options))
    return {name: ended.request.output_ids for name, ended in run_to_end(engine).items()}
