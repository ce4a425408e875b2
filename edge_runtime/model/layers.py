"""The trunk: all weights of a range of layers except routed experts, with embedding and head where they belong."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from edge_runtime.model.attention import AttentionWeights
from kernels.ops import ExpertBank, LinearWeight


class LayerWeights(NamedTuple):
    """One decoder layer. Norms are float32; either `gate` or `dense` is there."""

    input_norm: Tensor  # [D]
    attention: AttentionWeights
    post_norm: Tensor  # [D]
    gate: LinearWeight | None  # [E, D]
    dense: ExpertBank | None  # a dense layer's MLP: the one expert that all rows use


class Trunk(NamedTuple):
    """Layers [first_layer, last_layer) of one model.

    A tied head is the very object that embeds, and counted once. Only the trunk with layer 0 embeds, only the one
    with the last layer has norm and head.
    """

    first_layer: int
    last_layer: int
    layers: tuple[LayerWeights, ...]
    rope: tuple[Tensor, Tensor]  # cos and sin, [S, P/2] float32
    embed: LinearWeight | None  # [V, D]
    final_norm: Tensor | None  # [D] float32
    head: LinearWeight | None  # [V, D]

    @property
    def nbytes(self) -> int:
        """Bytes of all its weights and tables."""
        return sum({id(part): part.nbytes for part in _parts(self)}.values())


def _parts(value: object) -> Iterator[Tensor | LinearWeight | ExpertBank]:
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    elif hasattr(value, "nbytes"):
        yield value
