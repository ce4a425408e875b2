"""Read a topology file from disk and look for the folders it names: all that the package touches."""

import re
from pathlib import Path

from topology.cluster import Cluster
from topology.errors import ClusterFileError, Fault, TopologyError
from topology.parse import parse_cluster

HUB = "hub:"
"""What a cluster's `model` begins with if it is one of the hub and no folder."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


def read_cluster(path: str | Path, *, needs_model: bool = True) -> Cluster:
    """The cluster that a file describes, its folders as absolute paths.

    needs_model  whether a model's folder that is not on this machine is a fault

    Raises `ClusterFileError` with every fault of the file, or `TopologyError` if it cannot be read at all.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        hint = "; write one, or name it with --topology" if isinstance(error, FileNotFoundError) else ""
        raise TopologyError(f"cannot read the topology file {path}: {error.strerror}{hint}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ClusterFileError(str(path), [Fault(line, "", "not UTF-8 text, as TOML has to be")]) from error

    return read_cluster_text(text, path, needs_model=needs_model)


def read_cluster_text(text: str, path: Path, *, needs_model: bool = True) -> Cluster:
    """The cluster that the text of a file at `path` describes; raises as `read_cluster` does."""
    try:
        base = path.resolve().parent
    except (ValueError, OSError) as error:  # a name no file can have
        raise TopologyError(f"{str(path)!r:.200} is not the path of a file: {error}") from error
    return parse_cluster(
        text,
        source=str(path),
        find_model=lambda model: _find_model(base, model, needs_model),
        find_folder=lambda folder: str(_absolute(base, folder)),
    )


def _absolute(base: Path, folder: str) -> Path:
    return (base / Path(folder).expanduser()).resolve()


def _find_model(base: Path, model: str, is_needed: bool) -> str:
    """The folder, or `hub:` and an id: `org/name` is the hub's where no such folder is."""
    if model.startswith(HUB):
        if not _HUB_ID.fullmatch(model.removeprefix(HUB)):
            raise ValueError(f'"{model}" is no model of the hub: write hub:org/name')
        return model
    absolute = _absolute(base, model)
    try:
        # `models/mine` beside a folder `models` is a folder that is missing, and not the hub's.
        if absolute.exists() or absolute.parent.is_dir() or not _HUB_ID.fullmatch(model):
            if is_needed:
                _refuse_other_folder(absolute, model)
            return str(absolute)
    except OSError as error:  # no right to look, a name too long
        if is_needed:
            raise ValueError(f"{absolute} cannot be looked into: {error.strerror}") from error
        return str(absolute)
    return HUB + model


def _refuse_other_folder(absolute: Path, folder: str) -> None:
    if not absolute.is_dir():
        is_absolute = Path(folder).expanduser().is_absolute()
        how = "" if is_absolute else f'; "{folder}" is taken relative to the topology file'
        raise ValueError(f"there is no folder {absolute}{how}")
    if not (absolute / "config.json").is_file():
        raise ValueError(f"{absolute} holds no config.json, so it is not a model's folder")
