"""gpt_oss: softmax over the chosen experts' biased logits, clamped SwiGLU with biases, sinks, alternating windows, yarn.

Gate and up lie interleaved in one tensor per layer: transposed as plain numbers, or as rows of MXFP4 blocks.
"""

from edge_runtime.model.architectures import names
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import MXFP4_BLOCK, Rows, TableRow
from edge_runtime.model.spec import AttentionSpec, ExpertSpec, GateSpec, LayerSpec, ModelSpec

SUMMARY = (
    "gate with bias, softmax over the chosen; clamped SwiGLU with biases; sinks; alternating window; yarn"
)
QUANTISATIONS = ("mxfp4", "fp8")

_MLP = names.LAYER + "mlp."
_GATE_UP, _DOWN = _MLP + "experts.gate_up_proj", _MLP + "experts.down_proj"
_PLAIN = TableRow(_GATE_UP, ("E", "D", "2*F"), transposed=True)
_BLOCKS = TableRow(_GATE_UP, ("E", "2*F", "D"), mxfp4=True)
_BIAS = TableRow(_GATE_UP + "_bias", ("E", "2*F"))
TENSORS: Rows = (
    dict(names.ENDS)
    | dict(names.NORMS)
    | dict(names.PROJECTIONS)
    | {
        "sinks": TableRow(names.ATTENTION + "sinks", ("H",)),
        "gate": TableRow(_MLP + "router.weight", ("E", "D")),
        "gate_bias": TableRow(_MLP + "router.bias", ("E",)),
        "expert_gate": (_PLAIN._replace(take="even"), _BLOCKS._replace(take="even")),
        "expert_up": (_PLAIN._replace(take="odd"), _BLOCKS._replace(take="odd")),
        "expert_down": (
            TableRow(_DOWN, ("E", "F", "D"), transposed=True),
            TableRow(_DOWN, ("E", "D", "F"), mxfp4=True),
        ),
        "expert_gate_bias": _BIAS._replace(take="even"),
        "expert_up_bias": _BIAS._replace(take="odd"),
        "expert_down_bias": TableRow(_DOWN + "_bias", ("E", "D")),
    }
)
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a gpt_oss config; what the code cannot run is refused by key and value."""
    width = config.count("hidden_size")
    num_layers = config.count("num_hidden_layers")
    context_tokens = config.count("max_position_embeddings", default=131072)
    bias = config.flag("attention_bias", default=True)
    config.choice("hidden_act", "silu", default="silu")
    config.ignore("experts_per_token", "initial_context_length")  # older names of keys that are read
    num_heads, num_kv_heads = config.heads(default_kv_heads=8)
    head_width = config.count("head_dim", default=64)
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=head_width,
        scale=head_width**-0.5,
        qkv_bias=bias,
        out_bias=bias,
        has_sinks=True,
        rope=config.rope(context_tokens, default_theta=150_000.0, default=DEFAULT_ROPE),
    )
    num_experts, top_k = config.experts(
        "num_local_experts", "num_experts_per_tok", default=128, default_top_k=4
    )
    expert = ExpertSpec(
        width=config.count("intermediate_size", default=2880),
        activation="clamped_swiglu",
        clamp=config.number("swiglu_limit", default=7.0),
        alpha=config.number("swiglu_alpha", default=1.702),
        has_bias=True,
    )
    if config.quantisation_method == "mxfp4":
        for key, size in (("hidden_size", width), ("intermediate_size", expert.width)):
            if size % MXFP4_BLOCK:
                raise config.fault(key, size, f"is not a multiple of {MXFP4_BLOCK}, as mxfp4 needs")
    gate = GateSpec(num_experts=num_experts, top_k=top_k, scores="softmax_of_top_k", has_bias=True)
    usual = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers)]
    kinds = config.layer_types(num_layers, usual)
    window = config.window(context_tokens, default=128)
    return ModelSpec(
        family="gpt_oss",
        width=width,
        vocab_size=config.count("vocab_size"),
        context_tokens=context_tokens,
        norm_eps=config.number("rms_norm_eps", default=1e-5),
        layers=tuple(
            LayerSpec(
                attention=attention.windowed(window if kind == "sliding_attention" else None),
                kind="moe",
                ffn=expert,
                gate=gate,
            )
            for kind in kinds
        ),
        tied_head=config.flag("tie_word_embeddings", default=False),
    )
