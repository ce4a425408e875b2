"""The trunk: all weights of a range of layers except routed experts, with embedding and head where they belong."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from edge_runtime.model.attention import AttentionWeights, LatentWeights
from edge_runtime.model.gate import GateWeights
from kernels.ops import ExpertBank, LinearWeight


class CrossWeights(NamedTuple):
    """Attention to what an encoder gave."""

    norm: Tensor  # [D]
    q: LinearWeight  # [H P, D]
    kv: LinearWeight  # [2 H P, D], keys above values
    out: LinearWeight  # [D, H P]


class LayerWeights(NamedTuple):
    """One layer. Vectors are float32 [D] unless said; what its spec does not ask for is None."""

    input_norm: Tensor
    attention: AttentionWeights | LatentWeights
    post_norm: Tensor  # before the experts, or before a dense layer's MLP
    gate: GateWeights | None = None
    dense: ExpertBank | None = (
        None  # the one expert that all rows use: a dense layer's MLP, or one beside the experts
    )
    shared_gate: LinearWeight | None = None  # [1, D]
    attention_out_norm: Tensor | None = None
    ffn_out_norm: Tensor | None = None
    dense_norm: Tensor | None = None  # before a dense MLP beside the experts ...
    dense_out_norm: Tensor | None = None  # ... behind it ...
    routed_out_norm: Tensor | None = None  # ... and behind the experts' sum
    output_scale: Tensor | None = None  # [1]
    cross: CrossWeights | None = None
    closing_norm: Tensor | None = None  # behind an encoder's last layer


class Trunk(NamedTuple):
    """Layers [first_layer, last_layer) of one model.

    A tied head is the very object that embeds, and counted once. Only the trunk with layer 0 embeds, only the one
    with the last layer has norm and head.
    """

    first_layer: int
    last_layer: int
    layers: tuple[LayerWeights, ...]
    ropes: tuple[tuple[Tensor, Tensor], ...]  # every table of the model: cos and sin, [S, width / 2] float32
    embed: LinearWeight | None  # [V, D]
    final_norm: Tensor | None  # [D] float32
    head: LinearWeight | None  # [V, D]
    encoder_embed: LinearWeight | None = None  # [V, D], if an encoder embeds by a table of its own

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
