"""What a model is, as plain frozen data: enough to run any of the families, whichever of them the code runs today.

Knows no file and no tensor. `architectures/` fills it in from a config; `unsupported` says what of it cannot run yet.
"""

from typing import Literal

import msgspec


class RopeSpec(msgspec.Struct, frozen=True):
    """How positions turn the heads."""

    theta: float
    """Base wavelength."""
    kind: Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"] = "default"
    """How wavelengths are scaled beyond the trained context."""
    factor: float = 1.0
    """Scale of the kinds that have one."""
    rotary_share: float = 1.0
    """Share of each head's width that is turned."""


class AttentionSpec(msgspec.Struct, frozen=True):
    """One layer's attention."""

    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """G, key/value heads; H is a multiple of G."""
    head_width: int
    """P, width of a head; need not be D / H."""
    kind: Literal["gqa", "mla"] = "gqa"
    """Grouped queries, or a latent that keys and values are rebuilt from."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMS norm of queries and keys: none, per head, or over the whole projection."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    out_bias: bool = False
    """The output projection has a bias."""
    window: int | None = None
    """A row attends to at most this many last positions; None for all."""
    has_sinks: bool = False
    """Each head has a learned sink in its softmax."""
    soft_cap: float | None = None
    """Scores pass `cap * tanh(score / cap)`."""
    clip: float | None = None
    """Queries, keys and values are clipped to [-clip, clip]."""
    kv_shared_with: int | None = None
    """This layer attends to the keys and values of that layer."""
    rope: RopeSpec | None = None
    """None for a layer without positions."""


class GateSpec(msgspec.Struct, frozen=True):
    """Token -> expert ids and weights."""

    num_experts: int
    """E."""
    top_k: int
    """K, experts per token."""
    scores: Literal["softmax", "softmax_of_top_k", "sigmoid"] = "softmax"
    """Softmax over all experts and then the best K, or the best K and then a softmax over them, or sigmoids."""
    renormalise: bool = False
    """The K weights are divided by their sum."""
    input_norm: Literal["none", "unscaled"] = "none"
    """The gate's own norm of the residual, beside the layer's."""
    has_bias: bool = False
    """The logits have a bias."""
    num_groups: int = 1
    """Experts are in this many groups ..."""
    top_groups: int = 1
    """... and only experts of the best of them are chosen."""
    scale: float = 1.0
    """All weights times this."""
    has_expert_scale: bool = False
    """Each expert's weight times a learned number."""
    capacity: int | None = None
    """An expert takes at most this many tokens of a sequence; the others get none."""


class ExpertSpec(msgspec.Struct, frozen=True):
    """One feed-forward network: a routed expert, a shared expert, or a dense layer's MLP."""

    width: int
    """F, inner width."""
    activation: Literal["swiglu", "geglu_tanh", "relu", "clamped_swiglu"] = "swiglu"
    """What is between the matrices."""
    clamp: float | None = None
    """Gate and up are clamped to this (`clamped_swiglu`)."""
    alpha: float = 1.0
    """Slope of the sigmoid (`clamped_swiglu`)."""
    has_bias: bool = False
    """The matrices have biases."""
    layout: Literal["separate", "fused", "interleaved"] = "separate"
    """How gate and up lie in the checkpoint: two matrices, one above the other, or row by row."""


class LayerSpec(msgspec.Struct, frozen=True):
    """One decoder layer."""

    attention: AttentionSpec
    kind: Literal["dense", "moe"]
    """Whether `ffn` is one MLP for all rows or E experts chosen by the gate."""
    ffn: ExpertSpec
    gate: GateSpec | None = None
    """None in a dense layer."""
    shared: ExpertSpec | None = None
    """The expert that runs for every token beside the routed ones."""
    shared_gate: bool = False
    """The shared expert's output times a sigmoid of the row."""
    parallel_dense: ExpertSpec | None = None
    """A dense MLP beside the experts, with norms of its own."""


class EncoderSpec(msgspec.Struct, frozen=True):
    """The encoder of an encoder-decoder model."""

    layers: tuple[LayerSpec, ...]
    num_relative_buckets: int


class ModelSpec(msgspec.Struct, frozen=True):
    """A whole model."""

    family: str
    """`model_type` of the config."""
    width: int
    """D."""
    vocab_size: int
    """V, rows of the embedding."""
    context_tokens: int
    """Positions the model was made for."""
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    """The head is the embedding."""
    embed_scale: float = 1.0
    """The embedding's rows times this."""
    logit_soft_cap: float | None = None
    """Logits pass `cap * tanh(logit / cap)`."""
    encoder: EncoderSpec | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose rows are routed."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "moe")


def unsupported(spec: ModelSpec) -> list[str]:
    """Everything in `spec` that the code cannot run yet, each as `what value`; empty for a model that runs."""
    faults = []

    def allow(where: str, name: str, value: object, *allowed: object) -> None:
        if value not in allowed:
            faults.append(f"{where}{name} {value!r}")

    allow("", "embed_scale", spec.embed_scale, 1.0)
    allow("", "logit_soft_cap", spec.logit_soft_cap, None)
    allow("", "encoder", spec.encoder and "present", None)
    ropes, geometries, routed = set(), set(), set()
    for index, layer in enumerate(spec.layers):
        where = f"layer {index}: "
        attention, gate, ffn = layer.attention, layer.gate, layer.ffn
        geometries.add((attention.num_heads, attention.num_kv_heads, attention.head_width))
        allow(where, "attention kind", attention.kind, "gqa")
        allow(where, "q/k norm", attention.qk_norm, "none", "head")
        allow(where, "sliding window", attention.window, None)
        allow(where, "attention sinks", attention.has_sinks, False)
        allow(where, "attention soft cap", attention.soft_cap, None)
        allow(where, "q/k/v clip", attention.clip, None)
        allow(where, "keys and values shared with layer", attention.kv_shared_with, None)
        if attention.rope is None:
            faults.append(f"{where}rope None")
        else:
            allow(where, "rope kind", attention.rope.kind, "default")
            allow(where, "rotary share", attention.rope.rotary_share, 1.0)
            ropes.add((attention.rope, attention.head_width))
        for expert in (ffn, layer.shared, layer.parallel_dense):
            if expert is not None:
                allow(where, "activation", expert.activation, "swiglu")
                allow(where, "expert bias", expert.has_bias, False)
                allow(where, "gate/up layout", expert.layout, "separate")
        allow(where, "shared expert", layer.shared and "present", None)
        allow(where, "parallel dense MLP", layer.parallel_dense and "present", None)
        if gate is not None:
            routed.add((gate, ffn))
            allow(where, "gate scores", gate.scores, "softmax")
            allow(where, "gate input norm", gate.input_norm, "none")
            allow(where, "gate bias", gate.has_bias, False)
            allow(where, "gate groups", gate.num_groups, 1)
            allow(where, "gate scale", gate.scale, 1.0)
            allow(where, "gate scale per expert", gate.has_expert_scale, False)
            allow(where, "expert capacity", gate.capacity, None)
    for name, found in (("rope settings", ropes), ("head counts", geometries), ("gates or experts", routed)):
        if len(found) > 1:
            faults.append(f"layers with {len(found)} different {name}")
    return faults
