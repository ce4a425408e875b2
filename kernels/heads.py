"""One packed matrix per head, for the products of latent attention."""

from dataclasses import dataclass, field
from typing import Any

from kernels.weights import LinearWeight


@dataclass(frozen=True, slots=True, eq=False)
class HeadsWeight:
    """Matrices of one shape, one per head, packed by one backend."""

    heads: tuple[LinearWeight, ...] = field(repr=False)
    handle: Any = field(repr=False)

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def num_outputs(self) -> int:
        return self.heads[0].num_outputs

    @property
    def num_inputs(self) -> int:
        return self.heads[0].num_inputs

    @property
    def format(self) -> str:
        return self.heads[0].format

    @property
    def backend(self) -> Any:
        return self.heads[0].backend

    @property
    def nbytes(self) -> int:
        return sum(head.nbytes for head in self.heads)
