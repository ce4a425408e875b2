"""The families: `model_type` of a config -> its spec and its table of tensors. Everything else is shared."""

from collections.abc import Mapping
from typing import Any

from edge_runtime.errors import ConfigError
from edge_runtime.model.architectures import qwen3_moe
from edge_runtime.model.architectures.config_reader import ConfigReader
from edge_runtime.model.architectures.table import TensorTable
from edge_runtime.model.spec import ModelSpec, unsupported

FAMILIES = {"qwen3_moe": qwen3_moe}


def read_model(config: Mapping[str, Any], source: str = "config.json") -> tuple[ModelSpec, TensorTable]:
    """The spec and the tensor table of a parsed `config.json`; `source` names the file in errors."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"{source}: model_type {family!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    reader = ConfigReader(config, source)
    spec = FAMILIES[family].read_spec(reader)
    reader.finish()
    if faults := unsupported(spec):
        raise ConfigError(f"{source}: this {family} model needs what cannot be run yet: {'; '.join(faults)}")
    return spec, TensorTable(spec, FAMILIES[family].TENSORS)
