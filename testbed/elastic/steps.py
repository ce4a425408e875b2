"""What decode steps at a tier take and read: processor time by step, and the distinct slices that its rows touch.

Rows of a step share what they read, and rows that run few slices share less of it than rows that run all: so bytes fall more
slowly than K in a batch. Counted here, not computed, since experts are not chosen alike often.
"""

from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from edge_runtime.elastic.gates import ProxyGates
from edge_runtime.model.layers import Trunk
from edge_runtime.model.moe import Beside, ExpertStore, Missing, Slices
from edge_runtime.model.spec import ModelSpec
from testbed.bench.peers.own_worker import read_by_a_step

KV_ITEM_BYTES = 4


@dataclass
class Taken:
    """Processor seconds of a batch of answers.

    total    all of it, prompts included
    steps    of each step in which every row was decoded
    experts  of each of those, in the kernels of experts and of the choice among slices; nothing without compiled kernels, and
             zeros where layers run together
    """

    total: float = 0.0
    steps: list[float] = field(default_factory=list)
    experts: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Read:
    """Bytes that a decode step reads: of experts' slices and of all else. Seconds of its experts, where they are known."""

    experts: float
    beside: float
    seconds: float | None

    @property
    def total(self) -> float:
        return self.experts + self.beside


@dataclass(frozen=True)
class Touched:
    """Of a layer in a decode step, on average: distinct slices that run, and distinct experts that they are of."""

    slices: float
    experts: float


class CountingExperts:
    """An ExpertPort over another that notes the distinct slices of each call of so many rows."""

    def __init__(self, port: Any, num_parts: int, num_rows: int) -> None:
        self._port, self._num_parts, self._num_rows = port, num_parts, num_rows
        self._slices: list[int] = []
        self._experts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    @property
    def touched(self) -> Touched:
        return Touched(mean(self._slices), mean(self._experts))

    def run(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        out: Tensor,
        beside: Beside = None,
        slices: Slices | None = None,
    ) -> Missing | None:
        """See ExpertPort."""
        self._note(expert_ids, slices)
        missing: Missing | None = self._port.run(layer, x, expert_ids, out, beside, slices)
        return missing

    def add_here(
        self,
        layer: int,
        x: Tensor,
        expert_ids: Tensor,
        gate_weights: Tensor,
        hidden: Tensor,
        out: Tensor,
        slices: Slices | None = None,
    ) -> bool | None:
        """See ExpertPort."""
        is_finite: bool | None = self._port.add_here(layer, x, expert_ids, gate_weights, hidden, out, slices)
        if is_finite is not None:  # else `run` is called, and notes it
            self._note(expert_ids, slices)
        return is_finite

    def _note(self, expert_ids: Tensor, slices: Slices | None) -> None:
        if len(expert_ids) != self._num_rows:
            return
        found = distinct_slices(expert_ids, None if slices is None else slices.masks, self._num_parts)
        self._slices.append(len(found))
        self._experts.append(len((found // self._num_parts).unique()))


def distinct_slices(expert_ids: Tensor, masks: Tensor | None, num_parts: int) -> Tensor:
    """Number e * N + s of every slice that some row runs.

    expert_ids  [T, K] int
    masks       [T, K] int, bit s for slice s; None: all
    """
    every = torch.arange(num_parts)
    numbers = expert_ids.long()[..., None] * num_parts + every
    return (numbers if masks is None else numbers[(masks[..., None] >> every & 1).bool()]).unique()


def step_bytes(
    spec: ModelSpec,
    store: ExpertStore,
    trunk: Trunk,
    gates: ProxyGates,
    touched: Touched,
    *,
    num_rows: int,
    context: float,
    is_full: bool,
) -> tuple[float, float]:
    """Bytes that a decode step reads: of experts' slices, and of all else (trunk, head, KV, gate neurons).

    context  positions of a row, on average
    is_full  whether rows run all slices, so that nobody asks gate neurons
    """
    gate = next(layer.gate for layer in spec.layers if layer.gate is not None)
    E, L, N = gate.num_experts, len(spec.moe_layers), gates.elasticity.num_parts
    experts = L * touched.slices * store.nbytes / (L * E * N)
    beside = float(read_by_a_step(trunk))
    shapes = spec.kv_shapes(0, spec.num_layers).values()
    beside += (
        num_rows
        * context
        * KV_ITEM_BYTES
        * sum(shape.num_heads * (shape.key_width + shape.value_width) for shape in shapes)
    )
    if not is_full:  # of gate and up alone, two of an expert's three matrices
        beside += L * touched.experts * gates.nbytes / (L * E) * 2 / 3
    return experts, beside
