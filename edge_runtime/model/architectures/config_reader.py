"""Reads a `config.json` key by key: what is missing or wrong is an error naming key and value. Knows no family.

A reader remembers which keys were asked for, so that a key nobody understands is noticed instead of ignored.
"""

import logging
from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import ConfigError
from edge_runtime.model.spec import RopeSpec

log = logging.getLogger(__name__)

# Keys that say nothing about the arithmetic: training, bookkeeping of transformers, hints for generation, tokens.
HARMLESS_KEYS = frozenset(
    "_attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures "
    "attention_dropout attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample "
    "early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder "
    "is_encoder_decoder label2id length_penalty max_length min_length model_type no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states "
    "output_router_logits output_scores pad_token_id prefix problem_type remove_invalid_values "
    "repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class "
    "top_k top_p torch_dtype dtype torchscript transformers_version typical_p use_bfloat16 use_cache".split()
)


class ConfigReader:
    """The keys of one config, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any], source: str = "config.json") -> None:
        self.source = source
        self._config = config
        self._read: set[str] = set()

    def _get(self, key: str) -> Any:
        self._read.add(key)
        return self._config.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._get(key) is not None

    def count(self, key: str, *, default: int | None = None, at_least: int = 1) -> int:
        """A whole number of at least `at_least`."""
        value = self._get(key)
        value = default if value is None else value
        if value is None:
            raise self.fault(key, None, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.fault(key, value, f"must be a whole number of at least {at_least}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """A number above 0."""
        return _positive(self, key, self._get(key), default)

    def flag(self, key: str, *, default: bool) -> bool:
        """true or false."""
        value = self._get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(key, value, "must be true or false")
        return value

    def choice(self, key: str, *allowed: str, default: str | None = None) -> str:
        """One of the values the code can run."""
        value = self._get(key)
        value = default if value is None else value
        if value not in allowed:
            raise self.fault(key, value, f"is not supported, only {' or '.join(map(repr, allowed))}")
        return value

    def layer_indices(self, key: str, num_layers: int) -> frozenset[int]:
        """A list of layer indices, empty if the key is absent."""
        value = self._get(key) or []
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise self.fault(key, value, "must be a list of layer indices")
        if any(not 0 <= i < num_layers for i in value):
            raise self.fault(key, value, f"names a layer outside 0 to {num_layers - 1}")
        return frozenset(value)

    def absent(self, key: str, *neutral: Any) -> None:
        """Refuse the key unless it is absent, null or a value that changes nothing."""
        value = self._get(key)
        if value is not None and value not in neutral:
            raise self.fault(key, value, "is not supported")

    def rope(self, *, default_theta: float = 10_000.0) -> RopeSpec:
        """The rope settings in any of their three spellings.

        `rope_theta` at the top, a `rope_scaling` dict beside it, or one `rope_parameters` dict with all. A theta
        inside the dict wins over the one at the top, `rope_scaling` over `rope_parameters`, as in transformers.
        """
        for key in ("rope_scaling", "rope_parameters"):
            if not isinstance(self._get(key) or {}, Mapping):
                raise self.fault(key, self._get(key), "must be an object")
        key = "rope_scaling" if self._get("rope_scaling") else "rope_parameters"
        nested = self._get(key) or {}
        kind = nested.get("rope_type", nested.get("type", "default"))
        if kind != "default":
            raise self.fault(f"{key}.rope_type", kind, "is not supported, only 'default'")
        share_keys = [(f"{key}.partial_rotary_factor", nested.get("partial_rotary_factor"))]
        share_keys.append(("partial_rotary_factor", self._get("partial_rotary_factor")))
        for name, value in share_keys:
            if value not in (None, 1, 1.0):
                raise self.fault(name, value, "is not supported, only 1.0")
        unknown = set(nested) - {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"}
        if unknown:
            name = min(unknown)
            raise self.fault(f"{key}.{name}", nested[name], "is not supported")
        if nested.get("factor") not in (None, 1, 1.0):
            raise self.fault(f"{key}.factor", nested["factor"], "is not supported with rope_type 'default'")
        self.has("rope_theta")
        if nested.get("rope_theta") is not None:
            return RopeSpec(theta=_positive(self, f"{key}.rope_theta", nested["rope_theta"], None))
        return RopeSpec(theta=self.number("rope_theta", default=default_theta))

    def finish(self) -> None:
        """Refuse a quantised checkpoint and warn of keys that nothing read."""
        if self._get("quantization_config"):
            method = self._config["quantization_config"]
            method = method.get("quant_method", method) if isinstance(method, Mapping) else method
            raise self.fault(
                "quantization_config", method, "is not supported, only bf16, fp16 or fp32 weights"
            )
        for key in sorted(set(self._config) - self._read - HARMLESS_KEYS):
            if self._config[key] not in (None, False, [], {}):
                log.warning(
                    "%s: key %s = %r is not known and has no effect", self.source, key, self._config[key]
                )

    def fault(self, key: str, value: Any, what: str) -> ConfigError:
        """The error for one key."""
        shown = "" if value is None else f" = {value!r}"
        return ConfigError(f"{self.source}: {key}{shown} {what}")


def _positive(reader: ConfigReader, key: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if value is None:
        raise reader.fault(key, None, "is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise reader.fault(key, value, "must be a number above 0")
    return float(value)
