"""What several commands share: options, lines for the person, the way to a running cluster."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edge_runtime.clock import SystemClock
from edge_runtime.config import SHAPE_VARIABLE, last_good_text, remember_good
from edge_runtime.errors import DeadlinePassed
from kernels.settings import COMPILE_VARIABLE
from topology.cluster import Cluster
from topology.errors import TopologyError
from topology.files import read_cluster, read_cluster_text

if TYPE_CHECKING:
    from edge_runtime.client import Client
    from edge_runtime.transport.keys import Keys

CONNECT_S = 5.0
QUIET_S = 2.0  # a longer wait says what it waits for

topology_option = click.option(
    "--topology",
    "topology",
    type=click.Path(path_type=Path),
    default=None,
    help="Topology file; else $EDGE_RUNTIME_TOPOLOGY, else ./topology.toml.",
)
shape_option = click.option(
    "--shape",
    is_flag=True,
    envvar=SHAPE_VARIABLE,
    help="Give the links between nodes the `rtt` and `bandwidth` of the file; all of it must be this machine.",
)
compile_option = click.option(
    "--compile",
    "compiles",
    is_flag=True,
    envvar=COMPILE_VARIABLE,
    help="Compile what decode steps repeat, where kernels are plain torch; others say that they need none.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")


T = TypeVar("T")


class Finite(click.FloatRange):
    """A number of the command line. click's own types let NaN through every range, and infinity where one end is open."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """A float, or a usage error that says what was found."""
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return float(super().convert(value, param, ctx))


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def parsed(option: str, parse: Callable[[str], T], text: str) -> T:
    """What an option's text stands for; a text that stands for nothing is told with the option's name."""
    try:
        return parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'{option}'") from error


def say(line: str) -> None:
    """A line for the person, beside the answer on standard output."""
    click.echo(line, err=True)


def running_cluster(path: Path) -> Cluster:
    """What is needed to reach a cluster that runs: from its file, or from the file as it was if it has faults by now."""
    try:
        return read_cluster(path, needs_model=False)
    except TopologyError as error:
        text = last_good_text(path)
        if text is None:
            raise
        say(f"{error}\nthe file as it was when the cluster was started or last changed is used instead")
        return read_cluster_text(text, path, needs_model=False)


def remember(path: Path) -> None:
    """Keep the file that the cluster runs by; where that cannot be, commands need the file without faults."""
    with contextlib.suppress(OSError):
        remember_good(path, path.read_text(encoding="utf-8-sig"))


def keys_of(cluster: Cluster, name: str) -> "Keys | None":
    """The key pair of `name` and the keys it lets in; None where the cluster has no keys."""
    from edge_runtime.transport.keys import load_keys

    return load_keys(Path(cluster.keys), name) if cluster.keys else None


def shape_links(shape: bool, cluster: Cluster, name: str) -> None:
    """Before the daemon opens its sockets."""
    if shape:
        from edge_runtime.transport.shaping import shape_this_process

        shape_this_process(cluster, name, SystemClock())


def open_client(cluster: Cluster) -> "Client":
    """A client of the cluster that has not connected yet."""
    from edge_runtime.client import Client

    return Client(cluster.coordinator, keys_of(cluster, "client"), SystemClock(), cluster.name)


def connect(client: "Client") -> None:
    """Greet the coordinator; a wait for it is shown after 2 s and over after 5."""
    try:
        client.connect(QUIET_S)
    except DeadlinePassed:
        say(f"waiting for the coordinator at {client.address}")
        client.connect(CONNECT_S - QUIET_S)
