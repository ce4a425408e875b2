"""Builds what a node runs from a checkpoint: the trunk of a range of layers, and the experts it was assigned.

Reads nothing else, packs each tensor as it is read, and keeps no byte of the files. Knows no placement.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from edge_runtime.errors import CheckpointError
from edge_runtime.model.architectures.table import Packing, Part, layer_packings
from edge_runtime.model.attention import AttentionWeights, LatentWeights
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.gate import GateWeights
from edge_runtime.model.layers import CrossWeights, LayerWeights, Trunk
from edge_runtime.model.moe import ExpertStore
from edge_runtime.model.quantised import mxfp4_columns, mxfp4_to_bfloat16
from edge_runtime.model.relative_bias import bias_table
from edge_runtime.model.rope import rope_keys, rope_table
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, LayerSpec, ModelSpec
from kernels import ops
from kernels.ops import MXFP4, ExpertBank, ExpertWeight, HeadsWeight, LinearWeight
from kernels.transfers import on_device
from topology.ids import ExpertId

Progress = Callable[[int, int, str], None]
"""Called as (bytes done, bytes in all, what was read last); bytes as they lie in the files."""

STORED_FORMATS = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "bfloat16",  # number times scale, rounded
    "MXFP4": "mxfp4",
}

T = TypeVar("T")
Weights = list[Any]
"""Tensor or MXFP4 each; vectors are always tensors."""


def quiet(bytes_done: int, bytes_total: int, what: str) -> None:
    """A Progress that shows nothing."""


def packed_format(dtypes: Iterable[str], weight_format: str) -> str:
    """The format in which matrices of these stored dtypes are packed together.

    Matrices that are packed as one but stored in several dtypes become float32, which holds them all exactly.
    """
    if weight_format != "as_stored":
        return weight_format
    found = {STORED_FORMATS[dtype] for dtype in dtypes}
    return found.pop() if len(found) == 1 else "float32"


def load_trunk(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    first_layer: int,
    last_layer: int,
    *,
    context_tokens: int,
    trunk_format: str = "as_stored",
    progress: Progress = quiet,
) -> Trunk:
    """Read layers [first_layer, last_layer) without routed experts, with embedding and head where they belong.

    context_tokens   positions the rope tables are made for
    trunk_format     of attention's matrices, dense MLPs and the head; see `follows_trunk_format`
    """
    if not 0 <= first_layer < last_layer <= spec.num_layers:
        raise ValueError(f"no layers [{first_layer}, {last_layer}) in a model of {spec.num_layers}")
    ends = last_layer == spec.num_layers
    embeds = first_layer == 0 or (ends and spec.tied_head)
    parts = trunk_names(checkpoint, spec, first_layer, last_layer)
    loader = _Loader(checkpoint, progress, parts, trunk_format)
    part = checkpoint.table.part
    embed = loader.linear([part("embed")], follows=spec.tied_head) if embeds else None
    ropes = {key: on_device(rope_table(*key, context_tokens)) for key in rope_keys(spec)}
    own_embedding = spec.encoder is not None and spec.encoder.own_embedding and first_layer == 0
    encoder_embed = loader.linear([part("encoder_embed")]) if own_embedding else None
    layers = []
    for layer in range(first_layer, last_layer):
        attention = spec.layers[layer].attention
        rope = ropes[attention.rope, attention.rotary_width]
        layers.append(_load_layer(loader, spec, layer, rope))
    return Trunk(
        first_layer=first_layer,
        last_layer=last_layer,
        layers=tuple(layers),
        ropes=tuple(ropes.values()),
        embed=embed if first_layer == 0 else None,
        final_norm=loader.vector([part("final_norm")]) * spec.head_scale if ends else None,
        head=(embed if spec.tied_head else loader.linear([part("head")], follows=True)) if ends else None,
        encoder_embed=encoder_embed,
    )


def trunk_names(checkpoint: Checkpoint, spec: ModelSpec, first_layer: int, last_layer: int) -> list[Part]:
    """The parts `load_trunk` reads."""
    table, ends = checkpoint.table, last_layer == spec.num_layers
    parts = [table.part("embed")] if first_layer == 0 or (ends and spec.tied_head) else []
    if first_layer == 0 and spec.encoder is not None and spec.encoder.own_embedding:
        parts.append(table.part("encoder_embed"))
    for layer in range(first_layer, last_layer):
        parts += [table.part(role, layer) for role in table.trunk_roles(layer)]
    parts += [table.part("final_norm")] if ends else []
    return parts + ([table.part("head")] if ends and not spec.tied_head else [])


def load_experts(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    expert_ids: Iterable[ExpertId],
    *,
    weight_format: str = "as_stored",
    progress: Progress = quiet,
) -> ExpertStore:
    """Read the given routed experts and no others."""
    store = empty_store(spec)
    add_experts(store, checkpoint, expert_ids, weight_format=weight_format, progress=progress)
    return store


def empty_store(spec: ModelSpec) -> ExpertStore:
    """A store for this model's experts with none in it."""
    for layer in spec.layers:
        if layer.gate is not None:
            return ExpertStore(layer.gate.num_experts, spec.width, layer.ffn.width)
    return ExpertStore(0, spec.width, 0)


def add_experts(
    store: ExpertStore,
    checkpoint: Checkpoint,
    expert_ids: Iterable[ExpertId],
    *,
    weight_format: str = "as_stored",
    progress: Progress = quiet,
    order_of: Callable[[ExpertId], Tensor | None] = lambda expert: None,
) -> None:
    """Read the given experts into a store, in the order they lie in the model.

    order_of  the old neuron of each place [F] int64, where an expert's neurons are to lie in another order
    """
    parts = {expert: checkpoint.expert_parts(expert) for expert in sorted(set(expert_ids))}
    loader = _Loader(checkpoint, progress, [part for each in parts.values() for part in each])
    for expert, each in parts.items():
        spec = checkpoint.spec.layers[expert.layer].ffn
        what = f"layer {expert.layer} expert {expert.index}"
        weight = loader.expert(each, spec, what, weight_format, order_of(expert))
        try:
            store.add(expert, weight)
        except ValueError as error:
            raise CheckpointError(
                f"{what}: grouped_ffn of the {weight.backend.NAME} kernels takes one format for all experts of a layer "
                f"({error}); give the node a weight_format"
            ) from error


def read_neurons(checkpoint: Checkpoint, expert: ExpertId, neurons: Tensor) -> ExpertWeight:
    """Some neurons [n] int64 of a routed expert, as an expert of that width."""
    parts = checkpoint.expert_parts(expert)
    loader = _Loader(checkpoint, quiet, parts)
    spec = checkpoint.spec.layers[expert.layer].ffn
    return loader.expert(parts, spec, f"layer {expert.layer} expert {expert.index}", order=neurons)


def follows_trunk_format(name: str, packing: Packing) -> bool:
    """Whether a layer's packing is kept in the trunk's format: attention's matrices and dense MLPs.

    Gates stay as stored, so that routing is what it is; norms and biases are float32. So is the embedding, of which a
    step reads a row per token, unless it is the head as well.
    """
    return packing.kind in ("linear", "mlp", "heads") and name not in ("gate", "shared_gate")


class _Loader:
    """Reads parts, packs them and reports how far it is."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        progress: Progress,
        parts: Iterable[Part],
        trunk_format: str = "as_stored",
    ) -> None:
        self.checkpoint = checkpoint
        self.trunk_format = trunk_format
        self._progress = progress
        self._total = sum(map(checkpoint.stored_bytes, parts))
        self._done = 0

    def load(self, parts: Sequence[Part], pack: Callable[[Weights], T], what: str) -> T:
        """Pack tensors while they are mapped, and say so."""
        with self.checkpoint.read(parts) as tensors:
            packed = pack(tensors)
        self._done += sum(map(self.checkpoint.stored_bytes, parts))
        self._progress(self._done, self._total, what)
        return packed

    def linear(self, parts: Sequence[Part], *, follows: bool = False) -> LinearWeight:
        """One matrix, or several stacked in this order; in the trunk's format if it `follows` that."""
        stored = self._format(parts, self.trunk_format if follows else "as_stored")
        return self.load(
            parts, lambda tensors: ops.pack_linear_rows(_alike(tensors), format=stored), parts[0].name
        )

    def expert(
        self,
        parts: Sequence[Part],
        spec: ExpertSpec,
        what: str,
        weight_format: str = "as_stored",
        order: Tensor | None = None,
    ) -> ExpertWeight:
        """The matrices and biases of `mlp_roles` as one expert; with `order`, of these neurons in this order."""
        names = [part.role.split("_", 1)[1] for part in parts]
        matrices = [part for part, name in zip(parts, names, strict=True) if not name.endswith("bias")]
        packed = self._format(matrices, weight_format)
        is_part = order is not None and len(order) < spec.width
        if is_part and packed == "mxfp4":
            packed = "bfloat16"  # which holds the same numbers, of however few neurons

        def pack(tensors: Weights) -> ExpertWeight:
            stored = _alike(tensors[: len(matrices)])
            if order is not None and packed != "mxfp4":
                stored = [_plain(weight) for weight in stored]
            widened = [_dense(weight) for weight in stored]
            named: dict[str, Any] = dict(zip(names, [*widened, *tensors[len(matrices) :]], strict=True))
            if order is not None:
                named = {name: _ordered(name, each, order) for name, each in named.items()}
            gate, up, down = named.pop("gate", None), named.pop("up"), named.pop("down")
            return ops.pack_expert(gate, up, down, format=packed, **activation_options(spec), **named)

        return self.load(parts, pack, what)

    def vector(self, parts: Sequence[Part]) -> Tensor:
        """Float32, of one or several parts after another; always memory of its own."""
        return self.load(
            parts, lambda tensors: on_device(torch.cat([t.float() for t in tensors])), parts[0].name
        )

    def heads(self, part: Part, spec: AttentionSpec) -> tuple[HeadsWeight, HeadsWeight]:
        """A matrix of [H (A + U), C]: for each head the first A rows turned around, and the last U as they are."""
        stored = self._format([part], self.trunk_format)
        latent = spec.latent
        assert latent is not None, "only latent attention has a matrix per head"

        def pack(tensors: Weights) -> tuple[HeadsWeight, HeadsWeight]:
            by_head = tensors[0].unflatten(0, (spec.num_heads, -1))
            keys, values = by_head.split([latent.plain_width, latent.value_width], dim=1)
            return (
                ops.pack_linear_heads(keys.transpose(1, 2), format=stored),
                ops.pack_linear_heads(values, format=stored),
            )

        return self.load([part], pack, part.name)

    def _format(self, parts: Iterable[Part], weight_format: str) -> str:
        return packed_format([self.checkpoint.stored_dtype(part) for part in parts], weight_format)


def activation_options(spec: ExpertSpec) -> dict[str, Any]:
    """What `pack_expert` is told beside the matrices of a SwiGLU expert."""
    if spec.activation == "swiglu":
        return {}
    if spec.activation == "clamped_swiglu":
        return {"activation": spec.activation, "alpha": spec.alpha, "limit": spec.clamp}
    return {"activation": spec.activation}


def _alike(weights: Weights) -> Weights:
    """The matrices stored alike: as they are, or as float32 if they are stored in several ways."""
    if len({"mxfp4" if isinstance(weight, MXFP4) else weight.dtype for weight in weights}) == 1:
        return weights
    return [_plain(weight).float() for weight in weights]


def _plain(weight: Tensor | MXFP4) -> Tensor:
    return mxfp4_to_bfloat16(*weight) if isinstance(weight, MXFP4) else weight


def _ordered(name: str, weight: Tensor | MXFP4, order: Tensor) -> Tensor | MXFP4:
    """An expert's matrix or bias with its neurons in another order; columns of `down`, whose bias is of outputs."""
    if name == "down_bias":
        return weight
    if name != "down":
        return MXFP4(*(part[order] for part in weight)) if isinstance(weight, MXFP4) else weight[order]
    if not isinstance(weight, MXFP4):
        return weight[:, order]
    found = mxfp4_columns(*weight, order)
    if found is None:
        raise CheckpointError(
            "sub-experts need neurons in another order, and columns of a matrix in mxfp4 change places only with all 32 "
            'that share a scale; give the node `weight_format = "bfloat16"`, which holds the same numbers, or serve this '
            "model without `sub_experts`"
        )
    return MXFP4(*found)


def _dense(weight: Tensor | MXFP4) -> Tensor | MXFP4:
    """A matrix that is stored turned around or row by row with another, on its own."""
    return weight if isinstance(weight, MXFP4) else weight.contiguous()


def _load_layer(loader: _Loader, spec: ModelSpec, layer: int, rope: tuple[Tensor, Tensor]) -> LayerWeights:
    layer_spec = spec.layers[layer]
    found: dict[str, Any] = {}
    for key, packing in layer_packings(layer_spec).items():
        found[key] = _load_packing(loader, spec, layer, packing, follows_trunk_format(key, packing))
    kind = LatentWeights if layer_spec.attention.latent is not None else AttentionWeights
    if layer_spec.attention.latent is not None:
        found["to_latent"], found["from_latent"] = found.pop("kv_up")
    attention = {key: found.pop(key) for key in kind._fields if key in found}
    gate = _gate_weights(spec, layer_spec, found) if layer_spec.gate is not None else None
    if layer_spec.cross_attention:
        found["cross"] = CrossWeights(*(found.pop(f"cross_{name}") for name in CrossWeights._fields))
    return LayerWeights(attention=kind(rope=rope, **attention), gate=gate, **found)


def _load_packing(loader: _Loader, spec: ModelSpec, layer: int, packing: Packing, follows: bool) -> Any:
    parts = [loader.checkpoint.table.part(role, layer) for role in packing.roles]
    if packing.kind == "linear":
        return loader.linear(parts, follows=follows)
    if packing.kind == "vector":
        return loader.vector(parts)
    if packing.kind == "relative_bias":
        bias = spec.layers[layer].attention.relative_bias
        assert bias is not None, "only attention with a relative bias has one"
        return loader.load(
            parts, lambda tensors: on_device(bias_table(bias, tensors[0].float())), parts[0].name
        )
    if packing.kind == "heads":
        return loader.heads(parts[0], spec.layers[layer].attention)
    mlp = dense_spec(spec.layers[layer])
    bank = ExpertBank(1, spec.width, mlp.width)
    bank.set(0, loader.expert(parts, mlp, parts[0].name, loader.trunk_format))
    return bank


def dense_spec(layer: LayerSpec) -> ExpertSpec:
    """The MLP that all rows of a layer use: a dense layer's own, or the one beside the experts."""
    found = layer.ffn if layer.gate is None else layer.shared or layer.parallel_dense
    assert found is not None, "asked for the MLP of a layer that has none"
    return found


def _gate_weights(spec: ModelSpec, layer: LayerSpec, found: dict[str, Any]) -> GateWeights:
    """Take the gate's parts out of what was loaded. Its norm is followed by D ** -0.5, which goes into the scale."""
    norm = found.pop("gate_norm", None)
    return GateWeights(
        weight=found.pop("gate"),
        bias=found.pop("gate_bias", None),
        selection_bias=found.pop("gate_selection_bias", None),
        expert_scale=found.pop("gate_expert_scale", None),
        norm=None if norm is None else norm * spec.width**-0.5,
    )
