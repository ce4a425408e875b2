"""Commands that look and change nothing: `status`, `doctor`."""

import json
import sys
from pathlib import Path

import click

from edge_runtime.clock import SystemClock
from edge_runtime.commands.shared import (
    connect,
    example,
    json_option,
    open_client,
    running_cluster,
    topology_option,
)
from edge_runtime.config import resolve_topology_path


@click.command(epilog=example("edge-runtime status", "edge-runtime status --json"))
@topology_option
@json_option
def status(topology: Path | None, as_json: bool) -> None:
    """Show every node: roles, pid, state, memory planned and used."""
    from edge_runtime.tables import status_table

    cluster = running_cluster(resolve_topology_path(topology))
    with open_client(cluster) as client:
        connect(client)
        body = client.status()
    click.echo(json.dumps(body, ensure_ascii=False) if as_json else status_table(body))


@click.command(epilog=example("edge-runtime doctor", "edge-runtime doctor --topology topology.toml"))
@topology_option
@json_option
def doctor(topology: Path | None, as_json: bool) -> None:
    """Check this machine, the kernels, the topology file, and whether its peers can be reached."""
    from edge_runtime.doctor import examine

    findings = []
    for finding in examine(topology, SystemClock()):
        findings.append(finding)
        if not as_json:
            click.echo(f"{'ok  ' if finding.is_well else 'FAIL'}  {finding.what}: {finding.detail}")
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings]))
    if not all(finding.is_well for finding in findings):
        sys.exit(min(finding.exit_code for finding in findings if not finding.is_well))
