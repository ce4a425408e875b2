"""The testbed's commands: `edge-runtime bench` and `edge-runtime testbed`. Heavy imports are inside."""

import json
import signal
from pathlib import Path

import click

from edge_runtime.commands.shared import parsed
from testbed.bench.cli import Several, bench
from testbed.carried import EIGHT_NODES, PROMPTS, SCENARIOS
from testbed.corpus_cli import corpus
from testbed.elastic.cli import elastic, segments
from testbed.lanes.cli import lanes
from testbed.routing.cli import routing, routing_daemons
from testbed.stand_ins.cli import stand_ins
from testbed.stand_ins.quality_cli import quality

SHAPED = ("slow_links", "far_rooms")  # scenarios that are about their links

__all__ = ["bench", "testbed"]


@click.group(epilog="\b\nExample:\n  edge-runtime testbed link desk attic --cut 10s")
def testbed() -> None:
    """Do to clusters and models on this machine what the world does to them, and measure what comes of it."""


testbed.add_command(corpus)
testbed.add_command(quality)
testbed.add_command(routing)
testbed.add_command(routing_daemons)
testbed.add_command(stand_ins)
testbed.add_command(lanes)
testbed.add_command(elastic)
testbed.add_command(segments)


@testbed.command(
    epilog="\b\nExample:\n  edge-runtime testbed link desk attic --rtt 20ms --rate 10Mbit/s --jitter 2ms --loss 1%\n"
    "  edge-runtime testbed link desk all --cut 10s\n  edge-runtime testbed link desk attic --heal"
)
@click.argument("a")
@click.argument("b")
@click.option("--topology", type=click.Path(path_type=Path), default=None, help="As everywhere.")
@click.option("--rtt", default=None, help="Round trip, as in 20ms; each direction takes half.")
@click.option("--rate", default=None, help="As in 10Mbit/s.")
@click.option("--jitter", default=None, help="At most so much more in each direction, at random.")
@click.option("--loss", default=None, help="Packets lost, as in 1%; each costs the wait for its repetition.")
@click.option("--cut", default=None, help="Let nothing pass for so long, as in 10s; 0s: until it is healed.")
@click.option("--heal", is_flag=True, help="First make the link what the topology file says, and end a cut.")
@click.option("--one-way", is_flag=True, help="Only from A to B.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list for scripts.")
def link(
    a: str,
    b: str,
    topology: Path | None,
    rtt: str | None,
    rate: str | None,
    jitter: str | None,
    loss: str | None,
    cut: str | None,
    heal: bool,
    one_way: bool,
    as_json: bool,
) -> None:
    """Change the link between A and B, or A and `all` others, of a cluster that was started with `up --shape`.

    What no option names stays as it is; without options the link is only shown.
    """
    import msgspec

    from edge_runtime.config import resolve_topology_path
    from edge_runtime.protocol import ShapeLink
    from edge_runtime.transport.keys import load_keys
    from testbed import links
    from topology.files import read_cluster
    from topology.units import parse_duration, parse_rate

    rtt_s = None if rtt is None else parsed("--rtt", parse_duration, rtt)
    change = ShapeLink(
        a,
        b,
        delay_s=None if rtt_s is None else rtt_s / 2,
        jitter_s=None if jitter is None else parsed("--jitter", parse_duration, jitter),
        rate_bps=None if rate is None else parsed("--rate", parse_rate, rate),
        loss=None if loss is None else parsed("--loss", links.parse_share, loss),
        cut_s=None if cut is None else parsed("--cut", parse_duration, cut),
        reset=heal,
    )
    if change.rate_bps == 0:
        raise click.BadParameter("a link has a rate above 0; --cut lets nothing pass", param_hint="'--rate'")
    cluster = read_cluster(resolve_topology_path(topology))
    keys = load_keys(Path(cluster.keys), "client") if cluster.keys else None
    shaped = []
    for each in links.change_links(cluster, keys, links.pairs_of(cluster, a, b, one_way=one_way), change):
        shaped.append(msgspec.to_builtins(each))
        if not as_json:
            click.echo(links.describe(each))
    if as_json:
        click.echo(json.dumps(shaped))


@testbed.command(epilog="\b\nExample:\n  edge-runtime testbed chaos --seed 1 --requests 1000")
@click.option(
    "--topology",
    type=click.Path(path_type=Path),
    default=EIGHT_NODES,
    help="Topology file; default: eight nodes with the demo model.",
)
@click.option("--seed", default=1, show_default=True, help="The same troubles come again with the same seed.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Requests during the trouble.",
)
@click.option(
    "--streams", type=click.IntRange(min=1), default=12, show_default=True, help="Requests at once."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def chaos(topology: Path, seed: int, requests: int, streams: int, as_json: bool) -> None:
    """Kill, restart, freeze, cut and slow nodes while they answer; every answer must be the undisturbed one."""
    from dataclasses import asdict

    from edge_runtime.clock import SystemClock
    from edge_runtime.errors import ClusterError
    from testbed.chaos import Chaos, mixed_entries

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started would stay
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    with Chaos(topology, SystemClock()) as running:
        report = running.run(mixed_entries(prompts, seed), requests, streams, seed)
    click.echo(json.dumps(asdict(report)) if as_json else str(report))
    if not report.is_well:
        raise ClusterError("not every answer was right, or not everything came to rest")


@testbed.command(
    epilog="\b\nExample:\n  edge-runtime testbed foretell\n  edge-runtime testbed foretell --topology topology.toml --rounds 5"
)
@click.option(
    "--topology",
    "topologies",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Topology file; may be given again. Default: every scenario.",
)
@click.option("--streams", type=Several(), default="1,4,16", show_default=True, help="Requests at once.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of each cell.")
@click.option(
    "--shape",
    is_flag=True,
    help="Give links what the files say; by default only where that is the point of a scenario.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def foretell(
    topologies: tuple[Path, ...], streams: tuple[int, ...], rounds: int, shape: bool, as_json: bool
) -> None:
    """Hold the predicted time between two tokens against the measured one."""
    import os
    from dataclasses import asdict

    from edge_runtime.clock import SystemClock
    from testbed import foretell as foretelling

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started would stay
    cells: list[foretelling.Foretold] = []
    for file in topologies or sorted(SCENARIOS.glob("*.toml")):
        click.echo(f"{file.stem}", err=True)
        os.environ["EDGE_SHAPE"] = "1" if shape or file.stem in SHAPED else "0"
        found = foretelling.foretell(file, streams, rounds, SystemClock())
        if not as_json:  # as they come: all scenarios take minutes
            click.echo(foretelling.table(found, has_head=not cells))
        cells += found
    if as_json:
        click.echo(json.dumps([asdict(cell) for cell in cells]))


@testbed.command(
    epilog="\b\nExample:\n  edge-runtime testbed plans\n  edge-runtime testbed plans --streams 1,8 --rounds 5"
)
@click.option(
    "--topology",
    type=click.Path(path_type=Path, exists=True),
    default=SCENARIOS / "far_rooms.toml",
    help="Topology file; default: four machines with 5 ms and 200 Mbit/s between them.",
)
@click.option("--streams", type=Several(), default="1,4,16", show_default=True, help="Requests at once.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Of each cell.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list for scripts.")
def plans(topology: Path, streams: tuple[int, ...], rounds: int, as_json: bool) -> None:
    """Measure one machine alone, one home, 2 stages, 4 stages and the planner's choice, beside what is predicted."""
    from dataclasses import asdict

    from edge_runtime.clock import SystemClock
    from testbed import plans as measured_plans

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started would stay
    cells = measured_plans.measure(
        topology, streams, rounds, SystemClock(), lambda line: click.echo(line, err=True)
    )
    click.echo(json.dumps([asdict(cell) for cell in cells]) if as_json else measured_plans.table(cells))
