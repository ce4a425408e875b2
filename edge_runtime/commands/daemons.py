"""Commands that run daemons: `up`, `down`, `node`, `coordinator`."""

import hashlib
import logging
import os
import secrets
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.clock import SystemClock
from edge_runtime.commands.shared import (
    compile_option,
    connect,
    example,
    keys_of,
    open_client,
    remember,
    running_cluster,
    say,
    shape_links,
    shape_option,
    topology_option,
)
from edge_runtime.config import (
    SHAPE_VARIABLE,
    read_snapshot,
    resolve_topology_path,
    state_dir,
    write_snapshot,
)
from edge_runtime.errors import ConfigError
from edge_runtime.log import setup_logging
from kernels.settings import COMPILE_VARIABLE
from topology.cluster import find_node
from topology.files import HUB, read_cluster

if TYPE_CHECKING:
    from edge_runtime.coordinator.epochs import Epochs

READY_S = 300.0


@click.command(epilog=example("edge-runtime up --topology testbed/scenarios/eight_nodes.toml --detach"))
@topology_option
@shape_option
@compile_option
@click.option(
    "--limits",
    is_flag=True,
    help="Hold each process to the `memory` and `cpu_share` of the file, by control group where that is allowed.",
)
@click.option("--detach", is_flag=True, help="Return when all nodes are ready; `down` stops them.")
@click.option(
    "--wait", "wait_s", default=READY_S, show_default=True, help="Seconds until all nodes must be ready."
)
def up(topology: Path | None, shape: bool, compiles: bool, limits: bool, detach: bool, wait_s: float) -> None:
    """Start the coordinator and every node of the file on this machine."""
    from edge_runtime import launch

    path = resolve_topology_path(topology)
    cluster = read_cluster(path)
    if shape:
        from edge_runtime.transport.shaping import cluster_shaper

        cluster_shaper(cluster, launch.COORDINATOR)  # a file that cannot be shaped is refused here, once
        os.environ[SHAPE_VARIABLE] = "1"  # for the daemons
    if compiles:
        os.environ[COMPILE_VARIABLE] = "1"
    if cluster.keys:
        from edge_runtime.transport.keys import refuse_missing

        # here, together: each daemon would end on its own
        refuse_missing(Path(cluster.keys), (launch.COORDINATOR, "client", *cluster.node_names))
    clock = SystemClock()
    if cluster.model.startswith(HUB):
        from edge_runtime.weights.locate import check_model

        check_model(cluster, say)  # once, here, where a person sees how far it is
    say(
        f"cluster {cluster.name}: {len(cluster.nodes)} nodes, model {cluster.model}, logs in {state_dir(path)}"
    )
    _interrupt_on(signal.SIGTERM, signal.SIGHUP)
    local = launch.start_local(cluster, path, limited=say if limits else None, report=say)
    is_serving = False
    try:
        launch.wait_ready(local, lambda: open_client(cluster), clock, wait_s, say)
        say(
            f"ready: {len(cluster.nodes)} nodes; try: edge-runtime submit --topology {path} 'Once upon a time'"
        )
        is_serving = True
        if not detach:
            say("stop with Ctrl-C")
            launch.watch(local, clock, say)
    except KeyboardInterrupt:
        if not is_serving:
            raise
    finally:
        if not (detach and is_serving):
            _ignore(
                signal.SIGTERM, signal.SIGHUP, signal.SIGINT
            )  # a second one must not leave half of it running
            launch.stop_local(path, clock, say)
            say("stopped")


@click.command(epilog=example("edge-runtime down --topology testbed/scenarios/eight_nodes.toml"))
@topology_option
def down(topology: Path | None) -> None:
    """Stop what `up` started; nothing of it is left afterwards."""
    from edge_runtime import launch

    path = resolve_topology_path(topology)
    stopped = launch.stop_local(path, SystemClock(), say)
    say(f"stopped {', '.join(stopped)}" if stopped else f"nothing of {path} runs here")


@click.command(
    epilog=example(
        "edge-runtime node desk --topology topology.toml",
        "edge-runtime node drain attic --topology topology.toml",
    )
)
@click.argument("words", nargs=-1, required=True, metavar="NAME | drain NAME")
@topology_option
@shape_option
@compile_option
def node(words: tuple[str, ...], topology: Path | None, shape: bool, compiles: bool) -> None:
    """Run this machine's daemon, or drain a node of a cluster that runs.

    \b
    node NAME        run the daemon of the node NAME of the topology file, here
    node drain NAME  move the requests and experts of NAME, wherever it runs, to the
                     other nodes, then let its daemon stop; refused if they have no
                     room, and then nothing has changed
    """
    if len(words) > 2 or (len(words) == 2 and words[0] != "drain"):
        raise click.UsageError(f"{' '.join(words)!r} is neither NAME nor `drain NAME`")
    path = resolve_topology_path(topology)
    if len(words) == 2:
        _drain(words[1], path)
    else:
        _run_node(words[0], path, shape, compiles)


def _run_node(name: str, path: Path, shape: bool, compiles: bool) -> None:
    cluster = read_cluster(path, needs_model=False)
    mine = find_node(cluster, name)
    setup_logging(name)
    keys = keys_of(cluster, name)
    shape_links(shape, cluster, name)
    from edge_runtime.launch import leave_record
    from edge_runtime.node.daemon import NodeDaemon
    from edge_runtime.weights.locate import located, model_for_node
    from kernels import backends, replay
    from kernels.settings import SettingError, checked_threads

    if compiles:
        os.environ[COMPILE_VARIABLE] = "1"
    try:
        checked_threads(mine.threads)
        backends.use_device(mine.device)
        replay.recorder()
    except SettingError as error:
        raise ConfigError(f"{path}: node {name}, {error}") from None
    if needless := replay.why_not_compiled():
        logging.getLogger(__name__).info("%s", needless)
    clock = SystemClock()
    checkpoint, cache = model_for_node(cluster, mine, keys, clock)
    daemon = NodeDaemon(located(cluster, checkpoint), mine, checkpoint, keys, clock, cache)
    _stop_on_signal(daemon)
    leave_record(path, name)
    daemon.run()


def _drain(name: str, path: Path) -> None:
    from edge_runtime import changes, launch

    clock = SystemClock()
    with open_client(running_cluster(path)) as client:
        connect(client)
        back = partial(changes.come_back, client, clock, say)
        epoch = changes.begin(lambda: client.drain(name), clock, say, back)
        click.echo(changes.follow(client, epoch, clock, say, lambda: None, back))
    launch.await_end(state_dir(path), [name], clock, say)


@click.command(epilog=example("edge-runtime coordinator --topology topology.toml"))
@topology_option
@shape_option
def coordinator(topology: Path | None, shape: bool) -> None:
    """Run the coordinator of the topology file.

    Stopped, it leaves running answers to their nodes; started again within a minute, it brings them to their clients.
    """
    path = resolve_topology_path(topology)
    cluster = read_cluster(path)
    setup_logging("coordinator")
    keys = keys_of(cluster, "coordinator")
    shape_links(shape, cluster, "coordinator")
    from edge_runtime.coordinator.daemon import CoordinatorDaemon
    from edge_runtime.coordinator.deploy import Plan, plan_for
    from edge_runtime.coordinator.learned_routes import find_learned, sizes_of
    from edge_runtime.coordinator.snapshot import (
        decode_snapshot,
        encode_snapshot,
        plan_to_go_on_with,
        snapshot_of,
    )
    from edge_runtime.coordinator.traffic_book import TrafficBook
    from edge_runtime.launch import COORDINATOR, END_CLUSTER, leave_record
    from edge_runtime.weights.locate import located, open_model
    from edge_runtime.weights.stores import FullFolder

    checkpoint = open_model(cluster, say)
    parts = sizes_of(located(cluster, checkpoint), checkpoint)
    traits, routes = find_learned(
        located(cluster, checkpoint), parts, checkpoint.model_hash, seed=secrets.randbits(63)
    )
    content = read_snapshot(path)
    before = decode_snapshot(content) if content is not None else None
    found, why = plan_to_go_on_with(
        before, cluster, checkpoint.model_hash, _hash_of(path), parts.context_tokens
    )
    if why:
        say(why)
    if before is not None and before.model_hash == checkpoint.model_hash:
        routes.traffic = TrafficBook(before.requests)
    epoch = before.newest + 1 if before is not None else 1
    plan = found or Plan(
        cluster,
        plan_for(cluster, parts, cluster.node_names, traits=traits, joint=routes.joint, epoch=epoch),
    )

    def keep(where: "Epochs") -> None:
        counts = routes.traffic.counts
        snapshot = snapshot_of(where, checkpoint.model_hash, _hash_of(path), counts)
        write_snapshot(path, encode_snapshot(snapshot))

    daemon = CoordinatorDaemon(
        plan.cluster,
        parts,
        plan.placement,
        model_hash=checkpoint.model_hash,
        before=before,
        keep=keep,
        traits=traits,
        routes=routes,
        keys=keys,
        clock=SystemClock(),
        weights=FullFolder(checkpoint),
    )
    _stop_on_signal(daemon)
    signal.signal(END_CLUSTER, lambda *_: daemon.end())
    leave_record(path, COORDINATOR)
    remember(path)
    daemon.run()


def _hash_of(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _interrupt_on(*numbers: signal.Signals) -> None:
    """Let these signals do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, interrupt)


def _ignore(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _stop_on_signal(daemon: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())
