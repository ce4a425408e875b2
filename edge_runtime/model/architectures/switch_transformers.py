"""switch_transformers: an encoder-decoder with one expert per token, expert capacity and a relative position bias."""

from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import Rows, TableRow
from edge_runtime.model.spec import (
    AttentionSpec,
    EncoderSpec,
    ExpertSpec,
    GateSpec,
    LayerSpec,
    ModelSpec,
    RelativeBias,
)

SUMMARY = "encoder-decoder; softmax gate, top 1; expert capacity; ReLU; relative position bias; dense layers"


def _attention(module: str, prefix: str = "") -> dict[str, TableRow]:
    """Projections of an attention, as `prefix`q, k, v and o."""
    shapes = {"q": ("H*P", "D"), "k": ("H*P", "D"), "v": ("H*P", "D"), "o": ("D", "H*P")}
    return {prefix + name: TableRow(f"{module}{name}.weight", shape) for name, shape in shapes.items()}


def _stack(name: str, num_sublayers: int) -> dict[str, TableRow]:
    """A layer of the encoder or of the decoder, whose last sublayer is the feed-forward one."""
    layer = f"{name}.block.{{layer}}.layer."
    mlp = f"{layer}{num_sublayers - 1}."
    expert = mlp + "mlp.experts.expert_{expert}."
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"  # all layers use the first one's
    return {
        **_attention(layer + "0.SelfAttention."),
        "input_norm": TableRow(layer + "0.layer_norm.weight", ("D",)),
        "relative_bias": TableRow(bias, ("B", "H")),
        "post_norm": TableRow(mlp + "layer_norm.weight", ("D",)),
        "dense_up": TableRow(mlp + "mlp.wi.weight", ("F", "D")),
        "dense_down": TableRow(mlp + "mlp.wo.weight", ("D", "F")),
        "gate": TableRow(mlp + "mlp.router.classifier.weight", ("E", "D")),
        "gate_bias": TableRow(mlp + "mlp.router.classifier.bias", ("E",)),
        "expert_up": TableRow(expert + "wi.weight", ("F", "D")),
        "expert_down": TableRow(expert + "wo.weight", ("D", "F")),
    }


_CROSS = "decoder.block.{layer}.layer.1."
ENCODER_TENSORS: Rows = {
    **_stack("encoder", 2),
    "closing_norm": TableRow("encoder.final_layer_norm.weight", ("D",)),
}
TENSORS: Rows = {
    **_stack("decoder", 3),
    **_attention(_CROSS + "EncDecAttention.", "cross_"),
    "cross_norm": TableRow(_CROSS + "layer_norm.weight", ("D",)),
    "final_norm": TableRow("decoder.final_layer_norm.weight", ("D",)),
    "embed": TableRow("shared.weight", ("V", "D")),
    "encoder_embed": TableRow("encoder.embed_tokens.weight", ("V", "D")),
    "head": TableRow("lm_head.weight", ("V", "D")),
}


def tensors(spec: ModelSpec) -> Rows:
    """The rows of this model: one that is not tied has a table for each half."""
    assert spec.encoder is not None, "the family has an encoder"
    own = {"embed": TableRow("decoder.embed_tokens.weight", ("V", "D"))}
    return {**TENSORS, **own} if spec.encoder.own_embedding else TENSORS


def ignored(spec: ModelSpec) -> tuple[str, ...]:
    """Tied models may hold copies of the one embedding, untied ones hold a shared table that nothing reads."""
    assert spec.encoder is not None, "the family has an encoder"
    return ("shared.weight",) if spec.encoder.own_embedding else ("embed_tokens.weight",)


def read_spec(config: ConfigReader) -> ModelSpec:
    """The spec of a switch_transformers config; what the code cannot run is refused by key and value."""
    width = config.count("d_model", default=768)
    num_layers = config.count("num_layers", default=12)
    num_decoder_layers = config.count("num_decoder_layers", default=num_layers)
    config.choice("dense_act_fn", "relu", default="relu")
    config.choice("feed_forward_proj", "relu", default="relu")
    config.absent("is_gated_act", False)
    config.choice("router_dtype", "float32", default="float32")
    config.absent("batch_prioritized_routing", False)
    config.ignore("dropout_rate", "initializer_factor", "add_router_probs", "router_type", "n_positions")
    config.ignore("router_z_loss_coef", "router_jitter_noise", "router_ignore_padding_tokens")
    num_heads = config.count("num_heads", default=12)
    num_buckets = config.count("relative_attention_num_buckets", default=32, at_least=4)
    max_distance = config.count("relative_attention_max_distance", default=128)
    if max_distance <= num_buckets // 2:
        raise config.fault(
            "relative_attention_max_distance", max_distance, f"must be above {num_buckets // 2}"
        )
    ffn = ExpertSpec(width=config.count("d_ff", default=2048), activation="relu")
    gate = GateSpec(
        num_experts=config.count("num_experts", default=8),
        top_k=1,
        has_bias=config.flag("router_bias", default=False),
        capacity=config.count("expert_capacity", default=64),
    )
    head_width = config.count("d_kv", default=64)

    def stack(half: str, count: int) -> list[LayerSpec]:
        bias = RelativeBias(num_buckets, max_distance, both_ways=half == "encoder")
        attention = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_width=head_width,
            scale=1.0,
            rope=None,
            relative_bias=bias,
        )
        return [
            LayerSpec(
                attention=attention,
                kind="moe" if is_sparse else "dense",
                ffn=ffn,
                gate=gate if is_sparse else None,
                cross_attention=half == "decoder",
                closing_norm=half == "encoder" and index == count - 1,
            )
            for index, is_sparse in enumerate(_sparse_layers(config, half, count))
        ]

    tied = config.flag("tie_word_embeddings", default=True)
    start = config.count(
        "decoder_start_token_id", default=config.count("pad_token_id", default=0, at_least=0), at_least=0
    )
    vocab_size = config.count("vocab_size", default=32128)
    if start >= vocab_size:
        raise config.fault(
            "decoder_start_token_id", start, f"must be below vocab_size {vocab_size}, as every token is"
        )
    return ModelSpec(
        family="switch_transformers",
        width=width,
        vocab_size=vocab_size,
        # Distances have no limit; the published models were trained on 512 tokens of input, and answers of that length.
        context_tokens=2 * config.count("n_positions", default=512),
        norm_eps=config.number("layer_norm_epsilon", default=1e-6),
        layers=(*stack("encoder", num_layers), *stack("decoder", num_decoder_layers)),
        tied_head=tied,
        head_scale=width**-0.5 if tied else 1.0,
        encoder=EncoderSpec(num_layers, start, own_embedding=not tied),
    )


def _sparse_layers(config: ConfigReader, half: str, num_layers: int) -> list[bool]:
    """Every n-th layer, beginning with the second; n is given, or follows from how many there shall be."""
    wanted = config.count(f"num_sparse_{half}_layers", default=3, at_least=0)
    every = num_layers // wanted if wanted else num_layers
    every = config.count(f"{half}_sparse_step", default=every, at_least=0)
    return [every == 1 or (every > 1 and index % every == 1) for index in range(num_layers)]
