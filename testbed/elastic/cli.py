"""The commands `edge-runtime testbed elastic` and `segments`. Heavy imports are inside."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from testbed.elastic.measure import Load


STREAM_BYTES = 1 << 28  # more than caches hold


@click.command(
    epilog="\b\nExample:\n  edge-runtime testbed elastic testbed/models/edge-moe-demo --corpus corpus --out elastic"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--corpus", type=click.Path(path_type=Path), default=None, help="For perplexity; without it, only times."
)
@click.option("--artifact", type=click.Path(path_type=Path), default=None, help="Default: MODEL/calibration.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder for CSV and plots."
)
@click.option("--windows", default=24, show_default=True, help="Windows of 512 tokens of validation text.")
@click.option("--prompts", default=32, show_default=True, help="Prompts of the mixed run.")
@click.option("--low", default=6, show_default=True, help="Tier of half of them.")
@click.option("--size", default=8, show_default=True, help="Prompts of a batch.")
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    help="Of everything timed; the quickest counts, of mixed runs the median.",
)
@click.option("--prompt-tokens", default=16, show_default=True, help="Of each prompt.")
@click.option("--answer-tokens", default=32, show_default=True, help="Of each answer.")
@click.option("--uneven", is_flag=True, help="Answers of the mixed run are of unlike lengths.")
@click.option("--rows", default=512, show_default=True, help="Most rows of a step.")
@click.option("--trunk-format", default="as_stored", show_default=True, help="Of attention and head.")
@click.option("--weight-format", default="as_stored", show_default=True, help="Of experts.")
@click.option("--only", type=click.Choice(["time", "offline", "whole"]), multiple=True, help="Measure these.")
@click.option(
    "--parts",
    type=click.IntRange(2, 8),
    default=None,
    help="Cut experts into so many where they lie, without an artifact: for times.",
)
def elastic(
    model: Path,
    corpus: Path | None,
    artifact: Path | None,
    out: Path | None,
    windows: int,
    prompts: int,
    low: int,
    size: int,
    rounds: int,
    prompt_tokens: int,
    answer_tokens: int,
    uneven: bool,
    rows: int,
    trunk_format: str,
    weight_format: str,
    only: tuple[str, ...],
    parts: int | None,
) -> None:
    """Measure what fewer sub-experts per token cost in perplexity and save in processor time."""
    import torch

    from edge_runtime.artifacts import artifact_folder
    from kernels.packing import FORMATS
    from testbed.bench.sitting import Stream
    from testbed.elastic import measure
    from topology.readers import SHORT_FORMATS

    torch.set_num_threads(1)
    counts = {"prompts": prompts, "size": size, "rounds": rounds, "rows": rows}
    counts |= {"prompt-tokens": prompt_tokens, "answer-tokens": answer_tokens}
    for name, count in counts.items():
        if count < 1:
            raise click.BadParameter(f"--{name} is {count}, expected at least 1")
    if parts is not None and (artifact or corpus) is not None:
        raise click.BadParameter("--parts is for times; leave out --artifact and --corpus")
    found = None
    if parts is None:
        checkpoint, found, split = measure.open_parts(model, artifact or artifact_folder(model))
    else:
        checkpoint, split = measure.split_as_they_lie(model, parts)
    trunk_format = SHORT_FORMATS.get(trunk_format, trunk_format)
    for name, format_ in (("trunk-format", trunk_format), ("weight-format", weight_format)):
        if format_ != "as_stored" and format_ not in FORMATS:
            known = ", ".join(("as_stored", *FORMATS))
            raise click.BadParameter(f"--{name} is {format_!r}, expected one of {known}")
    load = measure.Load(prompt_tokens, answer_tokens, rows, trunk_format, weight_format, uneven)
    _refuse_longer(load, checkpoint.spec.context_tokens)
    bench = measure.Bench(checkpoint, split, size, load)
    if not 1 <= low <= bench.full:
        raise click.BadParameter(f"--low is {low}, expected a tier of this model, 1 to {bench.full}")
    wanted = only or ("time", "offline", "whole")
    shown = {}
    if {"time", "offline"} & set(wanted):
        stream_bps = Stream(STREAM_BYTES, 1).bytes_per_s()
        few = () if "time" in wanted else (low,)  # all that the mixed run needs
        shown["time"] = measure.time_rows(bench, sorted({1, size}), rounds, stream_bps, few)
        click.echo(f"memory is read at {stream_bps / 1e9:.1f} GB/s")
    if "offline" in wanted:
        tiers = measure.mixed_tiers(low, bench.full, prompts)
        shown["offline"] = measure.offline_rows(bench, tiers, size, shown["time"], rounds)
    if "whole" in wanted:
        whole = measure.Bench(checkpoint, None, size, load)
        shown["whole"] = measure.whole_rows(bench, whole, sorted({1, size}), rounds)
        del whole
    if corpus is not None and found is not None:
        shown["perplexity"] = measure.perplexity_rows(
            model, checkpoint, found, split, corpus, windows, lambda line: click.echo(line, err=True)
        )
    _show(shown, out)


@click.command(
    epilog="\b\nExample:\n  edge-runtime testbed segments testbed/models/edge-moe-demo\n"
    "  EDGE_KERNELS=torch edge-runtime testbed segments testbed/models/edge-moe-demo --compile --sizes 1 --rounds 3"
)
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--artifact", type=click.Path(path_type=Path), default=None, help="Default: MODEL/calibration.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Folder for CSV.")
@click.option("--sizes", default="1,8", show_default=True, help="Requests at once, several with commas.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1), help="Of everything timed.")
@click.option(
    "--answer-tokens", default=32, show_default=True, type=click.IntRange(1), help="Of each answer."
)
@click.option("--compile", "compiles", is_flag=True, help="Segments as `node --compile` has them.")
def segments(
    model: Path,
    artifact: Path | None,
    out: Path | None,
    sizes: str,
    rounds: int,
    answer_tokens: int,
    compiles: bool,
) -> None:
    """Measure steps layer by layer beside steps on segments that are kept ready, and what keeping them takes."""
    import torch

    from edge_runtime.artifacts import artifact_folder
    from kernels import backends, replay
    from kernels.settings import COMPILE_VARIABLE
    from testbed.elastic import measure

    torch.set_num_threads(1)
    try:
        numbers = [int(each) for each in sizes.split(",")]
        if min(numbers) < 1:
            raise ValueError
    except ValueError:
        raise click.BadParameter(
            f"--sizes is {sizes!r}, expected whole numbers from 1, such as 1,8"
        ) from None
    record = None
    if compiles or not backends.is_on_host():
        asked = {COMPILE_VARIABLE: "1"} if compiles else {}
        record = replay.recorder(asked)
        if needless := replay.why_not_compiled(asked):
            click.echo(needless, err=True)
    checkpoint, _, parts = measure.open_parts(model, artifact or artifact_folder(model))
    load = measure.Load(answer_tokens=answer_tokens)
    _refuse_longer(load, checkpoint.spec.context_tokens)
    bench = measure.Bench(checkpoint, parts, max(numbers), load)
    click.echo(f"{backends.active().NAME} kernels, segments as {record.name if record else 'buffers'}")
    shown = {
        "segments": measure.segment_rows(bench, numbers, rounds, record),
        "kept": measure.kept_rows(bench),
    }
    _show(shown, out)


def _refuse_longer(load: "Load", most: int) -> None:
    """Nothing would end an answer for which there is no room."""
    if load.prompt_tokens + load.longest > most:
        at_most = ", unlike ones twice as long," if load.uneven else ""
        raise click.BadParameter(
            f"prompts of {load.prompt_tokens} and answers of --answer-tokens {load.answer_tokens}{at_most} are "
            f"{load.prompt_tokens + load.longest} tokens, expected at most {most} of this model"
        )


def _show(shown: Mapping[str, Sequence[Mapping[str, Any]]], out: Path | None) -> None:
    """Print tables, and write each beside where a folder is given."""
    from testbed.elastic import measure

    for name, rows in shown.items():
        click.echo(f"\n{name}\n\n{measure.table(rows)}")
        if out is not None:
            measure.write_rows(out, name, rows)
