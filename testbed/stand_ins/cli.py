"""The command `edge-runtime testbed stand-ins`. Heavy imports are inside."""

import json
from pathlib import Path
from typing import Any

import click

from edge_runtime.commands.shared import Finite, parsed
from testbed.carried import EIGHT_NODES, PROMPTS

AT_ONCE = 6  # policies that share an exact run; what is kept is kept after each such part


@click.command(
    "stand-ins",
    epilog="\b\nExample:\n  edge-runtime testbed stand-ins --corpus corpus --sweep --out results",
)
@click.option(
    "--corpus",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder of DOMAIN/valid*.jsonl[.gz] or *.txt; `edge-runtime testbed corpus` makes one. Without it only `--roam`.",
)
@click.option(
    "--topology",
    type=click.Path(path_type=Path),
    default=EIGHT_NODES,
    help="Topology file; default: eight nodes with the demo model.",
)
@click.option("--home", default=None, help="Node whose requests are looked at; default: the middle one.")
@click.option("--rtt", default="5 ms", show_default=True, help="Of every link.")
@click.option("--bandwidth", default="200 Mbit/s", show_default=True, help="Of every link.")
@click.option(
    "--streams", default=10, show_default=True, type=click.IntRange(1), help="Requests at the home."
)
@click.option("--documents", default=3, show_default=True, type=click.IntRange(1), help="Of each domain.")
@click.option("--prompt", default=64, show_default=True, type=click.IntRange(1), help="Tokens read exactly.")
@click.option("--decode", default=128, show_default=True, type=click.IntRange(1), help="Tokens decoded.")
@click.option("--seed", default=1, show_default=True, help="The same documents come with the same seed.")
@click.option(
    "--sweep",
    is_flag=True,
    help="Also sweep budgets, memory ratios and numbers of nodes. With --out, what was measured before is kept.",
)
@click.option("--roam", "roams", is_flag=True, help="Also let tokens roam, with and without look-ahead.")
@click.option(
    "--daemons",
    is_flag=True,
    help="Also measure the policies without a sweep through real daemons with shaped links, requests coming at random. With "
    "--out, what was measured before is kept.",
)
@click.option(
    "--in-flight",
    default=40,
    show_default=True,
    type=click.IntRange(1),
    help="With --daemons: requests at once.",
)
@click.option(
    "--requests", default=120, show_default=True, type=click.IntRange(1), help="With --daemons: in all."
)
@click.option(
    "--rate",
    default=40.0,
    show_default=True,
    type=Finite(min=0, min_open=True),
    help="With --daemons: requests that come in a second at first; then each comes so long after an answer, on average.",
)
@click.option(
    "--answer",
    default=64,
    show_default=True,
    type=click.IntRange(2),
    help="With --daemons: tokens of each answer.",
)
@click.option(
    "--policy",
    "only",
    multiple=True,
    help="Only this one of those compared, by its name. May be given again.",
)
@click.option("--timing", is_flag=True, help="Also measure how long a decision takes, in processor time.")
@click.option("--threads", default=None, type=click.IntRange(1), help="Default: all cores.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Folder for CSV and pictures.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def stand_ins(
    folder: Path | None,
    topology: Path,
    home: str | None,
    rtt: str,
    bandwidth: str,
    streams: int,
    documents: int,
    prompt: int,
    decode: int,
    seed: int,
    sweep: bool,
    roams: bool,
    daemons: bool,
    timing: bool,
    in_flight: int,
    requests: int,
    rate: float,
    answer: int,
    only: tuple[str, ...],
    threads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Compare placements and selectors at one home: time per token, bytes, where experts were served, perplexity.

    Quality is measured on validation text, latency predicted for the links that are given.
    """
    from calibration.cli import shown_progress, use_threads
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.model.tokenizer import Tokenizer
    from testbed.kept import Kept
    from testbed.stand_ins import experiment
    from testbed.stand_ins.quality import validation_requests
    from topology.files import read_cluster
    from topology.units import parse_duration, parse_rate

    if folder is None and not (roams or daemons or timing):
        raise click.UsageError("give --corpus, or --roam, --daemons or --timing for what needs none")
    links = {
        "rtt_s": parsed("--rtt", parse_duration, rtt),
        "bandwidth_bps": parsed("--bandwidth", parse_rate, bandwidth),
    }
    compared = [policy for policy in experiment.COMPARED if not only or policy.name in only]
    unknown = set(only) - {policy.name for policy in experiment.COMPARED}
    if unknown:
        names = "; ".join(policy.name for policy in experiment.COMPARED)
        raise click.BadParameter(f"{', '.join(sorted(unknown))} is not compared; found are: {names}")
    use_threads(threads)
    cluster = read_cluster(topology)
    results: dict[str, list[dict[str, Any]]] = {}
    if folder is not None:
        hub = experiment.Hub(cluster, home=home, streams=streams, **links)
        texts, domains = validation_requests(
            folder,
            Tokenizer.open(cluster.model),
            documents=documents,
            prompt_tokens=prompt,
            decode_tokens=decode,
            seed=seed,
        )
        policies = [*compared, *(experiment.swept() if sweep else ())]
        at = (str(folder), documents, prompt, decode, seed, streams, home, links, topology.read_text("utf-8"))
        kept = Kept(None if out is None else out / "kept-home", *at)
        found = {policy.name: kept.get(policy.name, policy.settings) for policy in policies}
        missing = [policy for policy in policies if found[policy.name] is None]
        with shown_progress() as progress:
            for first in range(0, len(missing), AT_ONCE):
                part = missing[first : first + AT_ONCE]
                for policy, row in zip(part, hub.run(part, texts, domains, progress), strict=True):
                    kept.put(policy.name, row, policy.settings)
                    found[policy.name] = row
        results["home"] = [row for row in found.values() if row is not None]
    if roams:
        traits, losses = experiment.learned(cluster, Checkpoint.open(cluster.model).model_hash)
        results["roam"] = experiment.roam(traits, losses)
    if timing:
        from testbed.stand_ins.decision_times import decision_times

        checkpoint = Checkpoint.open(cluster.model)
        _, losses = experiment.learned(cluster, checkpoint.model_hash)
        top_k = max(layer.gate.top_k for layer in checkpoint.spec.layers if layer.gate)
        results["timing"] = decision_times(losses, top_k=top_k)
    if daemons:
        from edge_runtime.clock import SystemClock
        from testbed.stand_ins.daemons import Arrivals, through_daemons, with_quality

        lines = PROMPTS.read_text(encoding="utf-8").splitlines()
        with shown_progress() as progress:
            measured = through_daemons(
                topology,
                compared,
                [json.loads(line)["prompt"] for line in lines],
                SystemClock(),
                Arrivals(in_flight, requests, rate, answer, seed),
                rtt=rtt,
                bandwidth=bandwidth,
                kept=None if out is None else out / "kept",
                progress=progress,
            )
        results["daemons"] = with_quality(measured, results.get("home", ()))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in results.items():
            (out / f"{name}.csv").write_text(experiment.as_csv(rows))
        if "daemons" in results:
            from testbed.stand_ins.daemons import as_markdown

            (out / "daemons.md").write_text(as_markdown(results["daemons"]), encoding="utf-8")
            experiment.draw_bars(results["daemons"], out / "daemons.png")
        if "home" in results and not experiment.draw(results["home"], out / "home.png"):
            click.echo("no picture: matplotlib is not installed", err=True)
    if as_json:
        click.echo(json.dumps(results))
    else:
        click.echo("\n".join(experiment.as_csv(rows) for rows in results.values()), nl=False)
