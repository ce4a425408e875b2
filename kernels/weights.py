"""Packed weights as the runtime holds them. Knows no layout: that is the business of the backend that packed them."""

from dataclasses import dataclass, field
from typing import Any

from kernels.packing import packed_expert_bytes, packed_linear_bytes


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeight:
    """One packed, immutable weight of num_outputs (N) rows and num_inputs (K) columns."""

    num_outputs: int
    num_inputs: int
    format: str
    """One of `kernels.packing.FORMATS`: how the values stand in memory. Products are always float32."""
    handle: Any = field(repr=False)
    backend: Any = field(repr=False)

    @property
    def nbytes(self) -> int:
        return packed_linear_bytes(self.num_outputs, self.num_inputs, self.format)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeight:
    """One packed, immutable expert of width D and inner width F."""

    D: int
    F: int
    format: str
    handle: Any = field(repr=False)
    backend: Any = field(repr=False)
    gated: bool = True
    """Three matrices; without a gate two."""
    has_biases: bool = False

    @property
    def nbytes(self) -> int:
        return packed_expert_bytes(self.D, self.F, self.format, gated=self.gated, biases=self.has_biases)


class ExpertBank:
    """The resident experts of one layer, by id. They may differ in format, not in shape.

    `set` and `drop` may run in one thread while another computes: a call works on the experts it found.
    """

    def __init__(self, num_experts: int, D: int, F: int) -> None:
        self.num_experts = num_experts
        self.D = D
        self.F = F
        self.backend: Any = None  # of the first expert; all others must share it
        self.handle: Any = None
        self._experts: dict[int, ExpertWeight] = {}

    def set(self, expert_id: int, expert: ExpertWeight) -> None:
        """Make an expert resident, in place of the one that had this id."""
        self._check_id(expert_id)
        if (expert.D, expert.F) != (self.D, self.F):
            raise ValueError(
                f"expert: found D={expert.D}, F={expert.F}, expected D={self.D}, F={self.F} of this bank"
            )
        if self.backend is None:
            self.backend = expert.backend
            self.handle = expert.backend.new_bank(self.num_experts, self.D)
        if expert.backend is not self.backend:
            raise ValueError(
                f"expert: packed for backend {expert.backend.NAME}, expected {self.backend.NAME} as the others in this bank"
            )
        self.handle.set(expert_id, expert.handle)
        self._experts = {**self._experts, expert_id: expert}

    def drop(self, expert_id: int) -> None:
        """Release an expert; its memory goes when no call uses it any more."""
        self._check_id(expert_id)
        if expert_id not in self._experts:
            raise IndexError(f"expert {expert_id} is not resident in this bank of {self.num_experts}")
        self.handle.drop(expert_id)
        self._experts = {i: expert for i, expert in self._experts.items() if i != expert_id}

    def get(self, expert_id: int) -> ExpertWeight | None:
        """The resident expert of that id; it may be put into another bank as well."""
        return self._experts.get(expert_id)

    def _check_id(self, expert_id: int) -> None:
        if not 0 <= expert_id < self.num_experts:
            raise IndexError(f"expert_id: found {expert_id}, expected 0 to {self.num_experts - 1}")

    @property
    def resident(self) -> tuple[int, ...]:
        """Ids of the resident experts, ascending."""
        return tuple(sorted(self._experts))

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self._experts.values())
