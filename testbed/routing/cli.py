"""The commands `edge-runtime testbed routing` and `routing-daemons`. Heavy imports are inside."""

import signal
from pathlib import Path

import click

from edge_runtime.commands.shared import Finite
from testbed.carried import DEMO_MODEL


@click.command(
    epilog="\b\nExample:\n  edge-runtime testbed routing --model testbed/models/edge-moe-demo --corpus corpus --homes 8\n"
    "  edge-runtime testbed routing --geometry qwen3-30b-a3b --homes 16 --csv routing.csv"
)
@click.option(
    "--model", type=click.Path(path_type=Path), default=None, help="Model whose gates are recorded."
)
@click.option(
    "--corpus", type=click.Path(path_type=Path), default=None, help="Labelled text: DOMAIN/*.jsonl."
)
@click.option(
    "--geometry", default=None, help="Draw traces for a published model's gates instead of recording."
)
@click.option("--homes", default=8, show_default=True, type=click.IntRange(2, 512), help="Decode homes.")
@click.option(
    "--load",
    "loads",
    multiple=True,
    type=Finite(0.5, 64),
    help="Requests per home; again and again.",
)
@click.option("--workload", "only", multiple=True, help="Only this mix; default: all.")
@click.option(
    "--policy", "policies", multiple=True, help="Only this router; default: all, and the ablations."
)
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each.")
@click.option(
    "--requests",
    default=0,
    type=click.IntRange(0),
    help="Requests of each run; default: 75 for each home, 600 at least.",
)
@click.option(
    "--traces",
    type=click.Path(path_type=Path),
    default=None,
    help="Folder to keep recorded traces and measured costs in.",
)
@click.option(
    "--csv",
    "csv_path",
    type=click.Path(path_type=Path),
    default=None,
    help="Keep every run on a line; what is there is not made again.",
)
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), default=None, help="Draw to this file.")
@click.option("--overhead", is_flag=True, help="Only measure what routing costs each request.")
def routing(
    model: Path | None,
    corpus: Path | None,
    geometry: str | None,
    homes: int,
    loads: tuple[float, ...],
    only: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: int,
    requests: int,
    traces: Path | None,
    csv_path: Path | None,
    plot_path: Path | None,
    overhead: bool,
) -> None:
    """Compare routers by replaying what gates chose: recorded from a model, or drawn as far apart as published."""
    from testbed.routing import experiment
    from testbed.routing.sources import drawn_sources, recorded_sources

    if overhead:
        from testbed.routing.overhead import overheads
        from testbed.routing.overhead import table as overhead_table

        click.echo(overhead_table(overheads(homes=homes)))
        return
    if (geometry is None) == (model is None or corpus is None):
        raise click.UsageError("give either --model and --corpus, or --geometry")
    say = lambda line: click.echo(line, err=True)  # noqa: E731
    if geometry is not None:
        source = drawn_sources(geometry)
    else:
        assert model is not None and corpus is not None, "checked above"
        source = recorded_sources(model, corpus, traces, say)
    say(source.about)
    rows = experiment.run_table(
        source.fit,
        source.serve,
        num_homes=homes,
        loads=loads or (8.0, 12.0),
        seeds=seeds,
        costs=source.costs,
        num_requests=requests or max(600, 75 * homes),
        model_layers=source.model_layers,
        only=only,
        policies=policies,
        say=say,
        known=experiment.read_csv(csv_path) if csv_path is not None else (),
        keep=lambda row: experiment.append_csv(row, csv_path) if csv_path is not None else None,
    )
    click.echo(experiment.table(rows))
    if plot_path is not None:
        experiment.plot(rows, plot_path)


@click.command(
    "routing-daemons",
    epilog="\b\nExample:\n  edge-runtime testbed routing-daemons --corpus corpus --out runs.jsonl --budget 200",
)
@click.option("--model", type=click.Path(path_type=Path), default=DEMO_MODEL, help="Default: the demo model.")
@click.option(
    "--corpus", type=click.Path(path_type=Path), required=True, help="Labelled text: DOMAIN/*.jsonl."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="Runs are kept here, one a line.",
)
@click.option("--homes", default=6, show_default=True, type=click.IntRange(2, 64), help="Decode nodes.")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(1, 64), help="Prefill nodes.")
@click.option("--workload", "workloads", multiple=True, help="`task`, `language`, `drift`; default: task.")
@click.option(
    "--rate", "rates", multiple=True, type=Finite(0, min_open=True), help="Requests per second; default: 20."
)
@click.option("--policy", "policies", multiple=True, help="Default: all.")
@click.option(
    "--copies", type=Finite(0), default=0.0, help="Of each expert in the cluster; default: one in each node."
)
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1), help="Runs of each.")
@click.option("--requests", default=120, show_default=True, type=click.IntRange(8), help="Of each run.")
@click.option("--tokens", default=64, show_default=True, type=click.IntRange(2), help="Of each answer.")
@click.option(
    "--budget",
    type=Finite(0),
    default=0.0,
    help="Begin no run after so many seconds; called again it goes on from there.",
)
def routing_daemons(
    model: Path,
    corpus: Path,
    out: Path,
    homes: int,
    workers: int,
    workloads: tuple[str, ...],
    rates: tuple[float, ...],
    policies: tuple[str, ...],
    copies: float,
    seeds: int,
    requests: int,
    tokens: int,
    budget: float,
) -> None:
    """Compare routers through daemons: one cluster here whose router changes, the same arrivals for each policy."""
    from edge_runtime.clock import SystemClock
    from testbed.routing import daemons as live

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started would stay
    setting = live.Setting(model, homes, workers, copies, requests, tokens)
    rows = live.run_all(
        setting,
        corpus,
        out,
        workloads=workloads or ("task",),
        rates=rates or (20.0,),
        policies=policies or live.POLICIES,
        seeds=seeds,
        budget_s=budget,
        clock=SystemClock(),
        say=lambda line: click.echo(line, err=True),
    )
    click.echo(live.table(rows))
    click.echo(live.agreement(rows))
