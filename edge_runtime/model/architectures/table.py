"""Which tensors a family's checkpoint holds: role -> where it lies, under each name it may have. Knows no file.

A role is our word for a tensor (`q`, `gate`, `expert_up`); a family's table says what its checkpoints call it, how its
shape follows from the spec and, where several roles lie in one tensor, which part is whose. All code below speaks
roles, so no name of a family appears outside its file.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from edge_runtime.model.spec import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec

Shape = tuple[int, ...]
Take = Literal["all", "first_half", "second_half", "even", "odd"]

EXPERT_ROLES = ("expert_gate", "expert_up", "expert_down")
EXPERT_BIAS_ROLES = ("expert_gate_bias", "expert_up_bias", "expert_down_bias")
MXFP4_BLOCK = 32  # numbers that share one scale


class TableRow(NamedTuple):
    """One way in which a role is stored.

    name    `{layer}` and `{expert}` are left open; without `{expert}`, a first letter E stacks all experts
    shape   of the stored tensor in letters, such as `("H*P", "D")`
    take    which rows of it (columns, if it is transposed) are this role's
    transposed   it is stored as [inputs, outputs]
    mxfp4   it is two tensors, `name_blocks` and `name_scales`, and `shape` is what they stand for
    """

    name: str
    shape: tuple[str, ...]
    take: Take = "all"
    transposed: bool = False
    mxfp4: bool = False


Rows = Mapping[str, TableRow | tuple[TableRow, ...]]
"""role -> its row, or several of which a checkpoint has one."""


class Part(NamedTuple):
    """Where one role of one layer lies: a stored tensor, or some rows of it."""

    role: str
    name: str
    stored_shape: Shape
    expert: int | None
    """Index along the first axis of a tensor that stacks experts."""
    take: Take
    transposed: bool
    mxfp4: bool

    @property
    def tensors(self) -> tuple[tuple[str, Shape, tuple[str, ...] | None], ...]:
        """Name, shape and dtypes of the stored tensors it needs; dtypes None for any float."""
        if not self.mxfp4:
            return ((self.name, self.stored_shape, None),)
        *rows, columns = self.stored_shape
        num_blocks = columns // MXFP4_BLOCK
        blocks = (*rows, num_blocks, MXFP4_BLOCK // 2)
        return (
            (f"{self.name}_blocks", blocks, ("U8",)),
            (f"{self.name}_scales", (*rows, num_blocks), ("U8",)),
        )

    @property
    def shape(self) -> Shape:
        """Shape of the role itself, as [outputs, inputs]."""
        shape = self.stored_shape if self.expert is None else self.stored_shape[1:]
        shape = shape[::-1] if self.transposed else shape
        return shape if self.take == "all" else (shape[0] // 2, *shape[1:])


class TensorTable:
    """The parts of one model, by role.

    Roles every table has: `embed`, `final_norm`, `head`, and what `layer_packings` and EXPERT_ROLES name for the spec's
    layers. Until `bind` says which tensors exist, the first way of storing a role stands.
    """

    def __init__(
        self, spec: ModelSpec, rows: Rows, *, encoder_rows: Rows | None = None, ignored: tuple[str, ...] = ()
    ) -> None:
        """encoder_rows: how the layers of an encoder are stored; `{layer}` counts from 0 in each half."""
        self._spec = spec
        self._rows = _as_tuples(rows)
        self._encoder_rows = _as_tuples(encoder_rows or {})
        self._encoder_layers = spec.encoder.num_layers if spec.encoder else 0
        self._ignored = ignored
        self._present: Collection[str] = ()

    def bind(self, names: Collection[str]) -> None:
        """Settle how each role is stored by the names of the tensors that exist."""
        self._present = names

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is no part of what is run, and known to be none."""
        return any(part in name for part in (*self._ignored, "rotary_emb.inv_freq"))

    def part(self, role: str, layer: int | None = None, expert: int | None = None) -> Part:
        """Where a role lies."""
        in_encoder = layer is not None and layer < self._encoder_layers
        rows = self._encoder_rows[role] if in_encoder else self._rows[role]
        number = layer if layer is None or in_encoder else layer - self._encoder_layers
        found = rows[0]
        if len(rows) > 1:
            for row in rows:
                name = row.name.format(layer=number, expert=expert)
                if (f"{name}_blocks" if row.mxfp4 else name) in self._present:
                    found = row
                    break
        stacks = expert is not None and "{expert}" not in found.name
        return Part(
            role,
            found.name.format(layer=number, expert=expert),
            self._shape(found, role, layer),
            expert if stacks else None,
            found.take,
            found.transposed,
            found.mxfp4,
        )

    def name(self, role: str, layer: int | None = None, expert: int | None = None) -> str:
        """The name of the stored tensor a role lies in."""
        return self.part(role, layer, expert).name

    def trunk_roles(self, layer: int) -> list[str]:
        """Roles of one layer except those of its routed experts."""
        packings = layer_packings(self._spec.layers[layer])
        return [role for packing in packings.values() for role in packing.roles]

    def expert_roles(self, layer: int) -> tuple[str, ...]:
        """Roles of one routed expert of a layer: matrices first."""
        return mlp_roles("expert", self._spec.layers[layer].ffn)

    def all_parts(self) -> Iterator[Part]:
        """Every part of the model, the head included even if it may be tied."""
        for role in ("embed", "final_norm", "head"):
            yield self.part(role)
        if self._spec.encoder is not None and self._spec.encoder.own_embedding:
            yield self.part("encoder_embed")
        for layer, spec in enumerate(self._spec.layers):
            for role in self.trunk_roles(layer):
                yield self.part(role, layer)
            if spec.gate is not None:
                for role in self.expert_roles(layer):
                    for expert in range(spec.gate.num_experts):
                        yield self.part(role, layer, expert)

    def _shape(self, row: TableRow, role: str, layer: int | None) -> Shape:
        letters = _letters(self._spec, None if layer is None else self._spec.layers[layer], role)
        return tuple(_value(term, letters) for term in row.shape)


def _as_tuples(rows: Rows) -> dict[str, tuple[TableRow, ...]]:
    return {role: (row,) if isinstance(row, TableRow) else row for role, row in rows.items()}


class Packing(NamedTuple):
    """Roles that are kept together, and as what.

    One stacked matrix, one vector, one MLP, a matrix per head, or a learned number per distance.
    """

    kind: Literal["linear", "vector", "mlp", "heads", "relative_bias"]
    roles: tuple[str, ...]


def layer_packings(spec: LayerSpec) -> dict[str, Packing]:
    """All that one layer holds apart from its routed experts: the one list that loading and planning go by."""
    found = {"input_norm": Packing("vector", ("input_norm",))} | _attention_packings(spec.attention)
    if spec.output_norms:
        found["attention_out_norm"] = Packing("vector", ("attention_out_norm",))
        found["ffn_out_norm"] = Packing("vector", ("ffn_out_norm",))
    if spec.output_scale:
        found["output_scale"] = Packing("vector", ("output_scale",))
    if spec.cross_attention:
        found["cross_norm"] = Packing("vector", ("cross_norm",))
        found["cross_q"] = Packing("linear", ("cross_q",))
        found["cross_kv"] = Packing("linear", ("cross_k", "cross_v"))
        found["cross_out"] = Packing("linear", ("cross_o",))
    if spec.closing_norm:
        found["closing_norm"] = Packing("vector", ("closing_norm",))
    found["post_norm"] = Packing("vector", ("post_norm",))
    if spec.gate is None:
        return found | {"dense": Packing("mlp", mlp_roles("dense", spec.ffn))}
    found["gate"] = Packing("linear", ("gate",))
    wanted = {
        "gate_bias": spec.gate.has_bias,
        "gate_selection_bias": spec.gate.has_selection_bias,
        "gate_expert_scale": spec.gate.has_expert_scale,
        "gate_norm": spec.gate.reads_residual,
    }
    found |= {role: Packing("vector", (role,)) for role, is_there in wanted.items() if is_there}
    if spec.shared is not None:
        found["dense"] = Packing("mlp", mlp_roles("shared", spec.shared))
        if spec.shared_gate:
            found["shared_gate"] = Packing("linear", ("shared_expert_gate",))
    if spec.parallel_dense is not None:
        found["dense"] = Packing("mlp", mlp_roles("dense", spec.parallel_dense))
        for role in ("dense_norm", "dense_out_norm", "routed_out_norm"):
            found[role] = Packing("vector", (role,))
    return found


def _attention_packings(spec: AttentionSpec) -> dict[str, Packing]:
    if spec.latent is not None:
        return _latent_packings(spec)
    projected: tuple[str, ...] = ("q", "k") if spec.values_are_keys else ("q", "k", "v")
    projected = projected[:1] if spec.kv_shared_with is not None else projected
    found = {"qkv": Packing("linear", projected), "out": Packing("linear", ("o",))}
    if spec.qkv_bias:
        found["qkv_bias"] = Packing("vector", tuple(f"{role}_bias" for role in projected))
    if spec.out_bias:
        found["out_bias"] = Packing("vector", ("o_bias",))
    if spec.qk_norm != "none":
        found["q_norm"] = Packing("vector", ("q_norm",))
        if spec.kv_shared_with is None:
            found["k_norm"] = Packing("vector", ("k_norm",))
    if spec.has_sinks:
        found["sinks"] = Packing("vector", ("sinks",))
    if spec.relative_bias is not None:
        found["relative_bias"] = Packing("relative_bias", ("relative_bias",))
    return found


def _latent_packings(spec: AttentionSpec) -> dict[str, Packing]:
    assert spec.latent is not None, "only latent attention has these"
    first = "q" if spec.latent.query_rank is None else "q_down"
    found = {"down": Packing("linear", (first, "kv_down"))}
    if spec.qkv_bias:
        biases = ("kv_down_bias",) if spec.latent.query_rank is None else ("q_down_bias", "kv_down_bias")
        found["down_bias"] = Packing("vector", biases)
    if spec.latent.query_rank is not None:
        found["q_latent_norm"] = Packing("vector", ("q_latent_norm",))
        found["q_up"] = Packing("linear", ("q_up",))
    found["kv_latent_norm"] = Packing("vector", ("kv_latent_norm",))
    found["kv_up"] = Packing("heads", ("kv_up",))
    found["out"] = Packing("linear", ("o",))
    if spec.out_bias:
        found["out_bias"] = Packing("vector", ("o_bias",))
    return found


def mlp_roles(prefix: str, spec: ExpertSpec) -> tuple[str, ...]:
    """Roles of an MLP: gate (unless it has none), up, down, then their biases."""
    matrices = ("up", "down") if spec.activation == "relu" else ("gate", "up", "down")
    biases = tuple(f"{name}_bias" for name in matrices) if spec.has_bias else ()
    return tuple(f"{prefix}_{name}" for name in (*matrices, *biases))


def _letters(spec: ModelSpec, layer: LayerSpec | None, role: str) -> dict[str, int]:
    letters = {"D": spec.width, "V": spec.vocab_size, "1": 1, "2": 2}
    if layer is None:
        return letters
    attention, latent = layer.attention, layer.attention.latent
    letters |= {"H": attention.num_heads, "G": attention.num_kv_heads, "P": attention.head_width}
    if latent is not None:
        letters |= {"C": latent.width, "A": latent.plain_width, "U": latent.value_width}
        letters |= {"Q": latent.query_rank or 0, "R": attention.rotary_width}
    if attention.relative_bias is not None:
        letters["B"] = attention.relative_bias.num_buckets
    letters["F"] = _mlp_width(layer, role)
    if layer.gate is not None:
        letters["E"] = layer.gate.num_experts
    return letters


def _mlp_width(layer: LayerSpec, role: str) -> int:
    if role.startswith("shared_") and layer.shared is not None:
        return layer.shared.width
    if role.startswith("dense_") and layer.parallel_dense is not None:
        return layer.parallel_dense.width
    return layer.ffn.width


def _value(term: str, letters: Mapping[str, int]) -> int:
    """A sum of products, such as `H*A+R`: products first, no brackets."""
    total = 0
    for product in term.split("+"):
        value = 1
        for letter in product.split("*"):
            value *= letters[letter]
        total += value
    return total
