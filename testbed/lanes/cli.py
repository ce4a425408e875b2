"""The command `edge-runtime testbed lanes`. Heavy imports are inside."""

from pathlib import Path

import click

from edge_runtime.commands.shared import Finite


@click.command(
    epilog="\b\nExample:\n  edge-runtime testbed lanes --out lanes\n"
    "  edge-runtime testbed lanes --geometry qwen3-30b-a3b --machine here --homes 8"
)
@click.option(
    "--geometry",
    "geometries",
    multiple=True,
    default=("olmoe", "qwen3-30b-a3b"),
    show_default=True,
    help="Sizes of a published model; may be given again.",
)
@click.option(
    "--machine",
    type=click.Choice(["a6000", "here"]),
    default="a6000",
    show_default=True,
    help="What steps cost: a GPU by its data sheet, or slices timed on one thread of this machine.",
)
@click.option(
    "--tiers", default="12,32", show_default=True, help="K of the requests, each as frequent as the others."
)
@click.option("--homes", default=4, show_default=True, type=click.IntRange(2, 64), help="Homes that answer.")
@click.option(
    "--loads", default="0.5,0.8,0.95", show_default=True, help="Shares of what the homes could answer."
)
@click.option(
    "--seeds", default=5, show_default=True, type=click.IntRange(2, 100), help="Workloads of each load."
)
@click.option("--requests", default=1000, show_default=True, type=click.IntRange(50), help="Of a workload.")
@click.option(
    "--slots",
    default=16,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Requests that a home runs at once.",
)
@click.option(
    "--dwell",
    type=Finite(0),
    default=2.0,
    show_default=True,
    help="Seconds of unequal load until the border moves.",
)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder for CSV and plot."
)
def lanes(
    geometries: tuple[str, ...],
    machine: str,
    tiers: str,
    homes: int,
    loads: str,
    seeds: int,
    requests: int,
    slots: int,
    dwell: float,
    out: Path | None,
) -> None:
    """Compare routing with lanes of tiers and without: time to the first token of requests of mixed K.

    The runtime's own routing and schedulers run; only what a step takes comes from a cost model.
    """
    import torch

    from edge_runtime.errors import ConfigError
    from testbed.elastic.measure import table, write_rows
    from testbed.lanes.costs import A6000, GEOMETRIES, StepCosts, measured_machine
    from testbed.lanes.experiment import Setting, compare, plot, shown

    torch.set_num_threads(1)
    unknown = [name for name in geometries if name not in GEOMETRIES]
    if unknown:
        raise ConfigError(f"no geometry is called {unknown[0]!r}; there are {', '.join(GEOMETRIES)}")
    try:
        setting = Setting(
            tuple(int(tier) for tier in tiers.split(",")),
            homes,
            tuple(float(load) for load in loads.split(",")),
            seeds,
            requests,
            slots,
            dwell,
        )
    except ValueError as error:
        raise ConfigError(f"--tiers and --loads are numbers with commas between them: {error}") from error
    most = min(GEOMETRIES[name].full_tier for name in geometries)
    if not all(1 <= tier <= most for tier in setting.tiers):
        raise ConfigError(f"--tiers is {tiers}; allowed is 1 to {most}, which is the full tier")
    if not all(0 < load <= 2 for load in setting.loads):
        raise ConfigError(f"--loads is {loads}; allowed is above 0, at most 2")
    rows = []
    for name in geometries:
        geometry = GEOMETRIES[name]
        costs = StepCosts(geometry, A6000 if machine == "a6000" else measured_machine(geometry))
        click.echo(f"{name}: sizes as published, times by a cost model; {costs.machine.about}")
        rows += compare(costs, setting, lambda line: click.echo(line, err=True))
    click.echo(f"\n{table(shown(rows))}")
    if out is not None:
        write_rows(out, "lanes", rows)
        if not plot(out / "lanes.svg", rows):
            click.echo("no plot: matplotlib is not installed", err=True)
