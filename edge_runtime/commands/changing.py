"""Commands that foretell and carry out changes: `plan`, `apply`."""

import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_runtime.clock import SystemClock
from edge_runtime.commands.shared import (
    connect,
    example,
    json_option,
    open_client,
    remember,
    running_cluster,
    say,
    topology_option,
)
from edge_runtime.config import TOPOLOGY_VARIABLE, resolve_topology_path, state_dir
from edge_runtime.errors import ClusterError, ConfigError, DeadlinePassed, Refusal
from topology.cluster import Cluster, is_loopback
from topology.errors import TopologyError
from topology.files import read_cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_runtime.coordinator.learned_routes import Learned
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.protocol import Planned
    from topology.costs import ModelFootprint


@click.command(
    epilog=example(
        "edge-runtime plan --topology testbed/scenarios/eight_nodes.toml",
        "edge-runtime plan edited.toml --topology topology.toml",
        "edge-runtime plan edited.toml --from topology.toml",
    )
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@topology_option
@click.option(
    "--from",
    "old",
    type=click.Path(path_type=Path),
    default=None,
    help="With FILE: the topology file to compare it with, instead of a running cluster.",
)
@json_option
def plan(file: Path | None, topology: Path | None, old: Path | None, as_json: bool) -> None:
    """Show what each node will hold, in bytes, and why. Starts nothing.

    With FILE: what that file would change in the running cluster (or in that of another file), and how long it would take.
    """
    if file is None and old is not None:
        raise click.UsageError("--from OLD compares it with FILE, which is missing")
    if file is not None:
        planned = _plan_between(old, file) if old is not None else _plan_running(file, topology)
        click.echo(json.dumps(planned.body) if as_json else planned.text)
        return
    from edge_runtime.coordinator.routes import homes_of
    from edge_runtime.tables import plan_body, plan_table
    from edge_runtime.weights.locate import check_model
    from topology.placement import plan_placement

    cluster = read_cluster(resolve_topology_path(topology))
    parts, (traits, routes) = _known_of(cluster, check_model(cluster, say))
    traits, traffic = routes.joint(homes_of(cluster), traits)
    cores = {node.name: float(os.cpu_count() or 1) for node in cluster.nodes if is_loopback(node.address)}
    placement = plan_placement(cluster, parts, cores=cores, traits=traits, traffic=traffic)
    body = plan_body(cluster, parts, placement, traits, cores)
    click.echo(json.dumps(body) if as_json else plan_table(body))


def _known_of(cluster: Cluster, checkpoint: "Checkpoint") -> "tuple[ModelFootprint, Learned]":
    """What a cluster's model takes, and what calibration found of it; what a node would refuse of that is refused here."""
    from edge_runtime.coordinator.learned_routes import find_learned, sizes_of
    from edge_runtime.node.share import sub_experts_by
    from edge_runtime.weights.locate import located

    found = located(cluster, checkpoint)
    sizes = sizes_of(found, checkpoint)
    learned = find_learned(found, sizes, checkpoint.model_hash)
    sub_experts_by(found, checkpoint)
    return sizes, learned


def _plan_between(old: Path, file: Path) -> "Planned":
    """What one file would change of another, if that one ran as it is."""
    from edge_runtime.coordinator.deploy import Plan, plan_for
    from edge_runtime.coordinator.preview import preview_of
    from edge_runtime.weights.locate import check_model

    before, after = read_cluster(old), read_cluster(file)
    checkpoint = check_model(after, say)
    parts, (traits, routes) = _known_of(before, checkpoint)
    placement = plan_for(before, parts, before.node_names, traits=traits, joint=routes.joint)
    parts, (traits, routes) = _known_of(after, checkpoint)
    placed = plan_for(
        after, parts, after.node_names, placement, placement.epoch + 1, traits, joint=routes.joint
    )
    plan = Plan(after, placed)
    return preview_of(before, placement, before.node_names, plan, parts, traits)


def _plan_running(file: Path, topology: Path | None) -> "Planned":
    cluster = read_cluster(file, needs_model=False)
    running = running_cluster(_running_path(file, topology))
    with open_client(running) as client:
        try:
            connect(client)
        except DeadlinePassed as error:
            raise ClusterError(f"{error}; for a cluster that does not run, give --from OLD") from error
        return _asked(lambda: client.plan(file.read_text(encoding="utf-8-sig"), cluster.source))


def _running_path(file: Path, topology: Path | None) -> Path:
    """The file of the running cluster: the one that was named, else the very file that is to be applied."""
    named = topology is not None or os.environ.get(TOPOLOGY_VARIABLE)
    return resolve_topology_path(topology if named else file)


def _asked(ask: "Callable[[], Planned]") -> "Planned":
    """What is refused for the file's sake is the user's to mend."""
    try:
        return ask()
    except Refusal as refusal:
        if refusal.reason != "topology":
            raise
        raise TopologyError(str(refusal)) from refusal


@click.command(
    epilog=example(
        "edge-runtime apply topology.toml",
        "edge-runtime apply edited.toml --topology topology.toml",
        "edge-runtime apply topology.toml --watch",
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@topology_option
@click.option(
    "--dry-run", is_flag=True, help="Only show what would change, as `edge-runtime plan FILE` does."
)
@click.option("--watch", is_flag=True, help="Apply FILE again after each edit, until Ctrl-C.")
def apply(file: Path, topology: Path | None, dry_run: bool, watch: bool) -> None:
    """Change the running cluster to what FILE says, while it answers.

    The running cluster is that of --topology, else of FILE itself. Where it was started by `up` on this machine, nodes that
    FILE adds are started and those that it removes are stopped. A file that is refused changes nothing.
    """
    from edge_runtime import changes

    file = file.absolute()
    if watch and dry_run:
        raise click.UsageError("--watch and --dry-run exclude each other")
    if watch:
        running = _running_path(file, topology)  # one that is not there is told at once
        say(f"watching {file}; stop with Ctrl-C")
        changes.watch(file, SystemClock(), lambda: _apply(file, running, dry_run=False), say)
    _apply(file, _running_path(file, topology), dry_run=dry_run)


def _apply(file: Path, running: Path, *, dry_run: bool) -> None:
    from edge_runtime import changes, launch

    clock, wanted = SystemClock(), read_cluster(file, needs_model=False)
    text = file.read_text(encoding="utf-8-sig")
    directory = state_dir(running)
    local = launch.LocalCluster(directory, {})
    with open_client(running_cluster(running)) as client:
        connect(client)
        say(_asked(lambda: client.plan(text, str(file))).text)
        if dry_run:
            return
        before = [found["name"] for found in client.status()["nodes"]]
        back = partial(changes.come_back, client, clock, say)
        epoch = changes.begin(lambda: client.apply(text, str(file)), clock, say, back)
        if not epoch:
            click.echo("nothing to change")
            return
        added, why_not = [name for name in wanted.node_names if name not in before], None
        if added and launch.runs_here(directory):
            say(f"starting {', '.join(added)}")
            try:
                local = launch.start_nodes(wanted, added, file, directory, say)
            except (ClusterError, ConfigError) as error:
                why_not = str(error)
            except KeyboardInterrupt:
                client.give_up(epoch, "interrupted")
                raise
        elif added:
            names = ", ".join(added)
            say(f"on the machine of each of {names}, run: edge-runtime node NAME --topology {file}")
        try:
            click.echo(changes.follow(client, epoch, clock, say, lambda: why_not or local.ended_line(), back))
        except ClusterError:
            launch.await_end(directory, list(local.processes), clock, say)
            raise
    removed = [name for name in before if name not in wanted.node_names]
    if stopped := launch.await_end(directory, removed, clock, say):
        say(f"stopped {', '.join(stopped)}")
    if file == running:
        remember(running)
    else:
        say(f"{running} is as it was: `down` and `up` go back to it")
