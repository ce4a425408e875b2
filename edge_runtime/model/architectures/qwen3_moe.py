"""qwen3_moe: softmax gate, SwiGLU experts, q/k norm per head, some layers dense if the config says so."""

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

SUMMARY = "softmax gate, SwiGLU, q/k norm per head, dense layers"

_MLP = names.LAYER + "mlp."
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.PROJECTIONS)
    | dict(names.HEAD_NORMS)
    | dict(names.mlp("dense", _MLP))
    | dict(names.experts(_MLP))
    | {"gate": TableRow(_MLP + "gate.weight", ("E", "D"))}
)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a qwen3_moe config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    context_tokens = config.count("max_position_embeddings", default=32768)
    bias = config.flag("attention_bias", default=False)
    config.choice("hidden_act", "silu", default="silu")
    window = config.window(context_tokens) if config.flag("use_sliding_window", default=False) else None
    config.ignore("sliding_window", "max_window_layers")

    num_heads, num_kv_heads = config.heads(default_kv_heads=4)
    head_width = config.count("head_dim", default=width // num_heads)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        scale=head_width**-0.5,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        window=window,
        rope=config.rope(context_tokens),
    )
    dense = ExpertSpec(width=config.count("intermediate_size", default=6144))
    dense_layer = LayerSpec(attention=attention, kind="dense", ffn=dense)
    moe_layer = _moe_layer(config, attention)
    is_moe = config.sparse_layers(num_layers)
    layers = tuple(moe_layer if moe_layer and is_moe[i] else dense_layer for i in range(num_layers))
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
    num_experts, top_k = config.experts(key, "num_experts_per_tok", default=128, default_top_k=8, at_least=0)
    width = config.count("moe_intermediate_size", default=768)
    renormalise = config.flag("norm_topk_prob", default=False)
    if config.has("num_experts") and (other := config.count("num_experts", at_least=0)) != num_experts:
        raise config.fault("num_experts", other, f"differs from num_local_experts = {num_experts}")
    if num_experts == 0:
        return None
    gate = GateSpec(num_experts=num_experts, top_k=top_k, renormalise=renormalise)
    return LayerSpec(attention=attention, kind="moe", ffn=ExpertSpec(width=width), gate=gate)
