"""What each part of a model weighs once it is loaded: the numbers a placement is planned with, known before loading.

Counts packed weights as `kernels` lays them out and the buffers `decoder.py` allocates. Knows no node.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures.table import Packing, Part, layer_packings
from edge_runtime.model.build import dense_spec, follows_trunk_format, packed_format
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import row_numbers
from edge_runtime.model.relative_bias import bias_columns
from edge_runtime.model.rope import rope_table_bytes
from edge_runtime.model.spec import ExpertSpec, KVShape, ModelSpec
from kernels.packing import FORMATS, KV_BLOCK_TOKENS, packed_expert_bytes, packed_linear_bytes
from topology.costs import AS_STORED, ModelFootprint, TrunkSizes
from topology.ids import ExpertId

FLOAT32_BYTES = 4


def footprint(
    checkpoint: Checkpoint, *, context_tokens: int | None = None, gate_neurons: int = 0, gate_rows: int = 0
) -> ModelFootprint:
    """The bytes that `load_trunk`, `load_experts` and a `Decoder` of this model take.

    context_tokens   longest sequence; the model's own limit if not given, and ConfigError beyond it
    gate_neurons     neurons of each expert that whoever runs a layer's attention holds, to choose among sub-experts
    gate_rows        rows of a linear gate for each expert, to the same end
    """
    spec = checkpoint.spec
    if context_tokens is not None and context_tokens > spec.context_tokens:
        raise ConfigError(
            f"context_tokens is {context_tokens}, but the model at {checkpoint.folder} can read {spec.context_tokens} "
            "tokens; lower it, or leave it out to have all of them"
        )
    context_tokens = context_tokens or spec.context_tokens
    gates = [layer.gate for layer in spec.layers if layer.gate is not None]
    num_columns = max((gate.top_k for gate in gates), default=0)
    proxies = tuple(
        _neuron_bytes(checkpoint, layer, gate_neurons) + _row_bytes(spec, layer, gate_rows)
        for layer in range(spec.num_layers)
    )
    stored = _with_neurons(_trunk_sizes(checkpoint, AS_STORED), proxies)
    kinds_of_experts = [_kinds_of_experts(checkpoint, layer) for layer in range(spec.num_layers)]
    return ModelFootprint(
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        experts_per_layer=max((gate.num_experts for gate in gates), default=0),
        expert_bytes={
            name: tuple(
                max((_mlp_bytes(checkpoint, parts, layer.ffn, name) for parts in kinds), default=0)
                for layer, kinds in zip(spec.layers, kinds_of_experts, strict=True)
            )
            for name in (AS_STORED, *FORMATS)
        },
        embed_bytes=stored.embed_bytes,
        head_bytes=stored.head_bytes,
        layer_bytes=stored.layer_bytes,
        trunks={name: _with_neurons(_trunk_sizes(checkpoint, name), proxies) for name in FORMATS},
        kv_bytes_per_token=tuple(kv_token_bytes(layer.attention.kv_shape) for layer in spec.layers),
        count_bytes_per_block=()
        if spec.encoder is not None
        else tuple(layer.gate.num_experts if layer.gate is not None else 0 for layer in spec.layers),
        context_tokens=context_tokens,
        head_is_tied=spec.tied_head,
        block_tokens=KV_BLOCK_TOKENS,
        table_bytes=rope_table_bytes(spec, context_tokens),
        row_workspace_bytes=sum(row_numbers(spec).values()) * FLOAT32_BYTES,
        request_workspace_bytes=spec.vocab_size * FLOAT32_BYTES,
        expert_row_workspace_bytes=(1 + num_columns) * spec.width * FLOAT32_BYTES,
        width=spec.width,
        top_k=num_columns,
        weight_item_bytes=_item_bytes(checkpoint),
        uncut=_uncut(spec),
    )


def _uncut(spec: ModelSpec) -> frozenset[int]:
    """Layers behind one whose keys and values they, or layers behind them, use."""
    shared = [(layer.attention.kv_shared_with, index) for index, layer in enumerate(spec.layers)]
    return frozenset(
        between for source, user in shared if source is not None for between in range(source + 1, user + 1)
    )


def _item_bytes(checkpoint: Checkpoint) -> float:
    """Stored bytes of one number of an expert, or of the embedding where there are no experts."""
    moe_layers = checkpoint.spec.moe_layers
    parts = checkpoint.expert_parts(ExpertId(moe_layers[0], 0)) if moe_layers else []
    parts = parts or [checkpoint.table.part("embed")]
    return sum(map(checkpoint.stored_bytes, parts)) / sum(math.prod(part.shape) for part in parts)


def kv_token_bytes(shape: KVShape) -> int:
    """Bytes of one token's keys and values in one layer: float32, none if they are another layer's."""
    if shape.shared_with is not None:
        return 0
    return shape.num_heads * (shape.key_width + shape.value_width) * FLOAT32_BYTES


def _trunk_sizes(checkpoint: Checkpoint, trunk_format: str) -> TrunkSizes:
    spec, part = checkpoint.spec, checkpoint.table.part
    embed = _linear_bytes(checkpoint, [part("embed")], trunk_format if spec.tied_head else AS_STORED)
    if spec.encoder is not None and spec.encoder.own_embedding:
        embed += _linear_bytes(checkpoint, [part("encoder_embed")], AS_STORED)
    head = 0 if spec.tied_head else _linear_bytes(checkpoint, [part("head")], trunk_format)
    return TrunkSizes(
        embed_bytes=embed,
        head_bytes=spec.width * FLOAT32_BYTES + head,  # and the final norm
        layer_bytes=tuple(_layer_bytes(checkpoint, layer, trunk_format) for layer in range(spec.num_layers)),
    )


def _with_neurons(sizes: TrunkSizes, proxies: Sequence[int]) -> TrunkSizes:
    by_layer = (own + more for own, more in zip(sizes.layer_bytes, proxies, strict=True))
    return replace(sizes, layer_bytes=tuple(by_layer))


def _row_bytes(spec: ModelSpec, layer: int, gate_rows: int) -> int:
    """A linear gate of so many rows for each expert of a layer, as `LinearGates` has it."""
    gate = spec.layers[layer].gate
    return (
        packed_linear_bytes(gate.num_experts * gate_rows, spec.width, "float32") if gate and gate_rows else 0
    )


def _neuron_bytes(checkpoint: Checkpoint, layer: int, gate_neurons: int) -> int:
    """So many neurons of all experts of a layer, as `read_neurons` has them."""
    spec = checkpoint.spec.layers[layer]
    if not gate_neurons or spec.gate is None:
        return 0
    parts = [part for part in checkpoint.expert_parts(ExpertId(layer, 0)) if not part.role.endswith("_bias")]
    stored = packed_format([checkpoint.stored_dtype(part) for part in parts], AS_STORED)
    one = packed_expert_bytes(
        checkpoint.spec.width,
        gate_neurons,
        "bfloat16" if stored == "mxfp4" else stored,
        gated=spec.ffn.activation != "relu",
        biases=spec.ffn.has_bias,
    )
    return spec.gate.num_experts * one


def _layer_bytes(checkpoint: Checkpoint, layer: int, trunk_format: str) -> int:
    return sum(
        _packing_bytes(
            checkpoint, layer, packing, trunk_format if follows_trunk_format(name, packing) else AS_STORED
        )
        for name, packing in layer_packings(checkpoint.spec.layers[layer]).items()
    )


def _packing_bytes(checkpoint: Checkpoint, layer: int, packing: Packing, weight_format: str) -> int:
    parts = [checkpoint.table.part(role, layer) for role in packing.roles]
    spec = checkpoint.spec.layers[layer]
    if packing.kind == "linear":
        return _linear_bytes(checkpoint, parts, weight_format)
    if packing.kind == "vector":
        return sum(math.prod(part.shape) for part in parts) * FLOAT32_BYTES
    if packing.kind == "mlp":
        return _mlp_bytes(checkpoint, parts, dense_spec(spec), weight_format)
    if packing.kind == "relative_bias":
        bias = spec.attention.relative_bias
        assert bias is not None, "only attention with a relative bias has one"
        return spec.attention.num_heads * bias_columns(bias) * FLOAT32_BYTES
    latent = spec.attention.latent
    assert latent is not None, "only latent attention has a matrix per head"
    stored = packed_format([checkpoint.stored_dtype(parts[0])], weight_format)
    to_latent = packed_linear_bytes(latent.width, latent.plain_width, stored)
    from_latent = packed_linear_bytes(latent.value_width, latent.width, stored)
    return spec.attention.num_heads * (to_latent + from_latent)


def _linear_bytes(checkpoint: Checkpoint, parts: Sequence[Part], weight_format: str) -> int:
    stored = packed_format([checkpoint.stored_dtype(part) for part in parts], weight_format)
    num_outputs = sum(part.shape[0] for part in parts)
    return packed_linear_bytes(num_outputs, parts[0].shape[1], stored)


def _kinds_of_experts(checkpoint: Checkpoint, layer: int) -> list[list[Part]]:
    """The parts of one expert of each kind: a checkpoint may store some of a layer wider than others."""
    gate = checkpoint.spec.layers[layer].gate
    kinds: dict[tuple[object, ...], list[Part]] = {}
    for index in range(gate.num_experts if gate else 0):
        parts = checkpoint.expert_parts(ExpertId(layer, index))
        kinds.setdefault(tuple((part.shape, checkpoint.stored_dtype(part)) for part in parts), parts)
    return list(kinds.values())


def _mlp_bytes(checkpoint: Checkpoint, parts: Sequence[Part], spec: ExpertSpec, weight_format: str) -> int:
    matrices = [part for part in parts if not part.role.endswith("_bias")]
    stored = packed_format([checkpoint.stored_dtype(part) for part in matrices], weight_format)
    F, D = matrices[0].shape
    assert F == spec.width, "the first matrix of an MLP has its inner width"
    gated = spec.activation != "relu"
    return packed_expert_bytes(D, F, stored, gated=gated, biases=spec.has_bias)
