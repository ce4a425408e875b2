"""What a step of rows at different K costs on a machine: the sizes of published models, and kernels timed on this one.

    step = overheads + (trunk bytes / bandwidth) + rows * (trunk operations / flops) + head likewise
           + layers * (call + touched slices * bytes / bandwidth + run slices * operations / flops)

Rows of tiers K_r touch E N (1 - product of (1 - K_r / (E N))) of a layer's E N slices, as an expectation over what gates
choose (`topology.step_time` says the same of whole experts), and run the sum of K_r. Knows no request and no clock of its own.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from edge_runtime.clock import SystemClock
from kernels import ops
from kernels.reference.combine import slot_rows
from kernels.slices import sliced_ffn
from kernels.weights import ExpertBank

ITEM_BYTES = 2  # bfloat16
GATE_NEURONS = 4  # of each slice, which the proxy gate looks at
STEP_S, LAYER_S, ROW_S = (
    300e-6,
    100e-6,
    20e-6,
)  # of `topology.speeds.NodeSpeed`; a row's own: tables and sampling
BANK_BYTES = 192 << 20  # of the experts that are timed: far more than a cache holds


class Geometry(NamedTuple):
    """Sizes of a published model: L layers, E experts top-k0 of width F in N parts, D, attention's weights, V."""

    name: str
    layers: int
    experts: int
    top_k: int
    width: int
    expert_width: int
    attention_weights: int
    vocabulary: int
    num_parts: int = 4

    @property
    def full_tier(self) -> int:
        return self.top_k * self.num_parts

    @property
    def slice_weights(self) -> int:
        return 3 * self.width * self.expert_width // self.num_parts


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("olmoe", 16, 64, 8, 2048, 1024, 4 * 2048 * 2048, 50304),
        Geometry("qwen3-30b-a3b", 48, 128, 8, 2048, 768, 2048 * (2 * 4096 + 2 * 512), 151936),
    )
}


class Machine(NamedTuple):
    """bytes_per_s of weights, operations per second of rows, seconds of a layer's call."""

    bytes_per_s: float
    flops: float
    call_s: float
    about: str


A6000 = Machine(
    0.8 * 768e9, 0.5 * 155e12, 30e-6, "an RTX A6000 by its data sheet, 80 % of bandwidth, 50 % of bf16"
)


class StepCosts(NamedTuple):
    """Seconds of a step by what its rows ask for."""

    geometry: Geometry
    machine: Machine
    overhead_s: float = STEP_S
    layer_s: float = LAYER_S
    row_s: float = ROW_S

    def seconds(
        self, tiers: Sequence[int], rows: Sequence[int], samples: int, *, batch_max: bool = False
    ) -> float:
        """A step of groups of `rows` rows at `tiers`, of which `samples` rows choose a token.

        batch_max  all rows run the highest tier among them, as in the published system
        """
        model, machine = self.geometry, self.machine
        tier, count = np.array(tiers, dtype=float), np.array(rows, dtype=float)
        # The proxy gate reads a few neurons of each slice of the chosen experts, counted as parts of a slice.
        is_less = tier < model.full_tier
        looked = (
            model.full_tier
            * GATE_NEURONS
            / (model.expert_width / model.num_parts)
            * float((count * is_less).sum())
        )
        if batch_max:
            tier = np.full_like(tier, tier.max())
        all_slices = model.experts * model.num_parts
        touched = all_slices * -math.expm1(float((count * np.log1p(-tier / all_slices)).sum()))
        ran = float((count * tier).sum()) + looked
        num_rows = float(count.sum())
        head = model.vocabulary * model.width if samples else 0

        def read(weights: float) -> float:
            return weights * ITEM_BYTES / machine.bytes_per_s

        def multiplied(weights: float) -> float:
            return 2 * weights / machine.flops

        layer = machine.call_s + read(model.attention_weights + touched * model.slice_weights)
        layer += multiplied(num_rows * model.attention_weights + ran * model.slice_weights)
        return (
            self.overhead_s
            + self.row_s * num_rows
            + model.layers * (self.layer_s + layer)
            + read(head)
            + multiplied(head * samples)
        )


def measured_machine(geometry: Geometry, *, rounds: int = 5) -> Machine:
    """This machine by one thread's processor time of a layer's slices: minima at several rows and K, fitted."""
    E = min(
        geometry.experts,
        max(geometry.top_k, BANK_BYTES // (ITEM_BYTES * 3 * geometry.width * geometry.expert_width)),
    )
    generator = torch.Generator().manual_seed(1)
    bank = ExpertBank(E, geometry.width, geometry.expert_width)
    for expert in range(E):
        gate, up, down = (
            torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
            for shape in (
                2 * [(geometry.expert_width, geometry.width)] + [(geometry.width, geometry.expert_width)]
            )
        )
        bank.set(expert, ops.pack_expert(gate, up, down))
    now, N = SystemClock().processor_s, geometry.num_parts
    samples = []
    for num_rows in (1, 4, 16, 64):
        x = torch.randn(num_rows, geometry.width, generator=generator)
        ids = torch.stack(
            [torch.randperm(E, generator=generator)[: geometry.top_k] for _ in range(num_rows)]
        ).int()
        rows, _ = slot_rows(num_rows, geometry.top_k)
        out = torch.empty(len(rows), geometry.width)
        for parts in range(1, N + 1):  # parts of each expert
            masks = torch.full((len(rows),), (1 << parts) - 1, dtype=torch.int32)
            best = math.inf
            for _ in range(rounds):
                began = now()
                sliced_ffn(x, rows, ids.view(-1), masks, N, bank, out=out)
                best = min(best, now() - began)
            weights = geometry.slice_weights * parts
            samples.append((1.0, len(ids.unique()) * weights * ITEM_BYTES, 2.0 * len(rows) * weights, best))
    found = np.array(samples)
    # Each time counts by its share of itself, or the largest would decide alone.
    scaled = found[:, :3] / found[:, 3:]
    (call, per_byte, per_operation), *_ = np.linalg.lstsq(scaled, np.ones(len(found)), rcond=None)
    about = (
        f"one thread of this machine, timed: {1e-9 / per_byte:.1f} GB/s, {1e-9 / per_operation:.0f} GFLOP/s"
    )
    return Machine(1 / float(per_byte), 1 / float(per_operation), max(float(call), 0.0), about)
