"""What each part of a model weighs once it is loaded: the numbers a placement is planned with, known before loading.

Counts packed weights as `kernels` lays them out and the buffers `decoder.py` allocates. Knows no node.
"""

from edge_runtime.model.architectures.table import DENSE_ROLES
from edge_runtime.model.build import packed_format
from edge_runtime.model.checkpoint import Checkpoint
from edge_runtime.model.decoder import row_floats
from kernels.packing import ITEM_BYTES, KV_BLOCK_TOKENS, packed_expert_bytes, packed_linear_bytes
from topology.costs import ModelFootprint
from topology.ids import ExpertId

FLOAT32_BYTES = 4
NORM_ROLES = frozenset(
    {"input_norm", "post_norm", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias", "o_bias"}
)


def footprint(checkpoint: Checkpoint, *, context_tokens: int | None = None) -> ModelFootprint:
    """The bytes that `load_trunk`, `load_experts` and a `Decoder` of this model take.

    context_tokens   longest sequence; the model's own limit if not given
    """
    spec = checkpoint.spec
    context_tokens = context_tokens or spec.context_tokens
    gates = [layer.gate for layer in spec.layers if layer.gate is not None]
    attention = spec.layers[0].attention
    G, P = attention.num_kv_heads, attention.head_width
    num_columns = max((gate.top_k for gate in gates), default=0)
    final_norm = spec.width * FLOAT32_BYTES
    return ModelFootprint(
        num_layers=spec.num_layers,
        moe_layers=spec.moe_layers,
        experts_per_layer=max((gate.num_experts for gate in gates), default=0),
        expert_bytes={
            name: tuple(_expert_bytes(checkpoint, layer, name) for layer in range(spec.num_layers))
            for name in ("as_stored", *ITEM_BYTES)
        },
        embed_bytes=_linear_bytes(checkpoint, ["embed"]),
        head_bytes=final_norm + (0 if spec.tied_head else _linear_bytes(checkpoint, ["head"])),
        layer_bytes=tuple(_layer_bytes(checkpoint, layer) for layer in range(spec.num_layers)),
        kv_bytes_per_token=(2 * G * P * FLOAT32_BYTES,) * spec.num_layers,
        context_tokens=context_tokens,
        head_is_tied=spec.tied_head,
        block_tokens=KV_BLOCK_TOKENS,
        table_bytes=2 * context_tokens * (P // 2) * FLOAT32_BYTES,
        row_workspace_bytes=sum(row_floats(spec).values()) * FLOAT32_BYTES,
        request_workspace_bytes=spec.vocab_size * FLOAT32_BYTES,
        expert_row_workspace_bytes=(1 + num_columns) * spec.width * FLOAT32_BYTES,
    )


def _layer_bytes(checkpoint: Checkpoint, layer: int) -> int:
    table = checkpoint.table
    total = _linear_bytes(checkpoint, ["q", "k", "v"], layer) + _linear_bytes(checkpoint, ["o"], layer)
    for role in table.trunk_roles(layer):
        if role in NORM_ROLES:
            total += table.shape(role, layer)[0] * FLOAT32_BYTES
    if checkpoint.spec.layers[layer].gate is not None:
        return total + _linear_bytes(checkpoint, ["gate"], layer)
    return total + _ffn_bytes(checkpoint, [table.name(role, layer) for role in DENSE_ROLES], "as_stored")


def _linear_bytes(checkpoint: Checkpoint, roles: list[str], layer: int | None = None) -> int:
    extents = [checkpoint.extent(checkpoint.table.name(role, layer)) for role in roles]
    stored = packed_format([extent.dtype for extent in extents], "as_stored")
    num_outputs = sum(extent.shape[0] for extent in extents)
    return packed_linear_bytes(num_outputs, extents[0].shape[1], ITEM_BYTES[stored])


def _expert_bytes(checkpoint: Checkpoint, layer: int, weight_format: str) -> int:
    """Bytes of the largest expert of a layer: a checkpoint may store some of them wider than others."""
    gate = checkpoint.spec.layers[layer].gate
    if gate is None:
        return 0
    names = (checkpoint.expert_names([ExpertId(layer, i)]) for i in range(gate.num_experts))
    return max(_ffn_bytes(checkpoint, three, weight_format) for three in names)


def _ffn_bytes(checkpoint: Checkpoint, names: list[str], weight_format: str) -> int:
    extents = [checkpoint.extent(name) for name in names]
    stored = packed_format([extent.dtype for extent in extents], weight_format)
    F, D = extents[0].shape
    return packed_expert_bytes(D, F, ITEM_BYTES[stored])
