"""gemma4, its text model: a dense MLP beside the experts, norms before and after everything, a gate with its own norm.

Layers with a window and layers without differ in head width, key/value heads and rope. Towers for pictures and sound
in the same folder are left alone.
"""

from collections.abc import Mapping
from typing import Any

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec, RopeSpec

SUMMARY = (
    "dense MLP beside gated tanh-GELU experts; gate on the un-normed residual; norms around all; keys as values; "
    "shared keys; two head widths and ropes; window; soft cap"
)

SLIDING, FULL = "sliding_attention", "full_attention"
DEFAULT_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

_NAMES: dict[str, TableRow | tuple[TableRow, ...]] = (
    dict(names.ENDS)
    | dict(names.PROJECTIONS)
    | dict(names.HEAD_NORMS)
    | dict(names.mlp("dense", names.LAYER + "mlp."))
    | dict(names.fused_experts(names.LAYER + "experts."))
    | {
        "input_norm": TableRow(names.LAYER + "input_layernorm.weight", ("D",)),
        "attention_out_norm": TableRow(names.LAYER + "post_attention_layernorm.weight", ("D",)),
        "dense_norm": TableRow(names.LAYER + "pre_feedforward_layernorm.weight", ("D",)),
        "dense_out_norm": TableRow(names.LAYER + "post_feedforward_layernorm_1.weight", ("D",)),
        "post_norm": (
            TableRow(names.LAYER + "pre_feedforward_layernorm_2.weight", ("D",)),  # what the experts read
            TableRow(names.LAYER + "pre_feedforward_layernorm.weight", ("D",)),  # in a layer without experts
        ),
        "routed_out_norm": TableRow(names.LAYER + "post_feedforward_layernorm_2.weight", ("D",)),
        "ffn_out_norm": TableRow(names.LAYER + "post_feedforward_layernorm.weight", ("D",)),
        "output_scale": TableRow(names.LAYER + "layer_scalar", ("1",)),
        "gate": TableRow(names.LAYER + "router.proj.weight", ("E", "D")),
        "gate_norm": TableRow(names.LAYER + "router.scale", ("D",)),
        "gate_expert_scale": TableRow(names.LAYER + "router.per_expert_scale", ("E",)),
    }
)


def _with_prefixes(row: TableRow | tuple[TableRow, ...]) -> tuple[TableRow, ...]:
    """The name in a folder of the text model alone, and in one of the whole model."""
    rows = (row,) if isinstance(row, TableRow) else row
    whole = [each._replace(name=each.name.replace("model.", "model.language_model.", 1)) for each in rows]
    return (*rows, *whole)


TENSORS: Rows = {role: _with_prefixes(row) for role, row in _NAMES.items()}


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """Names of other towers, and of projections that layers with shared keys and values do not use."""
    towers = ("vision_tower.", "embed_vision.", "audio_tower.", "embed_audio.")
    sharing = (i for i, layer in enumerate(spec.layers) if layer.attention.kv_shared_with is not None)
    unused = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return towers + tuple(f"layers.{i}.self_attn.{name}" for i in sharing for name in unused)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a gemma4 text config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    config.absent("use_bidirectional_attention", "vision")  # pictures only
    per_layer_input = config.count("hidden_size_per_layer_input", default=256, at_least=0)
    if per_layer_input:
        raise config.fault("hidden_size_per_layer_input", per_layer_input, "is not supported, only 0")
    config.ignore("vocab_size_per_layer_input")
    config.choice("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")

    attentions = _attentions(config, num_layers)
    mlp_width = config.count("intermediate_size", default=9216)
    wide = config.flag("use_double_wide_mlp", default=False)
    gate, expert = _experts(config)

    def layer(attention: AttentionSpec) -> LayerSpec:
        factor = 2 if wide and attention.kv_shared_with is not None else 1
        dense = ExpertSpec(width=factor * mlp_width, activation="geglu_tanh")
        return LayerSpec(
            attention=attention,
            kind="dense" if gate is None else "moe",
            ffn=dense if expert is None else expert,
            gate=gate,
            parallel_dense=None if gate is None else dense,
            output_norms=True,
            output_scale=True,
        )

    return ModelSpec(
        family="gemma4",
        width=width,
        vocab_size=config.count("vocab_size", default=262_144),
        context_tokens=config.count("max_position_embeddings", default=131_072),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=tuple(layer(attention) for attention in attentions),
        tied_head=config.flag("tie_word_embeddings", default=True),
        embed_scale=width**0.5,
        logit_soft_cap=config.number("final_logit_softcapping")
        if config.has("final_logit_softcapping")
        else None,
    )


def _attentions(config: ConfigReader, num_layers: int) -> list[AttentionSpec]:
    context_tokens = config.count("max_position_embeddings", default=131_072)
    usual = [SLIDING if (i + 1) % 6 else FULL for i in range(num_layers)]
    kinds = config.layer_types(num_layers, [*usual[:-1], FULL])
    if kinds[-1] != FULL:
        raise config.fault("layer_types", kinds, f"must end with {FULL}")
    bias = config.flag("attention_bias", default=False)
    keys_serve = config.flag("attention_k_eq_v", default=False)
    window = config.window(context_tokens, default=512)
    ropes = _ropes(config, context_tokens)
    sources = _sources(config, kinds)
    found = []
    for index, (head_width, num_kv_heads) in enumerate(_geometries(config, kinds, keys_serve)):
        kind = kinds[index]
        found.append(
            AttentionSpec(
                num_heads=config.count("num_attention_heads", default=8),
                num_kv_heads=num_kv_heads,
                head_width=head_width,
                scale=1.0,
                rope=ropes[kind],
                qk_norm="head",
                value_norm=True,
                values_are_keys=keys_serve and kind == FULL,
                qkv_bias=bias,
                out_bias=bias,
                window=window if kind == SLIDING else None,
                kv_shared_with=sources[index],
            )
        )
    return found


def _geometries(config: ConfigReader, kinds: list[str], keys_serve: bool) -> list[tuple[int, int]]:
    """Head width and key/value heads of each layer; a list by layer wins over the keys for full attention."""
    usual = {
        "head_dim": config.count("head_dim", default=256),
        "num_key_value_heads": config.count("num_key_value_heads", default=4),
    }
    full = usual | {"head_dim": config.count("global_head_dim", default=512)}
    if keys_serve and config.has("num_global_key_value_heads"):
        full["num_key_value_heads"] = config.count("num_global_key_value_heads")
    config.ignore("num_global_key_value_heads")
    changes = config.layer_settings("per_layer_config", tuple(usual), len(kinds))
    found = []
    for index, kind in enumerate(kinds):
        own = usual | changes.get(index, {}) if changes is not None else (full if kind == FULL else usual)
        num_heads = config.count("num_attention_heads", default=8)
        if num_heads % own["num_key_value_heads"]:
            raise config.fault(
                "num_key_value_heads", own["num_key_value_heads"], f"does not divide {num_heads} heads"
            )
        found.append((own["head_dim"], own["num_key_value_heads"]))
    return found


def _ropes(config: ConfigReader, context_tokens: int) -> dict[str, RopeSpec]:
    key, settings = config.rope_settings(DEFAULT_ROPE)
    found = {}
    for kind in (SLIDING, FULL):
        nested: Any = settings.get(kind)
        if not isinstance(nested, Mapping):
            raise config.fault(f"{key}.{kind}", nested, "must be an object with the rope of these layers")
        found[kind] = config.rope_of(f"{key}.{kind}", nested, context_tokens, default_theta=10_000.0)
    return found


def _sources(config: ConfigReader, kinds: list[str]) -> list[int | None]:
    """For each layer the one whose keys and values it uses: the last unshared one of its kind."""
    num_shared = config.count("num_kv_shared_layers", default=0, at_least=0)
    first = len(kinds) - num_shared
    if num_shared and (first < 1 or set(kinds[first:]) - set(kinds[: max(first, 0)])):
        raise config.fault("num_kv_shared_layers", num_shared, "leaves a kind of layer without its own keys")
    last = {kind: index for index, kind in enumerate(kinds[:first])}
    return [None if index < first else last[kind] for index, kind in enumerate(kinds)]


def _experts(config: ConfigReader) -> tuple[GateSpec | None, ExpertSpec | None]:
    if not config.flag("enable_moe_block", default=False):
        config.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        return None, None
    num_experts, top_k = config.experts("num_experts", "top_k_experts")
    gate = GateSpec(
        num_experts=num_experts, top_k=top_k, renormalise=True, reads_residual=True, has_expert_scale=True
    )
    return gate, ExpertSpec(width=config.count("moe_intermediate_size"), activation="geglu_tanh")
