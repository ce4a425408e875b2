"""Which tensors a family's checkpoint holds: role -> name and shape. Knows no file.

A role is our word for a tensor (`q`, `gate`, `expert_up`); a family's table says what its checkpoints call it and
how its shape follows from the spec. All code below speaks roles, so no name of a family appears outside its file.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from edge_runtime.model.spec import LayerSpec, ModelSpec

Shape = tuple[int, ...]

DENSE_ROLES = ("dense_gate", "dense_up", "dense_down")
EXPERT_ROLES = ("expert_gate", "expert_up", "expert_down")


class TableRow(NamedTuple):
    """Name with `{layer}` and `{expert}` left open, and the shape in letters, such as `("H*P", "D")`."""

    name: str
    shape: tuple[str, ...]


class TensorTable:
    """The names and shapes of one model's tensors.

    Roles every table has: `embed`, `final_norm`, `head`; per layer `input_norm`, `post_norm`, `q`, `k`, `v`, `o`; per
    dense layer `dense_gate`, `dense_up`, `dense_down`; per MoE layer `gate`, `expert_gate`, `expert_up`,
    `expert_down`. `q_norm`, `k_norm` and the biases are there if the spec asks for them.
    """

    def __init__(self, spec: ModelSpec, rows: Mapping[str, TableRow]) -> None:
        self._spec = spec
        self._rows = rows

    def name(self, role: str, layer: int | None = None, expert: int | None = None) -> str:
        """The tensor's name in the checkpoint."""
        return self._rows[role].name.format(layer=layer, expert=expert)

    def shape(self, role: str, layer: int | None = None) -> Shape:
        """The shape this tensor must have."""
        letters = _letters(self._spec, None if layer is None else self._spec.layers[layer], role)
        return tuple(_product(term, letters) for term in self._rows[role].shape)

    def trunk_roles(self, layer: int) -> list[str]:
        """Roles of one layer except those of its routed experts."""
        spec = self._spec.layers[layer]
        roles = ["input_norm", "q", "k", "v", "o", "post_norm"]
        if spec.attention.qk_norm != "none":
            roles += ["q_norm", "k_norm"]
        if spec.attention.qkv_bias:
            roles += ["q_bias", "k_bias", "v_bias"]
        if spec.attention.out_bias:
            roles += ["o_bias"]
        return roles + (["gate"] if spec.kind == "moe" else [*DENSE_ROLES])

    def all_tensors(self) -> Iterator[tuple[str, Shape]]:
        """Every tensor of the model with its shape, the head included even if it may be tied."""
        for role in ("embed", "final_norm", "head"):
            yield self.name(role), self.shape(role)
        for layer, spec in enumerate(self._spec.layers):
            for role in self.trunk_roles(layer):
                yield self.name(role, layer), self.shape(role, layer)
            if spec.gate is not None:
                for role in EXPERT_ROLES:
                    shape = self.shape(role, layer)
                    for expert in range(spec.gate.num_experts):
                        yield self.name(role, layer, expert), shape


def _letters(spec: ModelSpec, layer: LayerSpec | None, role: str) -> dict[str, int]:
    letters = {"D": spec.width, "V": spec.vocab_size}
    if layer is not None:
        attention = layer.attention
        letters |= {"H": attention.num_heads, "G": attention.num_kv_heads, "P": attention.head_width}
        letters["F"] = layer.ffn.width
        if layer.gate is not None:
            letters["E"] = layer.gate.num_experts
    return letters


def _product(term: str, letters: Mapping[str, int]) -> int:
    result = 1
    for letter in term.split("*"):
        result *= letters[letter]
    return result
