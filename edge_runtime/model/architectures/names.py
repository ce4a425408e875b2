"""Rows that many families share: the usual names of embedding, norms, projections and experts."""

from edge_runtime.model.architectures.table import Rows, TableRow

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."

ENDS: Rows = {
    "embed": TableRow("model.embed_tokens.weight", ("V", "D")),
    "final_norm": TableRow("model.norm.weight", ("D",)),
    "head": TableRow("lm_head.weight", ("V", "D")),
}
NORMS: Rows = {
    "input_norm": TableRow(LAYER + "input_layernorm.weight", ("D",)),
    "post_norm": TableRow(LAYER + "post_attention_layernorm.weight", ("D",)),
}
PROJECTIONS: Rows = {
    "q": TableRow(ATTENTION + "q_proj.weight", ("H*P", "D")),
    "k": TableRow(ATTENTION + "k_proj.weight", ("G*P", "D")),
    "v": TableRow(ATTENTION + "v_proj.weight", ("G*P", "D")),
    "o": TableRow(ATTENTION + "o_proj.weight", ("D", "H*P")),
    "q_bias": TableRow(ATTENTION + "q_proj.bias", ("H*P",)),
    "k_bias": TableRow(ATTENTION + "k_proj.bias", ("G*P",)),
    "v_bias": TableRow(ATTENTION + "v_proj.bias", ("G*P",)),
    "o_bias": TableRow(ATTENTION + "o_proj.bias", ("D",)),
}
HEAD_NORMS: Rows = {
    "q_norm": TableRow(ATTENTION + "q_norm.weight", ("P",)),
    "k_norm": TableRow(ATTENTION + "k_norm.weight", ("P",)),
}


def mlp(role: str, module: str) -> Rows:
    """A SwiGLU MLP of three matrices, as `role`_gate, _up and _down."""
    return {
        f"{role}_gate": TableRow(module + "gate_proj.weight", ("F", "D")),
        f"{role}_up": TableRow(module + "up_proj.weight", ("F", "D")),
        f"{role}_down": TableRow(module + "down_proj.weight", ("D", "F")),
    }


def fused_experts(module: str) -> dict[str, TableRow]:
    """All experts of a layer in two tensors, gate above up."""
    gate_up = TableRow(module + "gate_up_proj", ("E", "2*F", "D"))
    return {
        "expert_gate": gate_up._replace(take="first_half"),
        "expert_up": gate_up._replace(take="second_half"),
        "expert_down": TableRow(module + "down_proj", ("E", "D", "F")),
    }


def experts(module: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Rows:
    """Experts one by one under `module`.N, as the hub has them; or fused, as transformers holds them."""
    one, fused = module + "experts.{expert}.", fused_experts(module + "experts.")
    return {
        "expert_gate": (TableRow(f"{one}{gate}.weight", ("F", "D")), fused["expert_gate"]),
        "expert_up": (TableRow(f"{one}{up}.weight", ("F", "D")), fused["expert_up"]),
        "expert_down": (TableRow(f"{one}{down}.weight", ("D", "F")), fused["expert_down"]),
    }
