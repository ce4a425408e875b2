"""qwen2_moe: softmax gate, SwiGLU experts beside one shared expert behind a sigmoid, biased q, k and v."""

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

SUMMARY = "softmax gate; SwiGLU; shared expert behind a sigmoid; q/k/v bias; dense layers; windows by layer"

_MLP = names.LAYER + "mlp."
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.PROJECTIONS)
    | dict(names.mlp("dense", _MLP))
    | dict(names.mlp("shared", _MLP + "shared_expert."))
    | dict(names.experts(_MLP))
    | {
        "gate": TableRow(_MLP + "gate.weight", ("E", "D")),
        "shared_expert_gate": TableRow(_MLP + "shared_expert_gate.weight", ("1", "D")),
    }
)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a qwen2_moe config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    context_tokens = config.count("max_position_embeddings", default=32768)
    config.choice("hidden_act", "silu", default="silu")
    num_heads, num_kv_heads = config.heads(default_kv_heads=16)
    head_width = config.count("head_dim", default=width // num_heads)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        scale=head_width**-0.5,
        qkv_bias=config.flag("qkv_bias", default=True),
        rope=config.rope(context_tokens),
    )
    num_experts, top_k = config.experts(
        "num_experts", "num_experts_per_tok", default=60, default_top_k=4, at_least=0
    )
    gate = GateSpec(
        num_experts=num_experts, top_k=top_k, renormalise=config.flag("norm_topk_prob", default=False)
    )
    routed = ExpertSpec(width=config.count("moe_intermediate_size", default=1408))
    shared = ExpertSpec(width=config.count("shared_expert_intermediate_size", default=5632))
    dense = ExpertSpec(width=config.count("intermediate_size", default=5632))
    is_moe = config.sparse_layers(num_layers)

    def layer(index: int, window: int | None) -> LayerSpec:
        part = attention.windowed(window)
        if not num_experts or not is_moe[index]:
            return LayerSpec(attention=part, kind="dense", ffn=dense)
        return LayerSpec(attention=part, kind="moe", ffn=routed, gate=gate, shared=shared, shared_gate=True)

    windows = _windows(config, num_layers, context_tokens)
    return ModelSpec(
        family="qwen2_moe",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        layers=tuple(layer(index, window) for index, window in enumerate(windows)),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )


def _windows(config: ConfigReader, num_layers: int, context_tokens: int) -> list[int | None]:
    """Every other layer below `max_window_layers` has a window, if the config turns windows on."""
    slides = config.flag("use_sliding_window", default=False)
    below = config.count("max_window_layers", default=28, at_least=0)
    usual = [
        "sliding_attention" if slides and i % 2 == 0 and i < below else "full_attention"
        for i in range(num_layers)
    ]
    kinds = config.layer_types(num_layers, usual)
    if not slides:
        if "sliding_attention" in kinds:
            raise config.fault("layer_types", kinds, "is not supported with use_sliding_window false")
        config.ignore("sliding_window")
        return [None] * num_layers
    window = config.window(context_tokens)
    return [window if kind == "sliding_attention" else None for kind in kinds]
