"""deepseek_v2: latent attention (MLA), experts in groups beside shared ones, weights scaled and not renormalised."""

import msgspec

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.rope import yarn_attention_factor
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LatentSpec, LayerSpec, ModelSpec

SUMMARY = "latent attention; softmax gate, best groups first, scaled; SwiGLU; shared experts; first layers dense; yarn"

_MLP = names.LAYER + "mlp."
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.mlp("dense", _MLP))
    | dict(names.mlp("shared", _MLP + "shared_experts."))
    | dict(names.experts(_MLP))
    | {
        "q": TableRow(names.ATTENTION + "q_proj.weight", ("H*P", "D")),
        "q_down": TableRow(names.ATTENTION + "q_a_proj.weight", ("Q", "D")),
        "q_down_bias": TableRow(names.ATTENTION + "q_a_proj.bias", ("Q",)),
        "q_latent_norm": TableRow(names.ATTENTION + "q_a_layernorm.weight", ("Q",)),
        "q_up": TableRow(names.ATTENTION + "q_b_proj.weight", ("H*P", "Q")),
        "kv_down": TableRow(names.ATTENTION + "kv_a_proj_with_mqa.weight", ("C+R", "D")),
        "kv_down_bias": TableRow(names.ATTENTION + "kv_a_proj_with_mqa.bias", ("C+R",)),
        "kv_latent_norm": TableRow(names.ATTENTION + "kv_a_layernorm.weight", ("C",)),
        "kv_up": TableRow(names.ATTENTION + "kv_b_proj.weight", ("H*A+H*U", "C")),
        "o": TableRow(names.ATTENTION + "o_proj.weight", ("D", "H*U")),
        "o_bias": TableRow(names.ATTENTION + "o_proj.bias", ("D",)),
        "gate": TableRow(_MLP + "gate.weight", ("E", "D")),
    }
)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a deepseek_v2 config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    config.choice("hidden_act", "silu", default="silu")
    config.absent("mlp_bias", False)
    config.absent("moe_layer_freq", 1)
    config.ignore("aux_loss_alpha", "seq_aux", "pretraining_tp", "ep_size")  # training and its layout
    context_tokens = config.count("max_position_embeddings", default=2048)
    attention = _attention(config, context_tokens)
    expert_width = config.count("moe_intermediate_size", default=1407)
    moe_layer = LayerSpec(
        attention=attention,
        kind="moe",
        ffn=ExpertSpec(width=expert_width),
        gate=_gate(config),
        shared=ExpertSpec(width=expert_width * config.count("n_shared_experts", default=2)),
    )
    dense = ExpertSpec(width=config.count("intermediate_size", default=11008))
    dense_layer = LayerSpec(attention=attention, kind="dense", ffn=dense)
    num_dense = config.count("first_k_dense_replace", default=0, at_least=0)
    return ModelSpec(
        family="deepseek_v2",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=tuple(moe_layer if i >= num_dense else dense_layer for i in range(num_layers)),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )


def _attention(config: ConfigReader, context_tokens: int) -> AttentionSpec:
    num_heads, num_kv_heads = config.heads()
    if num_kv_heads != num_heads:
        raise config.fault(
            "num_key_value_heads", num_kv_heads, f"must be {num_heads}, as many as query heads"
        )
    bias = config.flag("attention_bias", default=False)
    config.ignore("head_dim", "qk_head_dim")  # follow from the widths below
    latent = LatentSpec(
        width=config.count("kv_lora_rank", default=512),
        plain_width=config.count("qk_nope_head_dim", default=128),
        value_width=config.count("v_head_dim", default=128),
        query_rank=config.count("q_lora_rank") if config.has("q_lora_rank") else None,
    )
    turned = config.count("qk_rope_head_dim", default=64)
    if turned % 2:
        raise config.fault("qk_rope_head_dim", turned, "must be even")
    head_width = latent.plain_width + turned
    rope = config.rope(context_tokens, interleaved=True)
    scale = head_width**-0.5
    if rope.kind != "default":
        # Yarn sharpens the scores as well: by its factor for all dimensions, once for queries and once for keys.
        mscale = config.rope_settings()[1].get("mscale_all_dim")
        scale *= yarn_attention_factor(rope.factor, mscale) ** 2 if mscale else 1.0
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_width=head_width,
        scale=scale,
        latent=latent,
        qkv_bias=bias,
        out_bias=bias,
        rope=rope,
    )


def _gate(config: ConfigReader) -> GateSpec:
    num_experts, top_k = config.experts("n_routed_experts", "num_experts_per_tok", default=64)
    config.choice("scoring_func", "softmax", default="softmax")
    config.absent("norm_topk_prob", False)
    gate = GateSpec(
        num_experts=num_experts,
        top_k=top_k,
        scale=config.number("routed_scaling_factor", default=1.0),
    )
    if config.choice("topk_method", "greedy", "group_limited_greedy", default="greedy") == "greedy":
        config.ignore("n_group", "topk_group")
        return gate
    num_groups = config.count("n_group")
    top_groups = config.count("topk_group")
    if num_experts % num_groups:
        raise config.fault("n_group", num_groups, f"does not divide {num_experts} experts")
    reachable = top_groups * (num_experts // num_groups)
    if top_groups > num_groups or top_k > reachable:
        raise config.fault("topk_group", top_groups, f"does not fit {num_groups} groups and top {top_k}")
    return msgspec.structs.replace(gate, num_groups=num_groups, top_groups=top_groups)
