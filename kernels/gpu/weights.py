"""Packed weights of the GPU: how they lie in memory, and the experts a layer has resident. Knows layouts, no kernel.

A dense weight is a tensor of values and a tensor of scales. An expert is one buffer of bytes: gate (or nothing), up,
their scales and biases, then down, its scales and bias, at offsets that follow from shape and format. A bank is a table
of addresses on the device, so experts come and go without moving others, and a captured graph sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kernels.gpu.quantise import (
    FLOATS,
    FORMATS,
    GROUP,
    SCALE_DTYPE,
    Codes,
    dequantise,
    from_mxfp4,
    quantise,
    section_shapes,
    value_dtype,
)
from kernels.gpu.tiles import NIBBLE_BLOCK, NIBBLE_FORMATS
from kernels.reference.formats import MXFP4, Weight, stored_format

AS_STORED = "as_stored"
ACTIVATIONS = ("swiglu", "geglu_tanh", "clamped_swiglu", "relu")
ALIGNMENT = 256  # bytes; every section of an expert begins on one


def _format(weight: Weight, format: str) -> str:
    found = stored_format(weight) if format == AS_STORED else format
    if found not in FORMATS:
        raise ValueError(f"format: found {found!r}, expected {AS_STORED} or one of {', '.join(FORMATS)}")
    return found


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeight:
    """One packed, immutable weight of num_outputs (N) rows and num_inputs (K) columns."""

    num_outputs: int
    num_inputs: int
    format: str
    values: Tensor = field(repr=False)
    scales: Tensor | None = field(repr=False)
    operand: torch.dtype = torch.bfloat16
    """What x and the unpacked weight are rounded to before they are multiplied; sums are float32."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)


def _operand(weight: Weight, format: str) -> torch.dtype:
    """float16 and float32 weights multiply as they are; codes as the dtype they were made from, never float32."""
    if format in FLOATS:
        return FLOATS[format]
    is_half = isinstance(weight, Tensor) and weight.dtype is torch.float16
    return torch.float16 if is_half else torch.bfloat16


def _moved(weight: Weight, device: torch.device | None) -> Weight:
    """A weight on this device, where it is encoded; None: where it is."""
    if device is None:
        return weight
    if isinstance(weight, MXFP4):
        return MXFP4(weight.blocks.to(device), weight.scales.to(device))
    assert isinstance(weight, Tensor), "codes of the CPU's layouts are not packed again"
    return weight.detach().to(device)


def _device(weight: Weight) -> torch.device:
    return weight.blocks.device if isinstance(weight, MXFP4) else weight.device  # type: ignore[union-attr]


def pack_linear(weight: Weight, *, format: str = AS_STORED) -> LinearWeight:
    """Pack a weight [N, K] as checkpoints hold it, on its device."""
    return pack_linear_rows([weight], format=format)


def pack_linear_rows(
    weights: Sequence[Weight], *, format: str = AS_STORED, device: torch.device | None = None
) -> LinearWeight:
    """Pack several weights [Ni, K] as one, rows one after another (q, k, v), on `device` or on theirs."""
    if not weights:
        raise ValueError("weights: found none, expected at least one")
    format = _format(weights[0], format)
    N, K = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    shape, scale_shape = section_shapes(N, K, format)
    device = device or _device(weights[0])
    values = torch.empty(shape, dtype=value_dtype(format), device=device)
    scales = torch.empty(scale_shape, dtype=SCALE_DTYPE[format], device=device) if scale_shape else None
    begin = 0
    for weight in weights:  # one at a time: no second copy of the whole
        part, part_scales = quantise(_moved(weight, device), format)
        rows = slice(begin, begin + weight.shape[0])
        (values[:, rows] if format in NIBBLE_FORMATS else values[rows]).copy_(part)
        if scales is not None and part_scales is not None:
            (scales[:, rows] if format in NIBBLE_FORMATS else scales[rows]).copy_(part_scales)
        begin += weight.shape[0]
    return LinearWeight(N, K, format, values, scales, _operand(weights[0], format))


@dataclass(frozen=True, slots=True, eq=False)
class HeadsWeight:
    """One matrix [N, K] per head, stacked by rows: the products of latent attention."""

    num_heads: int
    stacked: LinearWeight

    @property
    def num_outputs(self) -> int:
        return self.stacked.num_outputs // self.num_heads

    @property
    def num_inputs(self) -> int:
        return self.stacked.num_inputs

    @property
    def format(self) -> str:
        return self.stacked.format

    @property
    def nbytes(self) -> int:
        return self.stacked.nbytes


def pack_linear_heads(weights: Tensor, *, format: str = AS_STORED) -> HeadsWeight:
    """Pack one matrix per head, weights [H, N, K] of any strides."""
    return HeadsWeight(len(weights), pack_linear_rows(list(weights), format=format))


def dequantised_linear(w: LinearWeight) -> Tensor:
    """What a packed weight stands for: float32 [N, K]."""
    return dequantise(Codes(w.values, w.scales), w.num_inputs, w.format)


@dataclass(frozen=True)
class ExpertLayout:
    """Where the parts of an expert lie in its buffer, in bytes. One for all experts of a bank."""

    D: int
    F: int
    format: str
    activation: str
    has_bias: bool
    operand: torch.dtype
    alpha: float = 1.0
    limit: float = float("inf")

    @property
    def inner_rows(self) -> int:
        """Rows of the first weight: gate and up, or up alone."""
        return self.F if self.activation == "relu" else 2 * self.F

    @cached_property
    def sections(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """Name to (offset, shape, dtype); absent ones have no entry."""
        found: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        end = 0
        for name, N, K in (("in", self.inner_rows, self.D), ("out", self.D, self.F)):
            shape, scale_shape = section_shapes(N, K, self.format)
            parts: list[tuple[str, tuple[int, ...], torch.dtype]] = [(name, shape, value_dtype(self.format))]
            if scale_shape is not None:
                parts.append((f"{name}_scale", scale_shape, SCALE_DTYPE[self.format]))
            if self.has_bias:
                parts.append((f"{name}_bias", (N,), torch.float32))
            for part, part_shape, dtype in parts:
                found[part] = (end, part_shape, dtype)
                size = dtype.itemsize * torch.Size(part_shape).numel()
                end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        found["end"] = (end, (), torch.uint8)
        return found

    def first_element(self, name: str) -> int:
        """Elements from the buffer's begin to a part; 0 for a part that is absent."""
        if name not in self.sections:
            return 0
        offset, _, dtype = self.sections[name]
        return offset // dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.first_element("end")

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """One part of an expert's buffer, in its shape and dtype."""
        offset, shape, dtype = self.sections[name]
        size = dtype.itemsize * torch.Size(shape).numel()
        return buffer[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeight:
    """One packed, immutable expert."""

    layout: ExpertLayout
    buffer: Tensor = field(repr=False)

    @property
    def D(self) -> int:
        return self.layout.D

    @property
    def F(self) -> int:
        return self.layout.F

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes


def pack_expert(
    gate: Weight | None,
    up: Weight,
    down: Weight,
    *,
    format: str = AS_STORED,
    activation: str = "swiglu",
    alpha: float = 1.0,
    limit: float | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    device: torch.device | None = None,
) -> ExpertWeight:
    """Pack one expert on `device`, or on that of `up`: gate and up [F, D], down [D, F]; biases [F], [F], [D]. "relu" has no
    gate; `alpha` and `limit` belong to "clamped_swiglu".

    Strided weights are welcome: gate and up that lie row by row in turn (gpt_oss) come as `both[0::2]` and `both[1::2]`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: found {activation!r}, expected one of {', '.join(ACTIVATIONS)}")
    if (gate is None) != (activation == "relu"):
        raise ValueError(
            f"gate: found {None if gate is None else list(gate.shape)} for activation {activation!r}"
        )
    F, D = up.shape
    inner = [up] if gate is None else [gate, up]
    for name, weight, shape in (("gate", inner[0], (F, D)), ("down", down, (D, F))):
        if weight.shape != shape:
            raise ValueError(f"{name}: found {list(weight.shape)}, expected {list(shape)}")
    format = _format(up, format)
    has_bias = any(bias is not None for bias in (gate_bias, up_bias, down_bias))
    highest = float("inf") if limit is None else limit
    layout = ExpertLayout(D, F, format, activation, has_bias, _operand(up, format), alpha, highest)
    device = device or _device(up)
    codes = [quantise(_moved(weight, device), format) for weight in (*inner, down)]
    return _fill(layout, codes, [gate_bias, up_bias][-len(inner) :], down_bias, device)


def pack_mxfp4_expert(
    inner: Sequence[tuple[Tensor, Tensor]],
    down: tuple[Tensor, Tensor],
    *,
    activation: str = "clamped_swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    inner_biases: Sequence[Tensor | None] = (None, None),
    down_bias: Tensor | None = None,
) -> ExpertWeight:
    """Pack an expert whose weights a checkpoint holds as MXFP4, bit for bit.

    inner  (blocks [F, D / 32, 16], scales [F, D / 32]) of gate and of up;  down  ([D, F / 32, 16], [D, F / 32])
    """
    F, num_groups, _ = inner[0][0].shape
    has_bias = any(bias is not None for bias in (*inner_biases, down_bias))
    D = num_groups * GROUP
    layout = ExpertLayout(D, F, "mxfp4", activation, has_bias, torch.bfloat16, alpha, limit)
    codes = [from_mxfp4(*weight) for weight in (*inner, down)]
    return _fill(layout, codes, list(inner_biases), down_bias, down[0].device)


def _fill(
    layout: ExpertLayout,
    codes: Sequence[Codes],
    inner_biases: Sequence[Tensor | None],
    down_bias: Tensor | None,
    device: torch.device,
) -> ExpertWeight:
    """One buffer of what `codes` holds: the inner weights one after another, then down."""
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    nibbles = layout.format in NIBBLE_FORMATS
    for i, (values, scales) in enumerate(codes):
        name = "out" if i == len(codes) - 1 else "in"
        rows = slice(None) if name == "out" else slice(i * layout.F, (i + 1) * layout.F)
        place = layout.view(buffer, name)
        (place[:, rows] if nibbles else place[rows]).copy_(values)
        if scales is not None:
            place = layout.view(buffer, f"{name}_scale")
            (place[:, rows] if nibbles else place[rows]).copy_(scales)
    if layout.has_bias:
        for i, bias in enumerate(inner_biases):
            if bias is not None:
                layout.view(buffer, "in_bias")[i * layout.F : (i + 1) * layout.F].copy_(bias)
        if down_bias is not None:
            layout.view(buffer, "out_bias").copy_(down_bias)
    return ExpertWeight(layout, buffer)


def dequantised_expert(expert: ExpertWeight) -> dict[str, Tensor]:
    """What an expert stands for: float32 `gate`, `up` [F, D], `down` [D, F], and the biases it has."""
    layout, F = expert.layout, expert.F

    def whole(name: str, K: int) -> Tensor:
        scale = f"{name}_scale"
        scales = layout.view(expert.buffer, scale) if scale in layout.sections else None
        return dequantise(Codes(layout.view(expert.buffer, name), scales), K, layout.format)

    inner = whole("in", layout.D)
    found = {"up": inner[-F:], "down": whole("out", F)}
    if layout.activation != "relu":
        found["gate"] = inner[:F]
    if layout.has_bias:
        bias = layout.view(expert.buffer, "in_bias")
        found |= {"up_bias": bias[-F:], "down_bias": layout.view(expert.buffer, "out_bias")}
        if layout.activation != "relu":
            found["gate_bias"] = bias[:F]
    return found


class ExpertBank:
    """The resident experts of one layer, by id: one shape, format and activation for all.

    An id may also name a slice of an expert (`set_slice`): rows of gate and up, the same columns of down. `set` and
    `drop` run on the stream that computes; what a launched kernel reads stays until it has run.
    """

    def __init__(self, num_experts: int, D: int, F: int, *, device: torch.device | str = "cuda") -> None:
        self.num_experts = num_experts
        self.D = D
        self.F = F
        self.layout: ExpertLayout | None = None  # of the first expert; all others must share it
        self.addresses = torch.zeros(num_experts, dtype=torch.int64, device=device)
        """Where each expert's buffer begins; 0: not resident."""
        self.ranges = torch.zeros(num_experts, 2, dtype=torch.int32, device=device)
        """First inner row and number of inner rows of each id."""
        self.missing = torch.zeros(1, dtype=torch.int32, device=device)
        """1 + the id of an expert that was asked for and not resident; 0: none. See `check`."""
        self.has_slices = False
        self._experts: dict[int, ExpertWeight] = {}

    def set(self, expert_id: int, expert: ExpertWeight) -> None:
        """Make an expert resident, in place of the one that had this id."""
        self.set_slice(expert_id, expert, 0, self.F)

    def set_slice(self, slice_id: int, expert: ExpertWeight, begin: int, count: int) -> None:
        """Let this id mean inner rows begin..begin+count of an expert, whose down bias belongs to the slice at 0."""
        self._check_id(slice_id)
        if (expert.D, expert.F) != (self.D, self.F):
            raise ValueError(
                f"expert: found D={expert.D}, F={expert.F}, expected D={self.D}, F={self.F} of this bank"
            )
        if self.layout is not None and expert.layout != self.layout:
            raise ValueError(
                f"expert: packed as {expert.layout}, expected {self.layout} as the others in this bank"
            )
        step = NIBBLE_BLOCK if expert.format in NIBBLE_FORMATS else 16  # loads stay whole
        whole = (begin, count) == (0, self.F)
        ends_well = begin + count == self.F or (begin + count) % step == 0
        if not whole and not (
            0 <= begin < begin + count <= self.F and begin % step == 0 and ends_well and self.F % 16 == 0
        ):
            raise ValueError(
                f"slice: found rows {begin} to {begin + count}, expected multiples of {step} within 0 to {self.F}"
            )
        self.layout = expert.layout
        self.has_slices |= count < self.F
        self._experts = {**self._experts, slice_id: expert}
        self.ranges[slice_id] = torch.tensor((begin, count), dtype=torch.int32)
        self.addresses[slice_id] = expert.buffer.data_ptr()

    def drop(self, expert_id: int) -> None:
        """Release an expert; its memory goes when no id names it and no launched kernel reads it."""
        self._check_id(expert_id)
        if expert_id not in self._experts:
            raise IndexError(f"expert {expert_id} is not resident in this bank of {self.num_experts}")
        self.addresses[expert_id] = 0
        self._experts = {i: expert for i, expert in self._experts.items() if i != expert_id}

    def check(self) -> None:
        """Wait for the device; IndexError if an expert was asked for that was not resident."""
        asked = int(self.missing) - 1
        if asked >= 0:
            self.missing.zero_()
            raise IndexError(
                f"expert_ids: asks for expert {asked}, which is not resident in this bank of {self.num_experts}"
            )

    def _check_id(self, expert_id: int) -> None:
        if not 0 <= expert_id < self.num_experts:
            raise IndexError(f"expert_id: found {expert_id}, expected 0 to {self.num_experts - 1}")

    @property
    def resident(self) -> tuple[int, ...]:
        """Ids of the resident experts and slices, ascending."""
        return tuple(sorted(self._experts))

    def expert(self, expert_id: int) -> ExpertWeight:
        return self._experts[expert_id]

    @property
    def num_resident(self) -> int:
        return len(self._experts)

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in {id(e): e for e in self._experts.values()}.values())
