"""qwen3_moe: softmax gate, SwiGLU experts, q/k norm per head, some layers dense if the config says so."""

from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

_LAYER = "model.layers.{layer}."
_EXPERT = _LAYER + "mlp.experts.{expert}."

TENSORS = {
    "embed": TableRow("model.embed_tokens.weight", ("V", "D")),
    "final_norm": TableRow("model.norm.weight", ("D",)),
    "head": TableRow("lm_head.weight", ("V", "D")),
    "input_norm": TableRow(_LAYER + "input_layernorm.weight", ("D",)),
    "q": TableRow(_LAYER + "self_attn.q_proj.weight", ("H*P", "D")),
    "k": TableRow(_LAYER + "self_attn.k_proj.weight", ("G*P", "D")),
    "v": TableRow(_LAYER + "self_attn.v_proj.weight", ("G*P", "D")),
    "o": TableRow(_LAYER + "self_attn.o_proj.weight", ("D", "H*P")),
    "q_bias": TableRow(_LAYER + "self_attn.q_proj.bias", ("H*P",)),
    "k_bias": TableRow(_LAYER + "self_attn.k_proj.bias", ("G*P",)),
    "v_bias": TableRow(_LAYER + "self_attn.v_proj.bias", ("G*P",)),
    "o_bias": TableRow(_LAYER + "self_attn.o_proj.bias", ("D",)),
    "q_norm": TableRow(_LAYER + "self_attn.q_norm.weight", ("P",)),
    "k_norm": TableRow(_LAYER + "self_attn.k_norm.weight", ("P",)),
    "post_norm": TableRow(_LAYER + "post_attention_layernorm.weight", ("D",)),
    "gate": TableRow(_LAYER + "mlp.gate.weight", ("E", "D")),
    "expert_gate": TableRow(_EXPERT + "gate_proj.weight", ("F", "D")),
    "expert_up": TableRow(_EXPERT + "up_proj.weight", ("F", "D")),
    "expert_down": TableRow(_EXPERT + "down_proj.weight", ("D", "F")),
    "dense_gate": TableRow(_LAYER + "mlp.gate_proj.weight", ("F", "D")),
    "dense_up": TableRow(_LAYER + "mlp.up_proj.weight", ("F", "D")),
    "dense_down": TableRow(_LAYER + "mlp.down_proj.weight", ("D", "F")),
}


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a qwen3_moe config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    num_heads = config.count("num_attention_heads")
    context_tokens = config.count("max_position_embeddings", default=32768)
    bias = config.flag("attention_bias", default=False)
    config.choice("hidden_act", "silu", default="silu")
    if config.flag("use_sliding_window", default=False):
        # A window as long as the context hides nothing. Without the flag the other two keys mean nothing.
        window = config.count("sliding_window", default=4096)
        if window < context_tokens:
            raise config.fault(
                "sliding_window", window, f"is not supported (context {context_tokens} tokens)"
            )
    else:
        config.has("sliding_window")
    config.has("max_window_layers")

    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.count("num_key_value_heads", default=4),
        head_width=config.count("head_dim", default=width // num_heads),
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        rope=config.rope(),
    )
    if num_heads % attention.num_kv_heads:
        raise config.fault(
            "num_key_value_heads", attention.num_kv_heads, f"does not divide {num_heads} heads"
        )

    dense = ExpertSpec(width=config.count("intermediate_size", default=6144))
    dense_layer = LayerSpec(attention=attention, kind="dense", ffn=dense)
    moe_layer = _moe_layer(config, attention)
    dense_only = config.layer_indices("mlp_only_layers", num_layers)
    every = config.count("decoder_sparse_step", default=1)
    layers = tuple(
        moe_layer if moe_layer and i not in dense_only and (i + 1) % every == 0 else dense_layer
        for i in range(num_layers)
    )
    return ModelSpec(
        family="qwen3_moe",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=layers,
        tied_head=config.flag("tie_word_embeddings", default=False),
    )


def _moe_layer(config: ConfigReader, attention: AttentionSpec) -> LayerSpec | None:
    key = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    num_experts = config.count(key, default=128, at_least=0)
    top_k = config.count("num_experts_per_tok", default=8)
    width = config.count("moe_intermediate_size", default=768)
    renormalise = config.flag("norm_topk_prob", default=False)
    config.has("num_experts")
    if num_experts == 0:
        return None
    if top_k > num_experts:
        raise config.fault("num_experts_per_tok", top_k, f"is more than the {num_experts} experts of a layer")
    gate = GateSpec(num_experts=num_experts, top_k=top_k, renormalise=renormalise)
    return LayerSpec(attention=attention, kind="moe", ffn=ExpertSpec(width=width), gate=gate)
