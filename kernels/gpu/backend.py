"""The Triton kernels as a backend of `kernels.ops`: its signatures, on the device that `kernels.backends` was told.

Rows are float32, as everywhere in the runtime; products round them to the weight's operand dtype. Decode rows and rows of
prompts take the same tiles and pieces, so a row's bits depend on nothing beside it. Calls return before the device is
done, but for those that must know something: `dispatch`, and what may ask for an expert that is not here.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels import backends, gpu
from kernels.activations import Activation
from kernels.gpu.quantise import FORMATS as ALL_FORMATS
from kernels.gpu.tiles import INTERPRETED, target
from kernels.gpu.weights import ExpertBank, ExpertWeight, HeadsWeight, LinearWeight
from kernels.reference.choose_slices import choose_slices as choose_slices_by_torch
from kernels.reference.dispatch import Dispatched
from kernels.reference.formats import Weight
from kernels.reference.gate_topk import Counting, GateRule
from kernels.reference.grouped_ffn import Biases

NAME = "triton"
CHECKS = False
FORMATS = dict.fromkeys(("linear", "embed", "grouped_ffn"), ALL_FORMATS)
"""Those of `kernels.packing` but bfloat16x2, whose sums are those of a processor's matrix registers."""
KEYS_END_IN_TOKENS = False
"""Pages of keys are [num_blocks, G, 16, P]: see kv_blocks.py."""

P = ParamSpec("P")
T = TypeVar("T")


def on_its_device(function: Callable[P, T]) -> Callable[P, T]:
    """Launch on the backend's device: which one is current is a matter of the thread, and starts as the first."""

    @functools.wraps(function)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        device = backends.device()
        if device.index and torch.cuda.current_device() != device.index:
            torch.cuda.set_device(device)
        return function(*arguments, **named)

    return run


def page_dtype(format: str) -> torch.dtype:
    """How keys and values are kept beside attention of this format: as its products take them."""
    if INTERPRETED or format == "float32":
        return torch.float32
    return torch.float16 if format == "float16" else torch.bfloat16


def numerics() -> str:
    """Tiles, and with them the order of sums, are those of a chip."""
    return f"{NAME}-{'interpreted' if INTERPRETED else target(backends.device())}"


def set_num_threads(threads: int) -> None:
    """Of what the host does beside the device."""
    torch.set_num_threads(threads)


num_threads = torch.get_num_threads


def pack_rows(weights: Sequence[Weight], format: str) -> LinearWeight:
    return gpu.pack_linear_rows(weights, format=format, device=backends.device())


def pack_expert(
    gate: Weight | None, up: Weight, down: Weight, format: str, activation: Activation, biases: Biases
) -> ExpertWeight:
    gate_bias, up_bias, down_bias = biases
    return gpu.pack_expert(
        gate,
        up,
        down,
        format=format,
        activation=activation.kind,
        alpha=activation.alpha,
        limit=activation.limit,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=down_bias,
        device=backends.device(),
    )


def new_heads(heads: Sequence[LinearWeight]) -> HeadsWeight:
    """Matrices of one shape and format, one per head, as one weight."""
    first = heads[0]
    along = 1 if first.values.dim() == 3 else 0  # nibble formats: [K / 64, N, 32]
    values = torch.cat([head.values for head in heads], dim=along)
    scales = None
    if first.scales is not None:
        scales = torch.cat([head.scales for head in heads if head.scales is not None], dim=along)
    num_outputs = first.num_outputs * len(heads)
    stacked = LinearWeight(num_outputs, first.num_inputs, first.format, values, scales, first.operand)
    return HeadsWeight(len(heads), stacked)


class Bank:
    """A layer's experts; where they lie is known with the first of them."""

    def __init__(self, num_experts: int, width: int) -> None:
        self._shape = num_experts, width
        self.on_device: ExpertBank | None = None

    @on_its_device
    def set(self, expert_id: int, expert: ExpertWeight) -> None:
        if self.on_device is None:
            self.on_device = ExpertBank(*self._shape, expert.F, device=expert.buffer.device)
        self.on_device.set(expert_id, expert)

    @on_its_device
    def drop(self, expert_id: int) -> None:
        assert self.on_device is not None, "only what was set is dropped"
        self.on_device.drop(expert_id)

    @property
    def filled(self) -> ExpertBank:
        assert self.on_device is not None, "ops looks whether any expert is resident"
        return self.on_device

    @property
    def may_lack(self) -> bool:
        """Whether an expert may be asked for that is not here, which only the device can tell."""
        return self.filled.num_resident < self.filled.num_experts


new_bank = Bank


@on_its_device
def linear(x: Tensor, w: LinearWeight, bias: Tensor | None, out: Tensor, add: bool) -> None:
    gpu.linear(x, w, bias=bias, out=out, add=add)


@on_its_device
def linear_heads(x: Tensor, w: HeadsWeight, out: Tensor) -> None:
    gpu.linear_heads(x, w, out=out)


@on_its_device
def embed(token_ids: Tensor, w: LinearWeight, out: Tensor) -> None:
    gpu.embed(token_ids, w, out=out)


@on_its_device
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out: Tensor) -> None:
    gpu.rms_norm(x, weight, eps, out=out)


@on_its_device
def head_norm_rope(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool,
) -> None:
    gpu.head_norm_rope(x, weight, eps, cos, sin, positions, interleaved=interleaved)


soft_cap = on_its_device(gpu.soft_cap)
kv_write = on_its_device(gpu.kv_write)
kv_copy = on_its_device(gpu.kv_copy)
combine = on_its_device(gpu.combine)


@on_its_device
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    rows = block_tables, row_request, row_position, scale
    gpu.paged_attention(q, k_pages, v_pages, *rows, window=window, sinks=sinks, soft_cap=soft_cap, out=out)


@on_its_device
def biased_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    row_request: Tensor,
    row_position: Tensor,
    scale: float,
    bias: Tensor,
    own_position: Tensor,
    out: Tensor,
) -> None:
    rows = block_tables, row_request, row_position, scale
    gpu.biased_attention(q, k_pages, v_pages, *rows, bias, own_position, out=out)


@on_its_device
def gate_topk(
    logits: Tensor, k: int, rule: GateRule, counting: Counting | None, ids: Tensor, weights: Tensor
) -> None:
    gpu.gate_topk(logits, k, **rule._asdict(), counting=counting, out=(ids, weights))


@on_its_device
def dispatch(expert_ids: Tensor, host_of_expert: Tensor, num_hosts: int) -> Dispatched:
    """Where the ids are: a step's are in the host's memory when messages are made of them."""
    if expert_ids.is_cpu and not backends.is_on_host():
        return backends.for_host().dispatch(expert_ids, host_of_expert, num_hosts)
    return gpu.dispatch(expert_ids, host_of_expert, num_hosts)


@on_its_device
def grouped_ffn(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: Bank, out: Tensor) -> None:
    gpu.grouped_ffn(x, rows, expert_ids, bank.filled, out=out, check=bank.may_lack)


@on_its_device
def sliced_ffn(
    x: Tensor, rows: Tensor, expert_ids: Tensor, masks: Tensor, num_parts: int, bank: Bank, out: Tensor
) -> None:
    gpu.sliced_ffn(x, rows, expert_ids, masks, num_parts, bank.filled, out=out, check=bank.may_lack)


@on_its_device
def expert_inner(x: Tensor, rows: Tensor, expert_ids: Tensor, bank: Bank, out: Tensor) -> None:
    gpu.expert_inner(x, rows, expert_ids, bank.filled, out=out, check=bank.may_lack)


choose_slices = choose_slices_by_torch
