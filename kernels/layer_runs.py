"""Layers one after another in one native call, with the bits of the single calls that they are made of.

Between two layers whose experts are all here nothing is left for Python to do, and its part of a small model's step is
as large as the arithmetic. Knows attention segments and banks; knows no node that might hold an expert.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import backends
from kernels.segments import AttentionSegment
from kernels.weights import ExpertBank


class SliceGate(NamedTuple):
    """What chooses slices in one layer. E experts of N slices, r gate neurons each.

    neurons          [E] experts of N * r neurons
    slopes, offsets  [E, N] float32
    """

    neurons: ExpertBank
    slopes: Tensor
    offsets: Tensor


class RunLayer(NamedTuple):
    """One layer of a run.

    attention  with a gate where experts are routed; without one all rows pass the first expert of the bank
    counts     [num_blocks, E], see ops.Counting; None: nowhere
    slices     None where experts run whole
    """

    attention: AttentionSegment
    experts: ExpertBank
    counts: Tensor | None = None
    slices: SliceGate | None = None


class Ran(NamedTuple):
    """How a run ended.

    stopped      first layer after which hidden was not finite, counted from 0; -1: all ran
    attention_s  seconds in attention and gates, experts_s in experts and their slices
    """

    stopped: int
    attention_s: float
    experts_s: float


class LayerRun:
    """Made by `bind_layers`; keeps its tensors alive. A bank's experts are those it has when `run` is called."""

    def __init__(self, layers: Sequence[RunLayer], bound: Any, run: Any) -> None:
        self.layers = tuple(layers)
        self._bound = bound
        self._run = run

    def run(
        self,
        hidden: Tensor,
        x: Tensor,
        rows: tuple[Tensor, Tensor, Tensor, Tensor],
        buffer: Tensor,
        logits: Tensor,
        ids: Tensor,
        weights: Tensor,
        expert_out: Tensor,
        dense_out: Tensor,
        counted: Tensor | None = None,
        sliced: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Ran:
        """Run a step's rows through all layers.

        hidden, x, buffer, logits  as in AttentionSegment.run
        ids         [at least the layers, T, K] int32, written: what each gate chose
        rows        positions, slots, row_request [T] and block_tables [B, M], likewise
        weights     [likewise] float32, expert_out [T*K, D], dense_out [T, D]: written
        counted     [T] int32, needed where a layer counts
        sliced      tiers [at least the layers, T] int32, masks [T, K] int32 and dropped [as tiers] float32, the last two
                    written; None: whole experts
        """
        tiers, masks, dropped = sliced or (None, None, None)
        ran = self._run(
            self._bound,
            hidden,
            x,
            *rows,
            buffer,
            logits,
            ids,
            weights,
            expert_out,
            dense_out,
            counted,
            tiers,
            masks,
            dropped,
        )
        if ran is None:
            given = {"hidden": hidden, "x": x, "positions": rows[0], "block_tables": rows[3], "ids": ids}
            given |= {"weights": weights, "expert_out": expert_out, "dense_out": dense_out}
            found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
            raise ValueError(f"layer run: found {found}, expected the shapes of LayerRun.run")
        return Ran(*ran)


def bind_layers(layers: Sequence[RunLayer]) -> LayerRun | None:
    """Bind layers, or None where the backend that serves runs no layers at once or did not pack these weights."""
    serving = backends.active()
    if not layers or not hasattr(serving, "LayerRun"):
        return None
    for layer in layers:
        banks = [layer.experts] if layer.slices is None else [layer.experts, layer.slices.neurons]
        if any(bank.backend is not serving for bank in banks) or layer.attention.backend is not serving:
            return None
        _check(layer)
    given = [
        {
            "attention": layer.attention.bound,
            "experts": layer.experts.handle,
            "neurons": None if layer.slices is None else layer.slices.neurons.handle,
            "slopes": None if layer.slices is None else layer.slices.slopes,
            "offsets": None if layer.slices is None else layer.slices.offsets,
            "num_parts": 1 if layer.slices is None else layer.slices.slopes.shape[1],
            "counts": layer.counts,
        }
        for layer in layers
    ]
    return LayerRun(layers, serving.LayerRun(given), serving.run_layers)


def _check(layer: RunLayer) -> None:
    """ValueError for parts of a layer that do not belong together."""
    parts, bank, gate = layer.attention.parts, layer.experts, layer.attention.parts.gate
    D, E = parts.qkv.num_inputs, 1 if gate is None else gate.num_outputs
    if (bank.D, bank.num_experts) != (D, E):
        raise ValueError(f"experts: found {bank.num_experts} of width {bank.D}, expected {E} of width {D}")
    counts = layer.counts
    if counts is not None and (
        counts.shape != (len(parts.pages[0]), E)
        or counts.dtype not in (torch.int8, torch.int32)
        or (E > 1 and counts.stride(1) != 1)
    ):
        raise ValueError(
            f"counts: found {list(counts.shape)} {counts.dtype}, expected [{len(parts.pages[0])}, {E}] int8"
        )
    if layer.slices is None:
        return
    neurons, slopes, offsets = layer.slices
    N = slopes.shape[1] if slopes.dim() == 2 else 0
    if (neurons.D, neurons.num_experts) != (D, E) or not N or neurons.F % N or bank.F % N:
        raise ValueError(
            f"neurons: found {neurons.num_experts} of width {neurons.D} and {neurons.F} neurons, expected {E} of width "
            f"{D}, and as many for each of {N} slices"
        )
    for name, tensor in (("slopes", slopes), ("offsets", offsets)):
        if tensor.shape != (E, N) or tensor.dtype is not torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: found {list(tensor.shape)} {tensor.dtype}, expected dense [{E}, {N}] float32"
            )
