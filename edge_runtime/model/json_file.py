"""Reads one JSON object of a model folder; what is wrong with the file is the user's fault and named.

Knows also what stands in a file's place where a download or a copy went wrong.
"""

import json
import stat
from pathlib import Path
from typing import Any

from edge_runtime.errors import CheckpointError
from topology.errors import why_unread

LFS_POINTER = b"version https://git-lfs.github.com/"
MAX_BYTES = 256 << 20  # the largest met, tokenizers, have 35 MB
PAGE_BEGINS = (b"<!doctype", b"<html")


def size_of(path: Path) -> int:
    """Bytes of a file; CheckpointError for what is none, such as a pipe, from which reading would never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no file; put the file of the model there")
    return found.st_size


def refuse_stand_in(path: Path, begins: bytes) -> None:
    """CheckpointError where a file does not hold what it is called, by its first bytes."""
    if not begins:
        raise CheckpointError(f"{path} is empty; copy the file again")
    if begins.startswith(LFS_POINTER):
        raise CheckpointError(
            f"{path} is a git-LFS pointer and not the file that it stands for; run `git lfs pull` in its folder, or "
            "download the file"
        )
    if begins.lstrip().lower().startswith(PAGE_BEGINS):
        raise CheckpointError(
            f"{path} is a web page, probably of a download that was refused; download the file again"
        )


def kind_of(value: object) -> str:
    """What a value of JSON is, in a reader's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that must be there."""
    try:
        if (num_bytes := size_of(path)) > MAX_BYTES:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes, expected at most {MAX_BYTES} of JSON; copy the file again"
            )
        content = path.read_bytes()
        refuse_stand_in(path, content)
        value = json.loads(content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: {path.parent} is not a whole model folder; copy all files of the model"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not JSON that can be read: {why_unread(error)}; copy the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {kind_of(value)}; copy the file again")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    return read_json(path) if path.exists() else {}
