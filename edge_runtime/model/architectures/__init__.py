"""The families: `model_type` of a config -> its spec and its table of tensors. Everything else is shared."""

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import ConfigError, cut
from edge_runtime.model.architectures import (
    deepseek_v2,
    gemma4,
    gpt_oss,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    switch_transformers,
)
from edge_runtime.model.architectures.config_reader import MEND, MOST_EXPERTS, ConfigReader, Quantisation
from edge_runtime.model.architectures.table import TensorTable
from edge_runtime.model.rope import rope_keys, turns_are_finite
from edge_runtime.model.spec import ModelSpec, unsupported

FAMILIES = {
    "deepseek_v2": deepseek_v2,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "switch_transformers": switch_transformers,
}


def read_model(
    config: Mapping[str, Any], source: str = "config.json"
) -> tuple[ModelSpec, TensorTable, Quantisation]:
    """What a parsed `config.json` describes: the spec, where its tensors lie, and how matrices are quantised.

    source   names the file in errors
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type {cut(repr(name))} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[name]
    reader = ConfigReader(_text_part(config, source), source)
    spec = family.read_spec(reader)
    quantisation = reader.finish(getattr(family, "QUANTISATIONS", ("fp8",)))
    if faults := unsupported(spec):
        raise ConfigError(f"{source}: this {name} model needs what cannot be run yet: {'; '.join(faults)}")
    num_experts = sum(layer.gate.num_experts for layer in spec.layers if layer.gate is not None)
    if num_experts > MOST_EXPERTS:
        raise ConfigError(
            f"{source}: {spec.num_layers} layers have {num_experts} experts in all, expected at most {MOST_EXPERTS}; {MEND}"
        )
    for rope, width in rope_keys(spec):
        if not turns_are_finite(rope, width, spec.context_tokens):
            raise ConfigError(
                f"{source}: the rope settings turn {spec.context_tokens} positions by angles that are not finite ({rope}); {MEND}"
            )
    ignored = family.ignored(spec) if hasattr(family, "ignored") else ()
    rows = family.tensors(spec) if hasattr(family, "tensors") else family.TENSORS
    encoder_rows = getattr(family, "ENCODER_TENSORS", None)
    table = TensorTable(spec, rows, encoder_rows=encoder_rows, ignored=ignored)
    return spec, table, quantisation


def _text_part(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The keys of the text model: the whole config, or what a model of several kinds of input nests."""
    if "text_config" not in config:
        return config
    text = config["text_config"]
    if not isinstance(text, Mapping):
        raise ConfigError(f"{source}: text_config = {cut(repr(text))} must be an object")
    above = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    return {**above, **text}
