"""mixtral: softmax gate that always renormalises, SwiGLU experts in every layer, a window over all layers if set."""

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

SUMMARY = "softmax gate, renormalised; SwiGLU; window over all layers"

_HUB, _FUSED = names.LAYER + "block_sparse_moe.", names.LAYER + "mlp."
_FUSED_EXPERTS = names.fused_experts(_FUSED + "experts.")
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.PROJECTIONS)
    | {
        "gate": (
            TableRow(_HUB + "gate.weight", ("E", "D")),
            TableRow(_FUSED + "gate.weight", ("E", "D")),
        ),
        "expert_gate": (
            TableRow(_HUB + "experts.{expert}.w1.weight", ("F", "D")),
            _FUSED_EXPERTS["expert_gate"],
        ),
        "expert_up": (
            TableRow(_HUB + "experts.{expert}.w3.weight", ("F", "D")),
            _FUSED_EXPERTS["expert_up"],
        ),
        "expert_down": (
            TableRow(_HUB + "experts.{expert}.w2.weight", ("D", "F")),
            _FUSED_EXPERTS["expert_down"],
        ),
    }
)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a mixtral config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    context_tokens = config.count("max_position_embeddings", default=131072)
    config.choice("hidden_act", "silu", default="silu")
    config.ignore("router_jitter_noise")  # training only
    num_heads, num_kv_heads = config.heads(default_kv_heads=8)
    head_width = config.count("head_dim", default=width // num_heads)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        scale=head_width**-0.5,
        window=config.window(context_tokens) if config.has("sliding_window") else None,
        rope=config.rope(context_tokens, default_theta=1e6),
    )
    num_experts, top_k = config.experts(
        "num_local_experts", "num_experts_per_tok", default=8, default_top_k=2
    )
    layer = LayerSpec(
        attention=attention,
        kind="moe",
        ffn=ExpertSpec(width=config.count("intermediate_size", default=14336)),
        gate=GateSpec(num_experts=num_experts, top_k=top_k, renormalise=True),
    )
    return ModelSpec(
        family="mixtral",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        layers=(layer,) * config.count("num_hidden_layers"),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
