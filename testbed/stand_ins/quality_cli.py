"""The command `edge-runtime testbed quality`. Heavy imports are inside."""

import json
from pathlib import Path

import click

from edge_runtime.commands.shared import parsed
from testbed.carried import DEMO_MODEL, EIGHT_NODES


@click.command(
    epilog="\b\nExample:\n  edge-runtime testbed quality --corpus corpus --policy next:1 --policy similar:1"
)
@click.option(
    "--corpus",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of DOMAIN/valid*.jsonl[.gz] or *.txt; `edge-runtime testbed corpus` makes one.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=DEMO_MODEL,
    help="Model folder; default: the demo model.",
)
@click.option(
    "--artifact",
    type=click.Path(path_type=Path),
    default=None,
    help="Calibration artifact; default: MODEL/calibration.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    help="exact; next, similar, least, random or drop with the number of lowest-ranked slots, as in next:1; paper or "
    "live, the selector's, with a quality, as in live:balanced or live:0.01. May be given again. Default: next:1 to drop:1.",
)
@click.option(
    "--topology",
    type=click.Path(path_type=Path),
    default=EIGHT_NODES,
    help="Cluster whose placement and links the selector sees; default: eight nodes with the demo model.",
)
@click.option("--home", default=None, help="Node of it that decodes; default: the first that can.")
@click.option("--rtt", default=None, help="Round trip of its links, as in 5ms; default: as the file says.")
@click.option("--documents", default=20, show_default=True, type=click.IntRange(1), help="Of each domain.")
@click.option(
    "--prompt", default=64, show_default=True, type=click.IntRange(1), help="Tokens that are read exactly."
)
@click.option(
    "--decode", default=192, show_default=True, type=click.IntRange(1), help="Tokens under the policy."
)
@click.option(
    "--seed", default=1, show_default=True, help="The same documents come again with the same seed."
)
@click.option(
    "--threads", default=None, type=click.IntRange(1), help="Default: every core this process may use."
)
@click.option("--by-domain", is_flag=True, help="A row for each domain.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, a row for each policy and domain.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list for scripts.")
def quality(
    folder: Path,
    model: Path,
    artifact: Path | None,
    policies: tuple[str, ...],
    topology: Path,
    home: str | None,
    rtt: str | None,
    documents: int,
    prompt: int,
    decode: int,
    seed: int,
    threads: int | None,
    by_domain: bool,
    as_csv: bool,
    as_json: bool,
) -> None:
    """Measure what stand-ins cost: perplexity and top-1 agreement with the exact model, on text that was not calibrated on.

    Each document's beginning is read exactly; the rest is decoded as it stands with the policy in force.
    """
    from functools import cache

    from calibration.cli import shown_progress, use_threads
    from calibration.evaluate import Alternative
    from edge_runtime.artifacts import Artifact, artifact_folder
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.model.tokenizer import Tokenizer
    from testbed.stand_ins.quality import (
        alternative,
        measure,
        outcome_rows,
        quality_csv,
        quality_table,
        validation_requests,
    )
    from testbed.stand_ins.rules import RULES
    from testbed.stand_ins.selected import Home, Selected, read_home
    from topology.units import parse_duration

    rtt_s = None if rtt is None else parsed("--rtt", parse_duration, rtt)
    use_threads(threads)
    checkpoint = Checkpoint.open(model)
    place = artifact or artifact_folder(model)
    measured = Artifact.open(place, model_hash=checkpoint.model_hash) if artifact or place.is_dir() else None

    @cache
    def planned() -> Home:
        return read_home(topology, checkpoint, measured, home, rtt_s)

    def select(policy: str, quality: str | float) -> Alternative:
        return Selected(policy, quality, planned(), checkpoint)

    names = policies or tuple(f"{rule}:1" for rule in RULES)
    chosen = [alternative(name, measured, select) for name in names]
    requests, domains = validation_requests(
        folder,
        Tokenizer.open(model),
        documents=documents,
        prompt_tokens=prompt,
        decode_tokens=decode,
        seed=seed,
    )
    with shown_progress() as progress:
        outcomes = measure(
            model, requests, domains, lambda _: chosen, lambda done, total: progress("measure", done, total)
        )
    if as_json:
        click.echo(json.dumps([row for outcome in outcomes for row in outcome_rows(outcome)]))
    else:
        click.echo(
            quality_csv(outcomes) if as_csv else quality_table(outcomes, by_domain=by_domain), nl=not as_csv
        )
