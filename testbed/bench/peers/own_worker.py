"""Our own engine in one process and without sockets: what a node of the given topology file loads, stepped by hand."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edge_runtime.coordinator.deploy import deploy_for
from edge_runtime.engine.engine import Engine, Output
from edge_runtime.engine.request import Request, SamplingParams, encoder_prompt
from edge_runtime.errors import CheckpointError, ClusterError, EdgeError
from edge_runtime.model.build import quiet
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.footprint import footprint
from edge_runtime.model.layers import Trunk
from edge_runtime.model.moe import Missing
from edge_runtime.node.share import load_share
from edge_runtime.protocol import Hello
from kernels import backends
from testbed.bench.peers.worker import Moment, Took, moment, serve
from topology.files import read_cluster
from topology.placement import plan_placement

STEP_PARTS = ("plan", "rows", "attention", "experts", "head", "sample")


class StepSeconds(NamedTuple):
    """Seconds of one step of an engine alone."""

    step: float
    spent: tuple[float, ...]
    """In the compiled kernels: dense (the head's too), attention, experts."""
    head: float
    num_layers: int


class _Clock:
    """Real seconds, or this process's processor time where parts of a step are compared."""

    def __init__(self) -> None:
        self.now = perf_counter
        self.processor_s = process_time
        self.thread_s = thread_time

    def sleep(self, seconds: float) -> None:
        raise AssertionError("an engine that is stepped by hand never waits")


class OwnRunner:
    """The engine of a cluster's only node."""

    def __init__(self, order: dict[str, Any]) -> None:
        cluster = read_cluster(order["topology"])
        (node,) = cluster.nodes
        backends.set_num_threads(node.threads)
        torch.set_num_threads(node.threads)
        self._clock = _Clock()
        checkpoint = Checkpoint.open(cluster.model)
        self._folder, self._encoder = checkpoint.folder, checkpoint.spec.encoder
        sizes = footprint(checkpoint, context_tokens=cluster.context_tokens)
        deploy = deploy_for(
            node.name, cluster, sizes, plan_placement(cluster, sizes), model_hash="", public_keys={}
        )
        share = load_share(
            deploy,
            checkpoint,
            None,
            identity=Hello(node=node.name),
            keys=None,
            clock=self._clock,
            progress=quiet,
        )
        assert share.engine is not None, "the only node of a cluster runs the whole model"
        self._engine: Engine = share.engine
        said = backends.describe()
        self._num_requests = 0
        self._times_at_start: dict[str, float] = {}
        self._spent_at_start: tuple[float, ...] = ()
        self.facts = {
            "version": f"edge-runtime, {said['backend']} {said['isa'] or ''}".strip(),
            "expert_bytes": share.store.nbytes,
            "trunk_bytes": read_by_a_step(share.trunk),
        }

    def decode(self, prompts: list[list[int]], steps: int) -> Took:
        names = self._submit(prompts, steps + 1 + len(prompts))  # some more: not all start in the same step
        started: set[str] = set()
        began: Moment | None = None
        tokens = 0
        while True:
            outputs = self._step()
            now = moment()
            if began is not None:
                tokens += sum(output.token_id is not None for output in outputs)
                if tokens >= steps * len(prompts):
                    break
            else:
                started.update(output.request_id for output in outputs)
                if len(started) == len(prompts):
                    self._times_at_start = asdict(self._engine.runner.times)
                    self._spent_at_start = kernel_seconds()
                    began = moment()
        for name in names:
            self._engine.abort(name)
        return Took(began, now, tokens)

    def prefill(self, prompt: list[int]) -> Took:
        began = moment()
        self._submit([prompt], 1)
        while not self._engine.is_idle:
            self._step()
        return Took(began, moment(), len(prompt))

    def _step(self) -> list[Output]:
        """One step of the engine. Raises what a request ended on: no later step would bring its tokens."""
        outputs = self._engine.step()
        for output in outputs:
            if output.ended is not None and output.ended.finish_reason == "error":
                raise CheckpointError(f"{self._folder} cannot be measured: {output.ended.detail}")
        if not outputs and self._engine.is_idle:
            raise ClusterError(f"{self._folder} cannot be measured: its requests ended before all had begun")
        return outputs

    def parts(self, order: dict[str, Any]) -> dict[str, object]:
        """How many distinct experts a layer of a decode step reads, and what the parts of a step take, uncounted."""
        runner = self._engine.runner
        counting = _Counting(runner.port)
        runner.port = counting  # type: ignore[assignment]
        self.decode(order["prompts"], order["steps"])
        runner.port = counting.port
        self._clock.now = process_time
        self.decode(order["prompts"], order["steps"])
        self._clock.now = perf_counter
        before, after = self._times_at_start, asdict(runner.times)
        num_steps = after["steps"] - before["steps"]
        rows = len(order["prompts"])
        found = [distinct for num_rows, distinct in counting.seen if num_rows == rows]
        return {
            "distinct_experts": sum(found) / max(1, len(found)),
            "step_us": {part: (after[part] - before[part]) / num_steps * 1e6 for part in STEP_PARTS},
        }

    def step_parts(self, prompts: list[list[int]], steps: int) -> StepSeconds:
        """What one decode step of these prompts takes, mean of `steps`. Only with the compiled kernels."""
        self._engine.runner.joins = False  # layers that run as one call cannot be told apart
        took = self.decode(prompts, steps)
        runner, before = self._engine.runner, self._times_at_start
        num_steps = max(1, runner.times.steps - int(before["steps"]))
        assert took.began is not None, "a decode that returned has begun"
        return StepSeconds(
            (took.ended.wall_s - took.began.wall_s) / num_steps,
            tuple(
                (now - then) / num_steps
                for now, then in zip(kernel_seconds(), self._spent_at_start, strict=True)
            ),
            (runner.times.head - before["head"]) / num_steps,
            runner.num_layers,
        )

    def _submit(self, prompts: Sequence[list[int]], tokens: int) -> list[str]:
        names, encoder = [], self._encoder
        for prompt in prompts:
            self._num_requests += 1
            names.append(f"bench-{self._num_requests}")
            # A salt of its own: no prefix is ever reused, or a second prefill would cost nothing.
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            whole = prompt if encoder is None else encoder_prompt(prompt, encoder.start_token_id)
            read = 0 if encoder is None else len(prompt)
            self._engine.submit(Request(names[-1], whole, params, 0.0, salt=names[-1], encoder_tokens=read))
        return names


def kernel_seconds() -> tuple[float, ...]:
    """Seconds in the compiled kernels since the process began: dense, attention, experts; nothing without them."""
    if backends.active().NAME != "native":
        return ()
    from kernels.cpu import _native  # type: ignore[attr-defined]

    return _native.spent()


def read_by_a_step(trunk: Trunk | None) -> int:
    """Bytes of a trunk without an embedding that is no head: of that a step reads a row per token."""
    assert trunk is not None, "the only node of a cluster runs the whole model"
    looked_up = 0 if trunk.embed is trunk.head or trunk.embed is None else trunk.embed.nbytes
    return trunk.nbytes - looked_up


class _Counting:
    """An ExpertPort that notes the rows of each call and how many experts they chose between them."""

    def __init__(self, port: Any) -> None:
        self.port = port
        self.seen: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    def ran_here(self, expert_ids: Tensor, seconds: float) -> None:
        self.port.ran_here(expert_ids, seconds)
        self.seen += [(ids.shape[0], len(ids.unique())) for ids in expert_ids]

    def run(self, layer: int, x: Tensor, expert_ids: Tensor, out: Tensor) -> Missing | None:
        self.seen.append((len(x), len(expert_ids.unique())))
        return self.port.run(layer, x, expert_ids, out)

    def add_here(self, layer: int, x: Tensor, expert_ids: Tensor, *tensors: Tensor) -> bool | None:
        is_finite = self.port.add_here(layer, x, expert_ids, *tensors)
        if is_finite is not None:  # else `run` is called, and counts
            self.seen.append((len(x), len(expert_ids.unique())))
        return is_finite


if __name__ == "__main__":
    try:
        serve(OwnRunner)
    except EdgeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
