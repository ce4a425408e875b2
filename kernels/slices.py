"""Experts by slices: the face of what runs parts of experts and of what chooses them. Checks, then the backend.

A slice is one of `num_parts` equal runs of an expert's neurons; a routed pair carries a mask of those that it wants. What
each operation means stands in kernels.reference.sliced_ffn and kernels.reference.choose_slices. Tensors live where those
of kernels.ops do, float32 and int32.
"""

import math

import torch
from torch import Tensor

from kernels import backends, ops
from kernels.reference.combine import slot_rows
from kernels.weights import ExpertBank

MOST_PARTS = 8


def sliced_ffn(
    x: Tensor,
    rows: Tensor,
    expert_ids: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: ExpertBank,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`ops.grouped_ffn` with only the slices of masks [R]: [R, D]."""
    _check_parts(bank, num_parts)
    R = len(rows)
    _check("masks", masks, torch.int32, (R,))
    _check_rows(x, rows, expert_ids, bank)
    out = torch.empty(R, bank.D, device=x.device) if out is None else out
    if R == 0:
        return out
    handle = _handle(bank, expert_ids)
    _did(bank.backend.sliced_ffn(x, rows, expert_ids, masks, num_parts, handle, out), "sliced_ffn")
    return out


def sliced_experts(
    x: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    masks: Tensor,
    num_parts: int,
    bank: ExpertBank,
    hidden: Tensor,
    *,
    expert_out: Tensor,
) -> bool:
    """`ops.experts` with only the slices of masks [T, K]. Returns whether `hidden` is finite afterwards."""
    backend = bank.backend
    if backend is not None and hasattr(backend, "sliced_experts"):
        finite = backend.sliced_experts(
            x, expert_ids, gate_weights, masks, num_parts, bank.handle, hidden, expert_out
        )
        if finite is not None:
            return bool(finite)
    T, K = expert_ids.shape
    rows, slots = slot_rows(T, K, x.device)
    sliced_ffn(x, rows, expert_ids.view(-1), masks.view(-1), num_parts, bank, out=expert_out)
    ops.combine(expert_out, slots, gate_weights, hidden)
    return math.isfinite(float(hidden.sum()))


def expert_inner(
    x: Tensor, rows: Tensor, expert_ids: Tensor, bank: ExpertBank, *, out: Tensor | None = None
) -> Tensor:
    """What the neurons of each routed row's expert give, before the last matrix: [R, F]."""
    _check_rows(x, rows, expert_ids, bank)
    out = torch.empty(len(rows), bank.F, device=x.device) if out is None else out
    if len(rows):
        handle = _handle(bank, expert_ids)
        _did(bank.backend.expert_inner(x, rows, expert_ids, handle, out), "expert_inner")
    return out


def choose_slices(
    activations: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    slopes: Tensor,
    offsets: Tensor,
    tiers: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Masks [T, k0] int32 of the slices that run at tiers [T], and the expected share of gate weight dropped [T]."""
    T, k0 = expert_ids.shape
    E, N = slopes.shape
    _check("activations", activations, torch.float32, (T * k0, activations.shape[-1]))
    if activations.shape[-1] % N or not 1 <= N <= MOST_PARTS:
        raise ValueError(
            f"activations: found {activations.shape[-1]} columns, expected a multiple of {N}, which is 1 to {MOST_PARTS}"
        )
    _check("expert_ids", expert_ids, torch.int32, (T, k0))
    _check("gate_weights", gate_weights, torch.float32, (T, k0))
    _check("slopes", slopes, torch.float32, (E, N))
    _check("offsets", offsets, torch.float32, (E, N))
    _check("tiers", tiers, torch.int32, (T,))
    if out is None:
        out = torch.empty(T, k0, dtype=torch.int32, device=tiers.device), torch.empty(T, device=tiers.device)
    masks, dropped = out
    if T:
        done = backends.active().choose_slices(
            activations, expert_ids, gate_weights, slopes, offsets, tiers, masks, dropped
        )
        _did(done, "choose_slices")
    return masks, dropped


def choose_by_neurons(
    x: Tensor,
    expert_ids: Tensor,
    gate_weights: Tensor,
    neurons: ExpertBank,
    slopes: Tensor,
    offsets: Tensor,
    tiers: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """`choose_slices` by what the gate neurons [E] of N * r give for rows x [T, D]: `expert_inner` and it as one."""
    T, k0 = expert_ids.shape
    if out is None:
        out = torch.empty(T, k0, dtype=torch.int32, device=x.device), torch.empty(T, device=x.device)
    masks, dropped = out
    backend = neurons.backend
    if T and backend is not None and hasattr(backend, "choose_by_neurons"):
        rest = slopes, offsets, tiers, masks, dropped
        if backend.choose_by_neurons(x, expert_ids, gate_weights, neurons.handle, *rest):
            return masks, dropped
    rows, _ = slot_rows(T, k0, x.device)
    activations = expert_inner(x, rows, expert_ids.reshape(-1), neurons)
    return choose_slices(activations, expert_ids, gate_weights, slopes, offsets, tiers, out=(masks, dropped))


def _check(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        or tensor.is_cpu is not backends.is_on_host()
        or not tensor.is_contiguous()
    ):
        found = f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        wanted = f"dense {list(shape)} {dtype} on {backends.device()}"
        raise ValueError(f"{name}: found {found}, expected {wanted}".replace("torch.", ""))


def _check_rows(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: ExpertBank) -> None:
    if x.dim() != 2 or x.shape[1] != bank.D or x.dtype is not torch.float32 or x.stride(1) != 1:
        raise ValueError(
            f"x: found {list(x.shape)} {x.dtype}, expected [T, {bank.D}] float32, dense within a row"
        )
    _check("rows", rows, torch.int32, (len(rows),))
    _check("expert_ids", expert_ids, torch.int32, (len(rows),))


def _check_parts(bank: ExpertBank, num_parts: int) -> None:
    if not 1 <= num_parts <= MOST_PARTS or bank.F % num_parts:
        raise ValueError(
            f"num_parts: found {num_parts}, expected 1 to {MOST_PARTS} that divide the width {bank.F} of the experts"
        )


def _handle(bank: ExpertBank, expert_ids: Tensor) -> object:
    if bank.backend is None:
        asked = int(expert_ids.view(-1)[0])
        raise IndexError(f"expert_ids: asks for expert {asked}, but none is resident in this bank")
    return bank.handle


def _did(done: object, name: str) -> None:
    if done is False:
        raise AssertionError(f"{name}: the compiled kernels declined arguments that passed the checks")
