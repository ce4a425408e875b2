"""Reads a `config.json` key by key: what is missing or wrong is an error naming key and value. Knows no family.

A reader remembers which keys were asked for, so that a key nobody understands is noticed instead of ignored.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from edge_runtime.errors import ConfigError, cut
from edge_runtime.model.rope import yarn_attention_factor
from edge_runtime.model.spec import RopeSpec

log = logging.getLogger(__name__)


class Quantisation(NamedTuple):
    """How weight matrices are stored if not as plain numbers."""

    method: str = "none"
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share one scale (fp8)."""


# Keys of quantization_config beside the method: the values that are run, or None for keys that only name modules, since
# a tensor's dtype says how it is stored, or that mean something to whoever quantises.
QUANTISATION_KEYS: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "fp8": {
        "quant_method": None,
        "weight_block_size": None,
        "modules_to_not_convert": None,
        "ignored_layers": None,
        "dequantize": None,
        "activation_scheme": ("dynamic",),
        "fmt": ("e4m3",),
        "scale_fmt": ("float",),
        "expert_dtype": ("fp8",),
    },
    "mxfp4": {"quant_method": None, "modules_to_not_convert": None, "dequantize": None},
}

MEND = "copy the file again, or add what the model was trained with"
MOST_PARTS = 4096  # layers, and experts of a layer
MOST_EXPERTS = 2**16  # of all layers: the largest published have 30,000, and a name is made for each
LEAST_NUMBER, LARGEST_NUMBER = 1e-37, 1e37  # about what float32 holds, in which all of them are used
MOST = 2**24  # any other count; contexts of ten million tokens are the largest met

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
        """A whole number of at least `at_least`, and no larger than any model's: names are made for each layer and expert."""
        value = self._get(key)
        value = default if value is None else value
        if value is None:
            raise self.fault(key, None, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.fault(key, value, f"must be a whole number of at least {at_least}")
        at_most = MOST_PARTS if "layers" in key or "experts" in key else MOST
        if value > at_most:
            raise self.fault(key, value, f"must be at most {at_most}")
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
        """One of the values the code can run; `null` is none of them."""
        value = self._get(key)
        if value is None and key in self._config:
            raise self.fault(
                key, None, f"= null is not supported, only {' or '.join(map(repr, allowed))}; {MEND}"
            )
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

    def ignore(self, *keys: str) -> None:
        """Keys that mean nothing beside the others."""
        self._read.update(keys)

    def heads(self, *, default_kv_heads: int | None = None) -> tuple[int, int]:
        """Query heads and key/value heads; as many of these as of those if the config does not say."""
        num_heads = self.count("num_attention_heads")
        num_kv_heads = self.count("num_key_value_heads", default=default_kv_heads or num_heads)
        if num_heads % num_kv_heads:
            raise self.fault("num_key_value_heads", num_kv_heads, f"does not divide {num_heads} heads")
        return num_heads, num_kv_heads

    def experts(
        self,
        key: str,
        top_k_key: str,
        *,
        default: int | None = None,
        default_top_k: int | None = None,
        at_least: int = 1,
    ) -> tuple[int, int]:
        """Experts of a layer and how many of them a token takes."""
        num_experts = self.count(key, default=default, at_least=at_least)
        top_k = self.count(top_k_key, default=default_top_k)
        if num_experts and top_k > num_experts:
            raise self.fault(top_k_key, top_k, f"is more than the {num_experts} experts of a layer")
        return num_experts, top_k

    def sparse_layers(self, num_layers: int) -> list[bool]:
        """Which layers have experts by `mlp_only_layers` and `decoder_sparse_step`."""
        dense_only = self.layer_indices("mlp_only_layers", num_layers)
        every = self.count("decoder_sparse_step", default=1)
        return [i not in dense_only and (i + 1) % every == 0 for i in range(num_layers)]

    def layer_types(self, num_layers: int, default: Sequence[str]) -> list[str]:
        """`sliding_attention` or `full_attention` for each layer."""
        value = self._get("layer_types")
        value = list(default) if value is None else value
        known = ("full_attention", "sliding_attention")
        if (
            not isinstance(value, list)
            or len(value) != num_layers
            or any(kind not in known for kind in value)
        ):
            raise self.fault("layer_types", value, f"must have {' or '.join(known)} for {num_layers} layers")
        return value

    def layer_settings(
        self, key: str, known: Collection[str], num_layers: int
    ) -> dict[int, dict[str, int]] | None:
        """An object of layer index -> counts that differ there; None if the key is absent."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(each, Mapping) for each in value.values()):
            raise self.fault(key, value, "must be an object of layer index to settings")
        layers = {str(index): index for index in range(num_layers)}
        found = {}
        for index, settings in value.items():
            if index not in layers:
                raise self.fault(key, value, f"names a layer outside 0 to {num_layers - 1}")
            for name, number in settings.items():
                if name not in known or type(number) is not int or not 1 <= number <= MOST:
                    raise self.fault(f"{key}.{index}.{name}", number, "is not supported")
            found[layers[index]] = dict(settings)
        return found

    @property
    def quantisation_method(self) -> str | None:
        """`quantization_config.quant_method` as it stands."""
        settings = self._get("quantization_config")
        return settings.get("quant_method") if isinstance(settings, Mapping) else None

    def window(self, context_tokens: int, *, default: int = 4096) -> int | None:
        """`sliding_window`; None if it is as long as the context and hides nothing."""
        window = self.count("sliding_window", default=default)
        return window if window < context_tokens else None

    def rope(
        self,
        context_tokens: int,
        *,
        default_theta: float = 10_000.0,
        default: Mapping[str, Any] | None = None,
        interleaved: bool = False,
    ) -> RopeSpec:
        """The rope settings in any of their three spellings.

        `rope_theta` at the top, a `rope_scaling` dict beside it, or one `rope_parameters` dict with all. A theta
        inside the dict wins over the one at the top, `rope_scaling` over `rope_parameters`, as in transformers.

        context_tokens   the model's own limit
        default          the dict of a config that has none
        """
        key, settings = self.rope_settings(default)
        if self.has("rope_theta"):
            default_theta = self.number("rope_theta")
        original = self._get("original_max_position_embeddings")
        return self.rope_of(
            key,
            {**settings, "original_max_position_embeddings": original} if original is not None else settings,
            context_tokens,
            default_theta=default_theta,
            interleaved=interleaved,
        )

    def rope_settings(self, default: Mapping[str, Any] | None = None) -> tuple[str, Mapping[str, Any]]:
        """Name and content of the dict with the rope settings."""
        for key in ("rope_scaling", "rope_parameters"):
            if not isinstance(self._get(key) or {}, Mapping):
                raise self.fault(key, self._get(key), "must be an object")
        key = "rope_scaling" if self._get("rope_scaling") else "rope_parameters"
        return key, self._get(key) or default or {}

    def rope_of(
        self,
        key: str,
        settings: Mapping[str, Any],
        context_tokens: int,
        *,
        default_theta: float,
        interleaved: bool = False,
    ) -> RopeSpec:
        """The rope settings of one dict."""
        values = _Settings(self, key, settings)
        kind = values.get("rope_type", values.get("type", "default"))
        share = values.get("partial_rotary_factor", self._get("partial_rotary_factor"))
        theta = values.number("rope_theta", default_theta, above=1)
        found = RopeSpec(theta=theta, interleaved=interleaved)
        if kind == "proportional":
            share = 1.0 if share is None else share
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise self.fault(f"{key}.partial_rotary_factor", share, "must be above 0 and at most 1")
            changes = {"rotary_share": float(share), "factor": values.number("factor", 1.0)}
        else:
            if share not in (None, 1, 1.0):
                where = key + "." if values.get("partial_rotary_factor") is not None else ""
                raise self.fault(f"{where}partial_rotary_factor", share, "is not supported, only 1.0")
            if not isinstance(kind, str) or kind not in ROPE_READERS:
                kinds = ", ".join(map(repr, [*ROPE_READERS, "proportional"]))
                raise self.fault(f"{key}.rope_type", kind, f"is not supported, only {kinds}")
            changes = ROPE_READERS[kind](values, context_tokens)
        values.finish()
        kind = "default" if kind == "dynamic" else kind
        return msgspec.structs.replace(found, kind=kind, **changes)

    def finish(self, quantisations: Collection[str] = ("fp8",)) -> Quantisation:
        """Read how weights are quantised, and warn of keys that nothing read.

        quantisations   the methods that this family's checkpoints may have
        """
        found = self._quantisation(quantisations)
        for key in sorted(set(self._config) - self._read - HARMLESS_KEYS):
            if self._config[key] not in (None, False, [], {}):
                log.warning(
                    "%s: key %s = %r is not known and has no effect", self.source, key, self._config[key]
                )
        return found

    def _quantisation(self, allowed: Collection[str]) -> Quantisation:
        settings = self._get("quantization_config")
        if not settings:
            return Quantisation()
        if not isinstance(settings, Mapping):
            raise self.fault("quantization_config", settings, "must be an object")
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in allowed:
            known = ", ".join(map(repr, allowed))
            raise self.fault("quantization_config.quant_method", method, f"is not supported, only {known}")
        known_keys = QUANTISATION_KEYS[method]
        for key, value in settings.items():
            run = known_keys.get(key)
            if run is not None and value not in run:
                wanted = " or ".join(map(repr, run))
                raise self.fault(f"quantization_config.{key}", value, f"is not supported, only {wanted}")
            if key not in known_keys and value not in (None, False, [], {}):
                raise self.fault(f"quantization_config.{key}", value, "is not known")
        if method != "fp8":
            return Quantisation(method)
        block = settings.get("weight_block_size")
        if block is None:
            raise self.fault(
                "quantization_config.weight_block_size",
                None,
                f"is missing, expected the rows and columns that share a scale, such as [128, 128]; {MEND}",
            )
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise self.fault(
                "quantization_config.weight_block_size", block, "is not supported, only two whole numbers"
            )
        return Quantisation("fp8", (block[0], block[1]))

    def fault(self, key: str, value: Any, what: str) -> ConfigError:
        """The error for one key."""
        shown = "" if value is None else f" = {cut(repr(value))}"
        return ConfigError(f"{self.source}: {cut(key)}{shown} {what}")


def _positive(reader: ConfigReader, key: str, value: Any, default: float | None) -> float:
    value = default if value is None else value
    if value is None:
        raise reader.fault(key, None, f"is missing, expected a number above 0; {MEND}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise reader.fault(key, value, "must be a number above 0")
    if not LEAST_NUMBER <= value <= LARGEST_NUMBER:
        raise reader.fault(key, value, f"must be between {LEAST_NUMBER} and {LARGEST_NUMBER}")
    return float(value)


class _Settings:
    """The keys of one dict of rope settings."""

    def __init__(self, reader: ConfigReader, key: str, values: Mapping[str, Any]) -> None:
        self._reader = reader
        self._key = key
        self._values = values
        self._read = {"rope_type", "type"}

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = _positive(self._reader, f"{self._key}.{name}", self.get(name), default)
        if value <= above:
            raise self._reader.fault(f"{self._key}.{name}", value, f"must be a number above {above:g}")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number, which some write with a point."""
        value = self.number(name, default)
        if not value.is_integer() or not 1 <= value <= MOST:
            raise self._reader.fault(f"{self._key}.{name}", value, f"must be a whole number from 1 to {MOST}")
        return int(value)

    def scale(self, name: str) -> float:
        """A number above 0, or 0 for none."""
        value = self.get(name)
        return 0.0 if value is None or (value == 0 and value is not False) else self.number(name)

    def is_null(self, name: str) -> bool:
        return name in self._values and self._values[name] is None

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._reader.fault(f"{self._key}.{name}", value, "must be true or false")
        return value

    def neutral(self, name: str, *allowed: Any) -> None:
        """Refuse a value that would mean something, which it does not with this rope type."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise self._reader.fault(f"{self._key}.{name}", value, "is not supported with this rope_type")

    def finish(self) -> None:
        for name in sorted(set(self._values) - self._read):
            if self._values[name] is not None:
                raise self._reader.fault(f"{self._key}.{name}", self._values[name], "is not supported")


def _default_rope(values: _Settings, context_tokens: int) -> dict[str, Any]:
    values.neutral("factor", 1, 1.0)
    return {}


def _dynamic_rope(values: _Settings, context_tokens: int) -> dict[str, Any]:
    """Within the model's own context, which no sequence here leaves, dynamic scaling changes nothing."""
    values.number("factor")
    values.get("original_max_position_embeddings")
    return {}


def _linear_rope(values: _Settings, context_tokens: int) -> dict[str, Any]:
    return {"factor": values.number("factor")}


def _yarn_rope(values: _Settings, context_tokens: int) -> dict[str, Any]:
    original = values.count("original_max_position_embeddings", context_tokens)
    # As transformers has it: a factor that is null, not one that is missing, is the ratio of both contexts.
    by_ratio = values.is_null("factor") and values.get("original_max_position_embeddings") is not None
    factor = values.number("factor", context_tokens / original if by_ratio else None)
    mscale, mscale_all = values.scale("mscale"), values.scale("mscale_all_dim")
    if mscale and mscale_all:
        inferred = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all)
    else:
        inferred = yarn_attention_factor(factor)
    beta_slow = values.number("beta_slow", 1.0)
    return {
        "factor": factor,
        "attention_factor": values.number("attention_factor", inferred),
        "original_context_tokens": original,
        "beta_fast": values.number("beta_fast", 32.0, above=beta_slow),
        "beta_slow": beta_slow,
        "truncate": values.flag("truncate", True),
    }


def _llama3_rope(values: _Settings, context_tokens: int) -> dict[str, Any]:
    low = values.number("low_freq_factor")
    return {
        "factor": values.number("factor"),
        "original_context_tokens": values.count("original_max_position_embeddings", context_tokens),
        "low_freq_factor": low,
        "high_freq_factor": values.number("high_freq_factor", above=low),
    }


ROPE_READERS: dict[str, Callable[[_Settings, int], dict[str, Any]]] = {
    "default": _default_rope,
    "dynamic": _dynamic_rope,
    "linear": _linear_rope,
    "llama3": _llama3_rope,
    "yarn": _yarn_rope,
}
