"""Read a topology file from disk and look for the folders it names: all that the package touches."""

from pathlib import Path

from topology.cluster import Cluster
from topology.errors import ClusterFileError, Fault, TopologyError
from topology.parse import parse_cluster


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a file describes, its folders as absolute paths.

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

    return read_cluster_text(text, path)


def read_cluster_text(text: str, path: Path) -> Cluster:
    """The cluster that the text of a file at `path` describes; raises as `read_cluster` does."""
    try:
        base = path.resolve().parent
    except (ValueError, OSError) as error:  # a name no file can have
        raise TopologyError(f"{str(path)!r:.200} is not the path of a file: {error}") from error
    return parse_cluster(
        text,
        source=str(path),
        find_model=lambda folder: _model_folder(base, folder),
        find_folder=lambda folder: str(_absolute(base, folder)),
    )


def _absolute(base: Path, folder: str) -> Path:
    return (base / Path(folder).expanduser()).resolve()


def _model_folder(base: Path, folder: str) -> str:
    absolute = _absolute(base, folder)
    if not absolute.is_dir():
        raise ValueError(f'there is no folder {absolute}; "{folder}" is taken relative to the topology file')
    if not (absolute / "config.json").is_file():
        raise ValueError(f"{absolute} holds no config.json, so it is not a model's folder")
    return str(absolute)
