"""What a model weighs, in whole bytes: trunk, experts, KV, workspace. Arithmetic on a `ModelFootprint`.

Knows no checkpoint and no tensor: whoever has read the model's configuration fills in the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from topology.cluster import Cluster, Node
from topology.ids import ExpertId

AS_STORED = "as_stored"


@dataclass(frozen=True, kw_only=True)
class TrunkSizes:
    """Bytes of a trunk's parts in one format; see `ModelFootprint`."""

    embed_bytes: int
    head_bytes: int
    layer_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """Bytes that each part of a model takes in a node's process, as the runtime holds it (packed, padded)."""

    num_layers: int
    """L, decoder layers."""
    moe_layers: tuple[int, ...]
    """The layers that have routed experts, ascending."""
    experts_per_layer: int
    """E, routed experts in each MoE layer."""
    expert_bytes: Mapping[str, tuple[int, ...]]
    """weight format -> bytes of one packed expert in each layer: L numbers, 0 in a layer without experts.
    Must have every format that the cluster's expert hosts use; `as_stored` is the usual one."""
    embed_bytes: int
    """Token embedding, held by whoever runs the first layer."""
    head_bytes: int
    """Final norm and output head, held by whoever runs the last layer; the norm alone if the head is tied."""
    layer_bytes: tuple[int, ...]
    """Per layer, all but its routed experts: attention, norms, gate, shared experts, dense MLP; L numbers."""
    kv_bytes_per_token: tuple[int, ...]
    """Per layer, keys and values of one token; L numbers."""
    context_tokens: int
    """Longest sequence the model allows."""
    count_bytes_per_block: tuple[int, ...] = ()
    """Per layer, what a KV block's expert counts take; L numbers, or none where nothing is counted."""
    head_is_tied: bool = False
    """The head's matrix is the embedding's, so whoever runs the last layer holds the embedding as well."""
    block_tokens: int = 16
    """Tokens in one KV block."""
    table_bytes: int = 0
    """Tables that every node with a part of the trunk holds once, such as the rope table."""
    row_workspace_bytes: int = 0
    """Buffers of a step on a trunk node, per token row: activations, routed rows out and back."""
    request_workspace_bytes: int = 0
    """Buffers of a step on a trunk node, per request: logits and sampling."""
    expert_row_workspace_bytes: int = 0
    """Buffers of an expert host for its peers' calls, per token row: rows in, all routed outputs."""
    trunks: Mapping[str, TrunkSizes] = field(default_factory=dict)
    """trunk format -> its sizes, for those other than as stored, which stand above."""
    width: int = 0
    """D, numbers in a row that travels. 0 if not known: then no time can be predicted."""
    top_k: int = 0
    """K, experts that a token is routed to in each MoE layer. 0 if not known: then no time can be predicted."""
    weight_item_bytes: float = 2.0
    """Bytes of one weight in the checkpoint: turns bytes into operations."""
    uncut: frozenset[int] = frozenset()
    """Layers that no stage may begin with: they, or some behind them, use keys and values of a layer before them."""

    def experts(self) -> list[ExpertId]:
        """Every routed expert, by layer and index."""
        return [
            ExpertId(layer, index) for layer in self.moe_layers for index in range(self.experts_per_layer)
        ]


def trunk_sizes(footprint: ModelFootprint, trunk_format: str) -> TrunkSizes:
    """The sizes of a trunk in that format."""
    if trunk_format != AS_STORED:
        return footprint.trunks[trunk_format]
    return TrunkSizes(
        embed_bytes=footprint.embed_bytes, head_bytes=footprint.head_bytes, layer_bytes=footprint.layer_bytes
    )


def trunk_parts(
    footprint: ModelFootprint, first_layer: int, last_layer: int, trunk_format: str = AS_STORED
) -> dict[str, int]:
    """Part -> bytes of the trunk of layers [first_layer, last_layer), embedding and head where they belong."""
    if first_layer >= last_layer:
        return {}
    sizes = trunk_sizes(footprint, trunk_format)
    starts, ends = first_layer == 0, last_layer == footprint.num_layers
    parts = {f"layer {layer}": sizes.layer_bytes[layer] for layer in range(first_layer, last_layer)}
    parts["tables"] = footprint.table_bytes
    if starts or (ends and footprint.head_is_tied):
        parts["embedding"] = sizes.embed_bytes
    if ends:
        parts["head"] = sizes.head_bytes
    return parts


def trunk_bytes(
    footprint: ModelFootprint, first_layer: int, last_layer: int, trunk_format: str = AS_STORED
) -> int:
    """Bytes of the trunk of layers [first_layer, last_layer)."""
    return sum(trunk_parts(footprint, first_layer, last_layer, trunk_format).values())


def kv_block_bytes(footprint: ModelFootprint, first_layer: int, last_layer: int) -> int:
    """Bytes of one KV block (`block_tokens` tokens) and of what is counted beside it over layers [first_layer, last_layer)."""
    tokens = footprint.block_tokens * sum(footprint.kv_bytes_per_token[first_layer:last_layer])
    return tokens + sum(footprint.count_bytes_per_block[first_layer:last_layer])


def kv_blocks(footprint: ModelFootprint, num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // footprint.block_tokens)


def context_limit(cluster: Cluster, footprint: ModelFootprint) -> int:
    """Longest prompt plus answer, tokens: the file's cap, never above the model's own."""
    return min(cluster.context_tokens or footprint.context_tokens, footprint.context_tokens)


def expert_bytes(footprint: ModelFootprint, weight_format: str, layer: int) -> int:
    """Bytes of one expert of that layer in that format."""
    return footprint.expert_bytes[weight_format][layer]


def workspace_bytes(cluster: Cluster, node: Node, footprint: ModelFootprint) -> int:
    """Bytes of step buffers on that node, at the most rows and requests the cluster allows.

    A trunk node needs them for its own steps and an expert host for its peers' calls. A node that is both
    needs both, since the two run in threads of their own.
    """
    own_steps = (
        cluster.max_batch_rows * footprint.row_workspace_bytes
        + cluster.max_requests * footprint.request_workspace_bytes
    )
    for_peers = cluster.max_batch_rows * footprint.expert_row_workspace_bytes
    return (own_steps if node.holds_trunk else 0) + (for_peers if node.hosts_experts else 0)
