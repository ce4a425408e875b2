"""The commands for key pairs: `keys new`."""

from pathlib import Path

import click

from edge_runtime.commands.shared import example, say, topology_option
from edge_runtime.config import resolve_topology_path
from topology.files import read_cluster


@click.group(epilog=example("edge-runtime keys new --topology topology.toml"))
def keys() -> None:
    """Make the keys with which machines recognise one another."""


@keys.command("new", epilog=example("edge-runtime keys new", "edge-runtime keys new laptop"))
@click.argument("names", nargs=-1)
@topology_option
@click.option(
    "--folder", type=click.Path(path_type=Path), default=None, help="Where to; default: the file's `keys`."
)
def keys_new(names: tuple[str, ...], topology: Path | None, folder: Path | None) -> None:
    """Make a key pair for each of NAMES; without NAMES for coordinator, client and every node of the file."""
    from edge_runtime.transport.keys import new_keys

    is_unused = False
    if not names or folder is None:
        cluster = read_cluster(resolve_topology_path(topology), needs_model=False)
        is_unused = cluster.keys is None
        names = names or ("coordinator", "client", *cluster.node_names)
        folder = folder or Path(cluster.keys or Path(cluster.source).parent / "keys")
    for path in new_keys(folder, names):
        click.echo(str(path))
    say("copy *.key to every machine; NAME.key_secret belongs on NAME's machine alone")
    if is_unused:
        say(f'they are not used yet: write keys = "{folder.name}" in [cluster] of {cluster.source}')
