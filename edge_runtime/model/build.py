"""Builds what a node runs from a checkpoint: the trunk of a range of layers, and the experts it was assigned.

Reads nothing else, packs each tensor as it is read, and keeps no byte of the files. Knows no placement.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from edge_runtime.model.architectures.table import DENSE_ROLES
from edge_runtime.model.attention import AttentionWeights
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.layers import LayerWeights, Trunk
from edge_runtime.model.moe import ExpertStore
from edge_runtime.model.spec import ModelSpec
from kernels import ops
from kernels.ops import ExpertBank, ExpertWeight, LinearWeight
from topology.ids import ExpertId

Progress = Callable[[int, int, str], None]
"""Called as (bytes done, bytes in all, what was read last); bytes as they lie in the files."""

STORED_FORMATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

T = TypeVar("T")


def quiet(bytes_done: int, bytes_total: int, what: str) -> None:
    """A Progress that shows nothing."""


def packed_format(dtypes: Iterable[str], weight_format: str) -> str:
    """The format in which tensors of these stored dtypes are packed together.

    Tensors that are packed as one but stored in several dtypes become float32, which holds them all exactly.
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
    progress: Progress = quiet,
) -> Trunk:
    """Read layers [first_layer, last_layer) without routed experts, with embedding and head where they belong.

    context_tokens   positions the rope table is made for
    """
    if not 0 <= first_layer < last_layer <= spec.num_layers:
        raise ValueError(f"no layers [{first_layer}, {last_layer}) in a model of {spec.num_layers}")
    ends = last_layer == spec.num_layers
    embeds = first_layer == 0 or (ends and spec.tied_head)
    loader = _Loader(checkpoint, progress, trunk_names(checkpoint, spec, first_layer, last_layer))
    embed = loader.linear("embed") if embeds else None
    layers = tuple(_load_layer(loader, spec, layer) for layer in range(first_layer, last_layer))
    attention = spec.layers[0].attention
    assert attention.rope is not None, "a spec without rope is refused when it is read"
    return Trunk(
        first_layer=first_layer,
        last_layer=last_layer,
        layers=layers,
        rope=ops.rope_table(context_tokens, attention.head_width, attention.rope.theta),
        embed=embed if first_layer == 0 else None,
        final_norm=loader.vector("final_norm") if ends else None,
        head=(embed if spec.tied_head else loader.linear("head")) if ends else None,
    )


def trunk_names(checkpoint: Checkpoint, spec: ModelSpec, first_layer: int, last_layer: int) -> list[str]:
    """Names of the tensors `load_trunk` reads."""
    table, ends = checkpoint.table, last_layer == spec.num_layers
    names = [table.name("embed")] if first_layer == 0 or (ends and spec.tied_head) else []
    for layer in range(first_layer, last_layer):
        names += [table.name(role, layer) for role in table.trunk_roles(layer)]
    names += [table.name("final_norm")] if ends else []
    return names + ([table.name("head")] if ends and not spec.tied_head else [])


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
) -> None:
    """Read the given experts into a store, in the order they lie in the model."""
    names = {expert: checkpoint.expert_names([expert]) for expert in sorted(set(expert_ids))}
    loader = _Loader(checkpoint, progress, [name for three in names.values() for name in three])
    for expert, three in names.items():
        store.add(expert, loader.expert(three, f"layer {expert.layer} expert {expert.index}", weight_format))


class _Loader:
    """Reads by role and reports how far it is."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress, names: list[str]) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        self._total = sum(checkpoint.stored_bytes(name) for name in names)
        self._done = 0

    def load(self, names: list[str], pack: Callable[[list[Tensor]], T], what: str) -> T:
        """Pack tensors while they are mapped, and say so."""
        with self._checkpoint.read(names) as tensors:
            packed = pack(tensors)
        self._done += sum(self._checkpoint.stored_bytes(name) for name in names)
        self._progress(self._done, self._total, what)
        return packed

    def name(self, role: str, layer: int | None = None) -> str:
        return self._checkpoint.table.name(role, layer)

    def linear(self, *roles: str, layer: int | None = None) -> LinearWeight:
        """One matrix, or several stacked in this order."""
        names = [self.name(role, layer) for role in roles]
        stored = self._format(names, "as_stored")
        return self.load(
            names, lambda tensors: ops.pack_linear_rows(_alike(tensors), format=stored), names[0]
        )

    def expert(self, names: list[str], what: str, weight_format: str = "as_stored") -> ExpertWeight:
        """Gate, up and down as one expert."""
        packed = self._format(names, weight_format)
        return self.load(names, lambda tensors: ops.pack_expert(*_alike(tensors), format=packed), what)

    def vector(self, *roles: str, layer: int | None = None) -> Tensor:
        """Float32, of one or several roles after another; always memory of its own."""
        names = [self.name(role, layer) for role in roles]
        return self.load(names, lambda tensors: torch.cat([t.float() for t in tensors]), names[0])

    def _format(self, names: list[str], weight_format: str) -> str:
        return packed_format([self._checkpoint.extent(name).dtype for name in names], weight_format)


def _alike(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors in one dtype: their own, or float32 if they have several."""
    if len({tensor.dtype for tensor in tensors}) == 1:
        return tensors
    return [tensor.float() for tensor in tensors]


def _load_layer(loader: _Loader, spec: ModelSpec, layer: int) -> LayerWeights:
    layer_spec = spec.layers[layer]
    attention = layer_spec.attention
    has_qk_norm = attention.qk_norm == "head"
    gate, dense = None, None
    input_norm = loader.vector("input_norm", layer=layer)
    attention_weights = AttentionWeights(
        qkv=loader.linear("q", "k", "v", layer=layer),
        qkv_bias=loader.vector("q_bias", "k_bias", "v_bias", layer=layer) if attention.qkv_bias else None,
        out=loader.linear("o", layer=layer),
        out_bias=loader.vector("o_bias", layer=layer) if attention.out_bias else None,
        q_norm=loader.vector("q_norm", layer=layer) if has_qk_norm else None,
        k_norm=loader.vector("k_norm", layer=layer) if has_qk_norm else None,
    )
    post_norm = loader.vector("post_norm", layer=layer)
    if layer_spec.gate is not None:
        gate = loader.linear("gate", layer=layer)
    else:
        dense = ExpertBank(1, spec.width, layer_spec.ffn.width)
        names = [loader.name(role, layer) for role in DENSE_ROLES]
        dense.set(0, loader.expert(names, names[0]))
    return LayerWeights(input_norm, attention_weights, post_norm, gate, dense)
