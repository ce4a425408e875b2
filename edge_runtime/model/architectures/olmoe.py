"""olmoe: softmax gate, SwiGLU experts in every layer, q/k norm over whole projections, clipped q, k and v."""

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

SUMMARY = "softmax gate; SwiGLU; q/k norm over whole projections; clipped q/k/v"

_MLP = names.LAYER + "mlp."
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.PROJECTIONS)
    | dict(names.experts(_MLP))
    | {
        "gate": TableRow(_MLP + "gate.weight", ("E", "D")),
        "q_norm": TableRow(names.ATTENTION + "q_norm.weight", ("H*P",)),
        "k_norm": TableRow(names.ATTENTION + "k_norm.weight", ("G*P",)),
    }
)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of an olmoe config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    context_tokens = config.count("max_position_embeddings", default=4096)
    config.choice("hidden_act", "silu", default="silu")
    bias = config.flag("attention_bias", default=False)
    num_heads, num_kv_heads = config.heads()
    if width % num_heads:
        raise config.fault("num_attention_heads", num_heads, f"does not divide hidden_size {width}")
    head_width = width // num_heads
    config.absent("head_dim", head_width)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        scale=head_width**-0.5,
        qk_norm="projection",
        qkv_bias=bias,
        out_bias=bias,
        clip=config.number("clip_qkv") if config.has("clip_qkv") else None,
        rope=config.rope(context_tokens),
    )
    num_experts, top_k = config.experts("num_experts", "num_experts_per_tok", default=64, default_top_k=8)
    layer = LayerSpec(
        attention=attention,
        kind="moe",
        ffn=ExpertSpec(width=config.count("intermediate_size", default=2048)),
        gate=GateSpec(
            num_experts=num_experts, top_k=top_k, renormalise=config.flag("norm_topk_prob", default=False)
        ),
    )
    return ModelSpec(
        family="olmoe",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        layers=(layer,) * config.count("num_hidden_layers"),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
