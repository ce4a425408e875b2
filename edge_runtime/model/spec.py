"""What a model is, as plain frozen data: enough to run any of the families, whichever of them the code runs today.

Knows no file and no tensor. `architectures/` fills it in from a config; `unsupported` says what of it cannot run yet.
"""

from typing import Literal, NamedTuple

import msgspec


class KVShape(NamedTuple):
    """What one token keeps in one layer."""

    num_heads: int
    """G, heads of keys and values."""
    key_width: int
    """P, numbers of one key."""
    value_width: int
    """Numbers of one value."""
    shared_with: int | None = None
    """The layer whose keys and values these are; None if the layer has its own."""


class RopeSpec(msgspec.Struct, frozen=True):
    """How positions turn the heads."""

    theta: float
    """Base wavelength."""
    kind: Literal["default", "linear", "yarn", "llama3", "proportional"] = "default"
    """How wavelengths are scaled beyond the trained context."""
    factor: float = 1.0
    """How much longer the context became (`linear`, `yarn`, `llama3`); a divisor of all turns (`proportional`)."""
    attention_factor: float = 1.0
    """Cosines and sines times this (`yarn`)."""
    original_context_tokens: int = 0
    """Positions before the context was stretched (`yarn`, `llama3`)."""
    beta_fast: float = 32.0
    """Turns in the original context above which a wavelength is kept (`yarn`)."""
    beta_slow: float = 1.0
    """Turns in the original context below which it is stretched by the whole factor (`yarn`)."""
    truncate: bool = True
    """The two borders are whole numbers (`yarn`)."""
    low_freq_factor: float = 1.0
    """Original context by this is the wavelength above which all is stretched (`llama3`)."""
    high_freq_factor: float = 4.0
    """Original context by this is the wavelength below which nothing is (`llama3`)."""
    rotary_share: float = 1.0
    """Share of each head's pairs that turn at all (`proportional`)."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1) and not halves (i, i + P/2)."""


class RelativeBias(msgspec.Struct, frozen=True):
    """A learned number per head and distance that is added to the scores: near distances one by one, far ones in bins."""

    num_buckets: int
    """Distances that are told apart."""
    max_distance: int
    """Tokens; from here on all distances are one."""
    both_ways: bool
    """Tokens behind a row are told apart from those before it, as an encoder sees both."""


class LatentSpec(msgspec.Struct, frozen=True):
    """Latent attention: keys and values of all heads are rebuilt from one short vector per token (MLA)."""

    width: int
    """Numbers of the latent that keys and values are rebuilt from."""
    plain_width: int
    """Numbers of each head that carry no position; the other `head_width - plain_width` are turned."""
    value_width: int
    """Width of a head's value."""
    query_rank: int | None = None
    """Queries pass a latent of this width too; None if they do not."""
    norm_eps: float = 1e-6
    """Of the latents' norms, which is not the model's."""


class AttentionSpec(msgspec.Struct, frozen=True):
    """One layer's attention."""

    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """G, key/value heads; H is a multiple of G."""
    head_width: int
    """P, width of a head of queries and keys; need not be D / H."""
    scale: float
    """Scores times this before the softmax."""
    rope: RopeSpec | None
    """How positions turn queries and keys; None if they do not."""
    relative_bias: RelativeBias | None = None
    """What distances add to the scores."""
    latent: LatentSpec | None = None
    """There if keys and values are rebuilt from a latent."""
    qk_norm: Literal["none", "head", "projection"] = "none"
    """RMS norm of queries and keys: none, per head, or over the whole projection."""
    value_norm: bool = False
    """RMS norm without scale of each value head."""
    values_are_keys: bool = False
    """There is no value projection: keys, before their norm, are the values."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias; with latents, both down projections."""
    out_bias: bool = False
    """The output projection has a bias."""
    window: int | None = None
    """A row attends to at most this many last positions, its own included; None for all."""
    has_sinks: bool = False
    """Each head has a learned sink in its softmax."""
    soft_cap: float | None = None
    """Scores pass `cap * tanh(score / cap)`."""
    clip: float | None = None
    """Queries, keys and values are clipped to [-clip, clip]."""
    kv_shared_with: int | None = None
    """This layer attends to the keys and values of that layer."""

    def windowed(self, window: int | None) -> "AttentionSpec":
        """The same with another window."""
        return msgspec.structs.replace(self, window=window)

    @property
    def kv_shape(self) -> KVShape:
        """What a token keeps."""
        if self.latent is not None:
            turned = self.head_width - self.latent.plain_width
            return KVShape(1, self.latent.width + turned, self.latent.width, self.kv_shared_with)
        return KVShape(self.num_kv_heads, self.head_width, self.head_width, self.kv_shared_with)

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that rope sees."""
        if self.rope is None:
            return 0
        return self.head_width - (self.latent.plain_width if self.latent else 0)

    @property
    def interleaved(self) -> bool:
        """Whether the pairs that rope turns are neighbours."""
        return self.rope is not None and self.rope.interleaved

    @property
    def mixed_width(self) -> int:
        """Numbers per row that go into the output projection."""
        return self.num_heads * (self.latent.value_width if self.latent else self.head_width)


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
    reads_residual: bool = False
    """The gate has a norm of its own and reads the residual, not what the experts read."""
    has_bias: bool = False
    """The logits have a bias."""
    has_selection_bias: bool = False
    """A learned number per expert is added to its score for the choice, and not for the weight."""
    num_groups: int = 1
    """Experts are in this many groups ..."""
    top_groups: int = 1
    """... and only experts of the best of them are chosen."""
    scale: float = 1.0
    """All weights times this."""
    has_expert_scale: bool = False
    """Each expert's weight times a learned number."""
    capacity: int | None = None
    """An expert takes at most this many tokens of an encoder's sequence; the others get none. See `encoder_decoder`."""

    @property
    def weights_sum_to_one(self) -> bool:
        """Whether a row's K weights add up to 1."""
        sums = self.renormalise or self.scores == "softmax_of_top_k"
        return sums and self.scale == 1.0 and not self.has_expert_scale


class ExpertSpec(msgspec.Struct, frozen=True):
    """One feed-forward network: a routed expert, a shared expert, or a dense layer's MLP."""

    width: int
    """F, inner width."""
    activation: Literal["swiglu", "geglu_tanh", "relu", "clamped_swiglu"] = "swiglu"
    """What is between the matrices."""
    clamp: float | None = None
    """Gate (above) and up (both sides) are clamped to this (`clamped_swiglu`)."""
    alpha: float = 1.0
    """Slope of the sigmoid (`clamped_swiglu`)."""
    has_bias: bool = False
    """The matrices have biases."""


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer."""

    attention: AttentionSpec
    kind: Literal["dense", "moe"]
    """Whether `ffn` is one MLP for all rows or E experts chosen by the gate."""
    ffn: ExpertSpec
    gate: GateSpec | None = None
    """None in a dense layer."""
    shared: ExpertSpec | None = None
    """The expert that runs for every token beside the routed ones and reads what they read."""
    shared_gate: bool = False
    """The shared expert's output times a sigmoid of the row."""
    parallel_dense: ExpertSpec | None = None
    """A dense MLP beside the experts that reads the residual; it and the experts' sum have norms of their own."""
    output_norms: bool = False
    """What attention and feed-forward give is normed before it is added to the residual."""
    output_scale: bool = False
    """The residual behind the layer times a learned number."""
    cross_attention: bool = False
    """Behind its own attention the layer attends to what the encoder gave."""
    closing_norm: bool = False
    """The residual behind the layer is normed: the end of an encoder."""


class EncoderSpec(msgspec.Struct, frozen=True):
    """The encoder of an encoder-decoder model: the first of the model's layers."""

    num_layers: int
    """Layers of the encoder; those behind them are the decoder's."""
    start_token_id: int
    """The token that every answer is taken to begin with."""
    own_embedding: bool = False
    """The encoder embeds by another table than the decoder."""


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
    head_scale: float = 1.0
    """What the final norm gives times this is what the head reads."""
    encoder: EncoderSpec | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers whose rows are routed."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind == "moe")

    def kv_shapes(self, first_layer: int, last_layer: int) -> dict[int, KVShape]:
        """What a token keeps in each of the layers [first_layer, last_layer)."""
        return {i: self.layers[i].attention.kv_shape for i in range(first_layer, last_layer)}


def unsupported(spec: ModelSpec) -> list[str]:
    """Everything in `spec` that the code cannot run yet, each as `what value`; empty for a model that runs."""
    faults = []

    def allow(where: str, name: str, value: object, *allowed: object) -> None:
        if value not in allowed:
            faults.append(f"{where}{name} {value!r}")

    routed = set()
    for index, layer in enumerate(spec.layers):
        where = f"layer {index}: "
        attention, gate = layer.attention, layer.gate
        if attention.rotary_width % 2:
            faults.append(
                f"{where}rope over an odd width {attention.rotary_width}, whose last column has no other"
            )
        if attention.latent is not None:
            allow(where, "latent attention with q/k norm", attention.qk_norm, "none")
            allow(where, "latent attention with clip", attention.clip, None)
            allow(where, "latent attention with shared keys", attention.kv_shared_with, None)
        if attention.kv_shared_with is not None:
            source = spec.layers[attention.kv_shared_with].attention
            same = source.kv_shape == attention.kv_shape._replace(shared_with=None)
            allow(where, "keys and values of another shape shared with layer", None if same else index, None)
        for expert in (layer.ffn, layer.shared, layer.parallel_dense):
            if expert is not None:
                allow(
                    where, "activation", expert.activation, "swiglu", "geglu_tanh", "clamped_swiglu", "relu"
                )
        if layer.shared is not None and layer.parallel_dense is not None:
            faults.append(f"{where}a shared expert beside a parallel dense MLP")
        if gate is not None:
            routed.add((gate, layer.ffn))
            if spec.encoder is None:
                allow(where, "expert capacity", gate.capacity, None)
        if spec.encoder is None:
            allow(where, "relative bias", attention.relative_bias and "present", None)
        elif layer != _plain(layer):
            faults.append(f"{where}more than a relative bias beside an encoder")
    if len(routed) > 1:
        faults.append(f"layers with {len(routed)} different gates or experts")
    return faults


def _plain(layer: LayerSpec) -> LayerSpec:
    """The layer with nothing but what an encoder-decoder runs."""
    attention = layer.attention
    return LayerSpec(
        attention=AttentionSpec(
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_heads,
            head_width=attention.head_width,
            scale=attention.scale,
            rope=None,
            relative_bias=attention.relative_bias or RelativeBias(0, 0, False),
        ),
        kind=layer.kind,
        ffn=layer.ffn,
        gate=layer.gate,
        cross_attention=layer.cross_attention,
        closing_norm=layer.closing_norm,
    )
