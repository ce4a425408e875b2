"""The testbed's commands: `edge-runtime bench` and `edge-runtime testbed`. Heavy imports are inside."""

import json
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
SCENARIOS = HERE / "scenarios"
PROMPTS = HERE / "prompts" / "domains.jsonl"


@click.command(
    epilog="\b\nExample:\n  edge-runtime bench\n  edge-runtime bench --streams 1,16 --peers --rounds 5"
)
@click.option(
    "--topology",
    "topologies",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Topology file; may be given again. Default: one node, then eight, with the demo model.",
)
@click.option("--streams", default="1,4,16", show_default=True, help="Numbers of requests at once.")
@click.option("--max-tokens", default=64, show_default=True, help="Tokens of each answer.")
@click.option(
    "--rounds", default=5, show_default=True, help="Counted rounds of each cell, after one that warms up."
)
@click.option("--peers", is_flag=True, help="Measure `transformers` on the same model too, in the same run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def bench(
    topologies: tuple[Path, ...], streams: str, max_tokens: int, rounds: int, peers: bool, as_json: bool
) -> None:
    """Start clusters, load them, and print tok/s, TTFT, TPOT, messages and bytes per token."""
    from edge_runtime.clock import SystemClock
    from testbed import bench as benchmark

    try:
        counts = [int(part) for part in streams.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{streams!r} is no list of whole numbers, such as 1,4,16") from error
    if min(counts) < 1 or rounds < 1 or max_tokens < 2:
        raise click.BadParameter("streams and rounds are at least 1, max-tokens at least 2")
    files = topologies or (SCENARIOS / "one_node.toml", SCENARIOS / "eight_nodes.toml")
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    clock = SystemClock()
    cells, model = [], ""
    for file in files:
        with benchmark.RunningCluster(file, clock) as running:
            model = model or running.cluster.model
            for count in counts:
                click.echo(f"{running.cluster.name}: {count} streams", err=True)
                cells.append(benchmark.measure(running, prompts, count, max_tokens, rounds, clock))
    rates: dict[int, list[float]] = {}
    if peers:
        click.echo("transformers", err=True)
        rates = benchmark.measure_transformers(model, prompts, counts, max_tokens, rounds)
    click.echo(benchmark.as_json(cells, rates) if as_json else benchmark.table(cells, rates))


@click.group(epilog="\b\nExample:\n  edge-runtime testbed link n1 n5 --cut 10s")
def testbed() -> None:
    """Do to a running cluster on this machine what the world does to clusters."""


@testbed.command(
    epilog="\b\nExample:\n  edge-runtime testbed link n1 n5 --rtt 20ms --rate 10Mbit/s --jitter 2ms --loss 1%\n"
    "  edge-runtime testbed link n1 all --cut 10s\n  edge-runtime testbed link n1 n5 --heal"
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

    try:
        change = ShapeLink(
            a,
            b,
            delay_s=parse_duration(rtt) / 2 if rtt is not None else None,
            jitter_s=parse_duration(jitter) if jitter is not None else None,
            rate_bps=parse_rate(rate) if rate is not None else None,
            loss=links.parse_share(loss) if loss is not None else None,
            cut_s=parse_duration(cut) if cut is not None else None,
            reset=heal,
        )
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if change.rate_bps == 0:
        raise click.BadParameter("a link has a rate above 0; --cut lets nothing pass")
    cluster = read_cluster(resolve_topology_path(topology))
    keys = load_keys(Path(cluster.keys), "client") if cluster.keys else None
    shaped = []
    for each in links.change_links(cluster, keys, links.pairs_of(cluster, a, b, one_way=one_way), change):
        shaped.append(msgspec.to_builtins(each))
        if not as_json:
            click.echo(links.describe(each))
    if as_json:
        click.echo(json.dumps(shaped))
