"""Reads one JSON object of a model folder; what is wrong with the file is the user's fault and named."""

import json
from pathlib import Path
from typing import Any

from edge_runtime.errors import CheckpointError


def kind_of(value: object) -> str:
    """What a value of JSON is, in a reader's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that must be there."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: {path.parent} is not a whole model folder") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {kind_of(value)}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    return read_json(path) if path.exists() else {}
