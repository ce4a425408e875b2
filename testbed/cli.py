"""The testbed's commands: `edge-runtime bench`. Heavy imports are inside."""

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
