"""The command `edge-runtime calibrate`. Heavy imports are inside."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_runtime.commands.shared import Finite

if TYPE_CHECKING:
    from calibration.passes import Progress

__all__ = ["calibrate"]

HIDDEN = "run"


class _RunsByDefault(click.Group):
    """`calibrate MODEL ...` is the hidden `calibrate run MODEL ...`; what names a subcommand is that subcommand."""

    @property
    def default_command(self) -> click.Command:
        """What runs where no subcommand is named."""
        return self.commands[HIDDEN]

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not set(args) & set(context.help_option_names):
            args = [HIDDEN, *args]
        return super().parse_args(context, args)

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for name in super().list_commands(context) if name != HIDDEN]

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of `calibrate MODEL`, and then the subcommands."""
        records = [
            param.get_help_record(context)
            for param in self.default_command.params
            if isinstance(param, click.Option)
        ]
        with formatter.section("Options"):
            formatter.write_dl([record for record in records if record])
        self.format_commands(context, formatter)


@click.group(
    cls=_RunsByDefault,
    subcommand_metavar="MODEL --corpus FOLDER | COMMAND [ARGS]...",
    epilog="\b\nExample:\n  edge-runtime calibrate testbed/models/edge-moe-demo --corpus corpus\n"
    "  edge-runtime calibrate show testbed/models/edge-moe-demo",
)
def calibrate() -> None:
    """Measure a model over labelled text: which experts are used, who can stand in for whom, what it costs.

    Reads text through the exact model and writes the artifact that placement, routing and substitution read. A
    calibration that was stopped goes on where it was.
    """


@calibrate.command(
    HIDDEN, epilog="\b\nExample:\n  edge-runtime calibrate testbed/models/edge-moe-demo --corpus corpus"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--corpus",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of DOMAIN/*.jsonl[.gz] or DOMAIN/*.txt; `edge-runtime testbed corpus` makes one.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Default: MODEL/calibration.",
)
@click.option(
    "--requests", default=1000, show_default=True, type=click.IntRange(16), help="Requests to read."
)
@click.option(
    "--prompt", default=256, show_default=True, type=click.IntRange(8), help="Most tokens of a prompt."
)
@click.option(
    "--decode", default=128, show_default=True, type=click.IntRange(1), help="Tokens decoded of each."
)
@click.option(
    "--homes",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Machines that answer: requests are grouped into so many clusters. Another number is grouped anew.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Decode what the model itself goes on with instead of what the text does.",
)
@click.option("--seed", default=1, show_default=True, help="The same requests come again with the same seed.")
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="Default: every core this process may use."
)
def run(
    model: Path,
    corpus: Path,
    out: Path | None,
    requests: int,
    prompt: int,
    decode: int,
    homes: int,
    generate: bool,
    seed: int,
    threads: int | None,
) -> None:
    """Read text through the exact model and write the artifact."""
    from calibration.calibrate import Options
    from calibration.calibrate import calibrate as measure
    from calibration.requests import Lengths
    from edge_runtime.artifacts import artifact_folder
    from edge_runtime.clock import SystemClock

    threads = use_threads(threads)
    out = out or artifact_folder(model)
    clock = SystemClock()
    began = clock.now()
    _say(f"model {model}, corpus {corpus}, {threads} threads; the artifact goes to {out}")
    with shown_progress() as progress:
        artifact = measure(
            model,
            corpus,
            out,
            Options(requests, Lengths(prompt, decode), seed, generates=generate, num_homes=homes),
            clock,
            progress=progress,
            say=_say,
        )
    about = artifact.index.corpus
    _say(
        f"{about['requests']} requests, {about['tokens']} tokens of {len(about['domains'])} domains in "
        f"{clock.now() - began:.0f} s; wrote {', '.join(artifact.sections)}"
    )
    click.echo(str(out))


@calibrate.command(
    epilog="\b\nExample:\n  edge-runtime calibrate show testbed/models/edge-moe-demo\n"
    "  edge-runtime calibrate show testbed/models/edge-moe-demo/calibration --plot calibration.png"
)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--plot", type=click.Path(path_type=Path), default=None, help="Draw to this file too (png, svg, pdf)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def show(artifact: Path, plot: Path | None, as_json: bool) -> None:
    """Show what an artifact says of a model: similarity by depth, skew of use, sensitivity.

    ARTIFACT is its folder, or that of a model which has one.
    """
    import json

    from calibration.show import artifact_text, draw, layer_rows
    from edge_runtime.artifacts import INDEX_FILE, Artifact, artifact_folder

    beside = artifact_folder(artifact)
    found = Artifact.open(beside if not (artifact / INDEX_FILE).exists() and beside.is_dir() else artifact)
    if as_json:
        about = {"model_hash": found.model_hash, "corpus": found.index.corpus, "sections": found.sections}
        click.echo(json.dumps(about | {"layers": layer_rows(found)}))
    else:
        click.echo(artifact_text(found))
    if plot is not None:
        if draw(found, plot):
            _say(f"drawn to {plot}")
        else:
            _say(
                "no picture: matplotlib is not installed (pip install 'edge-runtime[plots]'); the text above says the same"
            )


@calibrate.command(
    epilog="\b\nExample:\n  edge-runtime calibrate prism testbed/models/edge-moe-demo --corpus corpus"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--corpus", required=True, type=click.Path(path_type=Path), help="As of `calibrate`.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Default: MODEL/calibration.",
)
@click.option("--parts", default=4, show_default=True, help="Sub-experts of an expert.")
@click.option("--dropped", default=0, help="Sub-experts that the objective drops; 0: half of them.")
@click.option(
    "--solver", default="hill", show_default=True, help="contiguous, importance, paper (annealing) or hill."
)
@click.option(
    "--swaps",
    default=0,
    type=click.IntRange(0),
    help="Swaps tried per expert; 0: as many as there are pairs of neurons.",
)
@click.option("--norm-weighted", is_flag=True, help="Neurons count by the length of their output too.")
@click.option(
    "--requests",
    default=0,
    type=click.IntRange(0),
    help="Requests to read; 0: some 2,000 tokens for each expert.",
)
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="Default: every core this process may use."
)
def prism(
    model: Path,
    corpus: Path,
    out: Path | None,
    parts: int,
    dropped: int,
    solver: str,
    swaps: int,
    norm_weighted: bool,
    requests: int,
    seed: int,
    threads: int | None,
) -> None:
    """Split every expert into sub-experts, so that requests may ask for less than the whole model."""
    import torch

    from calibration.partition import PartitionSettings
    from calibration.prism import PrismOptions, calibrate_prism
    from edge_runtime.artifacts import artifact_folder
    from edge_runtime.clock import SystemClock

    threads = use_threads(threads)
    torch.set_num_threads(1)  # experts are fitted side by side
    out = out or artifact_folder(model)
    clock = SystemClock()
    began = clock.now()
    settings = PartitionSettings(parts, dropped, solver, swaps, seed)
    options = PrismOptions(settings, norm_weighted, num_requests=requests, threads=threads)
    _say(f"model {model}, corpus {corpus}, {threads} threads; the artifact goes to {out}")
    with shown_progress() as progress:
        artifact = calibrate_prism(model, corpus, out, options, clock, progress=progress, say=_say)
    lost = artifact.tensor("partition", "objective").mean((0, 1))
    _say(
        f"mass lost with {settings.num_dropped} of {parts} sub-experts dropped: {lost[0]:.1%}, {lost[1]:.1%} as the "
        f"neurons lie; {clock.now() - began:.0f} s"
    )
    click.echo(str(out))


@calibrate.command(
    epilog="\b\nExample:\n  edge-runtime calibrate gate testbed/models/edge-moe-demo --corpus corpus"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--corpus", required=True, type=click.Path(path_type=Path), help="As of `calibrate`.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Default: MODEL/calibration.",
)
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Optimiser steps.")
@click.option("--batch", default=4, show_default=True, type=click.IntRange(1), help="Windows of a step.")
@click.option("--window", default=256, show_default=True, type=click.IntRange(8), help="Tokens of a window.")
@click.option("--learning-rate", default=1e-3, show_default=True, type=Finite(0, min_open=True))
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="Default: every core this process may use."
)
def gate(
    model: Path,
    corpus: Path,
    out: Path | None,
    steps: int,
    batch: int,
    window: int,
    learning_rate: float,
    seed: int,
    threads: int | None,
) -> None:
    """Tune a gate over the sub-experts that `calibrate prism` made. Experts and trunk stay as they are."""
    from calibration.gate_finetune import TuneSettings
    from calibration.tune import TuneOptions, tune_gate
    from edge_runtime.artifacts import artifact_folder
    from edge_runtime.clock import SystemClock

    use_threads(threads)
    out = out or artifact_folder(model)
    clock = SystemClock()
    began = clock.now()
    settings = TuneSettings(steps, batch, learning_rate, seed=seed)
    with shown_progress() as progress:
        artifact = tune_gate(
            model, corpus, out, TuneOptions(settings, window), clock, progress=progress, say=_say
        )
    losses = artifact.tensor("linear_gate", "losses")
    tenth = max(1, len(losses) // 10)
    means = [each.mean(0).tolist() for each in (losses[:tenth], losses[-tenth:])]
    _say(
        f"cross-entropy {means[0][0]:.3f} and divergence {means[0][1]:.4f} in the first {tenth} of {len(losses)} steps, "
        f"{means[1][0]:.3f} and {means[1][1]:.4f} in as many at the end; {clock.now() - began:.0f} s"
    )
    click.echo(str(out))


@calibrate.command(
    epilog="\b\nExample:\n  edge-runtime calibrate tiers testbed/models/edge-moe-demo --corpus corpus"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--corpus", required=True, type=click.Path(path_type=Path), help="As of `calibrate`.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Default: MODEL/calibration.",
)
@click.option("--windows", default=32, show_default=True, type=click.IntRange(1), help="Windows of text.")
@click.option("--window", default=256, show_default=True, type=click.IntRange(8), help="Tokens of a window.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="Default: every core this process may use."
)
def tiers(
    model: Path, corpus: Path, out: Path | None, windows: int, window: int, seed: int, threads: int | None
) -> None:
    """Measure what each layer loses at each K, once experts are split: what budgets pay, and how K is split over layers."""
    from calibration.tier_losses import measure_tiers
    from edge_runtime.artifacts import artifact_folder
    from edge_runtime.clock import SystemClock

    use_threads(threads)
    out = out or artifact_folder(model)
    with shown_progress() as progress:
        artifact = measure_tiers(
            model,
            corpus,
            out,
            SystemClock(),
            num_windows=windows,
            window_tokens=window,
            seed=seed,
            progress=progress,
            say=_say,
        )
    mass = artifact.tensor("tier_losses", "mass").mean(0)
    _say(f"gate weight left out at half of all sub-experts: {float(mass[len(mass) // 2 - 1]):.1%}")
    click.echo(str(out))


def use_threads(threads: int | None) -> int:
    """Compute on so many threads, or on every core this process may use. Returns how many."""
    import torch

    from kernels import ops
    from kernels.settings import checked_threads

    threads = threads or len(os.sched_getaffinity(0))
    ops.set_num_threads(checked_threads(threads, "--threads"))
    torch.set_num_threads(threads)
    return threads


def _say(line: str) -> None:
    click.echo(line, err=True)


@contextmanager
def shown_progress() -> "Iterator[Progress]":
    """Bars with the time that is left, on a terminal; elsewhere a line where something begins."""
    if not sys.stderr.isatty():
        begun: set[str] = set()

        def line(name: str, done: int, total: int) -> None:
            if name not in begun:
                begun.add(name)
                _say(f"{name}: {done} of {total}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        tasks: dict[str, int] = {}

        def move(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)  # type: ignore[arg-type]

        yield move
