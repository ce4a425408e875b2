"""Commands that ask a running cluster: `submit`, `batch`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_runtime.clock import SystemClock
from edge_runtime.commands.shared import (
    Finite,
    connect,
    example,
    json_option,
    open_client,
    running_cluster,
    say,
    topology_option,
)
from edge_runtime.config import resolve_topology_path
from edge_runtime.errors import ClusterError, RequestError
from topology.cluster import Cluster
from topology.files import read_cluster
from topology.units import counted

if TYPE_CHECKING:
    from edge_runtime.artifacts import Artifact
    from edge_runtime.client import Answer, Client, Prompt
    from edge_runtime.elastic.tiers import Elasticity
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.prompts import Numbered


SHOWN_FAULTS = 20  # lines of a file that are told at a time


@click.command(
    epilog=example(
        "edge-runtime submit 'Once upon a time' --max-tokens 40",
        "edge-runtime submit --chat 'How do I list files?' --temperature 0.7 --repetition-penalty 1.2",
        "edge-runtime submit --file prompts.jsonl --json",
    )
)
@click.argument("prompt", required=False)
@topology_option
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path),
    help="JSON lines with `prompt` and options; all at once. `-` reads standard input.",
)
@click.option("--chat", is_flag=True, help="Apply the model's chat template to PROMPT.")
@click.option("--system", default=None, help="With --chat: the system message.")
@json_option
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens of the answer at most.")
@click.option("--temperature", type=Finite(), default=0.0, show_default=True, help="0 takes the best token.")
@click.option("--top-k", type=int, default=0, help="Choose among the k best tokens; 0: all.")
@click.option("--top-p", type=Finite(), default=1.0, help="Choose among the best tokens of this probability.")
@click.option(
    "--min-p", type=Finite(), default=0.0, help="Leave out tokens below this share of the best one's."
)
@click.option(
    "--repetition-penalty", type=Finite(), default=1.0, help="Above 1: seen tokens become less likely."
)
@click.option("--seed", type=int, default=None, help="Makes a random answer repeatable.")
@click.option("--stop", multiple=True, help="A string that ends the answer; may be given again.")
@click.option("--stop-token-id", type=int, multiple=True, help="A token id that ends the answer.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end tokens.")
@click.option(
    "--logprobs", type=int, default=None, help="Report log probabilities, and of so many best tokens."
)
@click.option(
    "--quality",
    callback=lambda _, __, given: _number_or_word(given),
    default=None,
    show_default="exact",
    help="exact, balanced, fast, or the mean relative loss that a token may cost for being quicker, as in 0.01.",
)
@click.option("--k", type=Finite(), default=None, help="Experts per token, as in 2.25: fewer are quicker.")
@click.option("--sub-experts", type=int, default=None, help="The same, counted in sub-experts.")
@click.option("--service", default=None, help="The same, by name: full, half or economy.")
@click.option("--user", default="", help="Whose quality budget it spends from; without one, its own.")
@click.option("--trace", is_flag=True, help="Show which node did what, and where each layer was served.")
@click.option(
    "--wait",
    "wait_s",
    type=Finite(0),
    default=60.0,
    show_default=True,
    help="Seconds to wait for a cluster that loads.",
)
def submit(
    prompt: str | None,
    topology: Path | None,
    file: Path | None,
    chat: bool,
    system: str | None,
    as_json: bool,
    trace: bool,
    user: str,
    wait_s: float,
    **sampling: Any,
) -> None:
    """Send PROMPT (`-` reads standard input) and print the answer as it comes."""
    import msgspec

    from edge_runtime.prompts import Numbered, prompt_from_options, prompts_from_file

    options = {
        "stop": list(sampling.pop("stop")),
        "stop_token_ids": list(sampling.pop("stop_token_id")),
        **{name: value for name, value in sampling.items() if not (name == "quality" and value is None)},
    }
    if (prompt is None) == (file is None):
        raise RequestError("give either PROMPT or --file")
    if sampling.get("logprobs") is not None and not (as_json or file is not None):
        raise RequestError("--logprobs are part of the JSON; add --json")
    if file is not None:
        lines = prompts_from_file(file, options, chat=chat, system=system, trace=trace)
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        lines = [Numbered(1, prompt_from_options(text, options, chat=chat, system=system, trace=trace))]
    lines = [each._replace(prompt=msgspec.structs.replace(each.prompt, user=user)) for each in lines]
    cluster = running_cluster(resolve_topology_path(topology))
    with open_client(cluster) as client:
        connect(client)
        if file is not None:
            _submit_file(client, lines, wait_s, trace=trace)
        else:
            _submit_one(client, lines[0].prompt, wait_s, as_json=as_json, trace=trace)


def _submit_one(client: "Client", prompt: "Prompt", wait_s: float, *, as_json: bool, trace: bool) -> None:
    from edge_runtime.protocol import Tokens

    def show(answer: "Answer", tokens: Tokens) -> None:
        if not as_json:
            click.echo(tokens.text, nl=False)

    [answer] = client.run([prompt], wait_ready_s=wait_s, on_tokens=show, on_wait=say)
    if not as_json and answer.text:
        click.echo()
    error = answer.error()
    if error is not None:
        raise error
    if as_json:
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    if trace:
        _say_trace(answer.as_json())


def _submit_file(client: "Client", lines: "list[Numbered]", wait_s: float, *, trace: bool) -> None:
    prompts = [each.prompt for each in lines]
    answers = client.run(prompts, wait_ready_s=wait_s, on_wait=say, keeps_ended=True)
    errors = []
    for (line, _), answer in zip(lines, answers, strict=True):
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
        if (error := answer.error()) is not None:
            errors.append((line, error))
        elif trace:
            say(f"line {line}:")
            _say_trace(answer.as_json())
    if errors:
        say(f"error: {len(errors)} of {counted(len(answers), 'prompt')} failed")
        for line, error in errors[:SHOWN_FAULTS]:
            say(f"  line {line}: {error}")
        sys.exit(max(error.exit_code for _, error in errors))


@click.command(epilog=example("edge-runtime batch prompts.jsonl --out answers.jsonl --max-tokens 64"))
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="One JSON line per prompt, in order."
)
@topology_option
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Where a line does not say.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end tokens.")
@click.option(
    "--size",
    type=click.IntRange(1),
    default=None,
    help="Prompts of a batch; default: what homes run at once.",
)
@click.option(
    "--rule",
    type=click.Choice(["paper", "exact"]),
    default="paper",
    show_default=True,
    help="When a remainder joins the next tier: if more prompts end per second so, or if both together are quicker.",
)
@click.option("--wait", "wait_s", type=Finite(0), default=60.0, show_default=True, help="As of `submit`.")
def batch(
    file: Path,
    out: Path,
    topology: Path | None,
    max_tokens: int,
    ignore_eos: bool,
    size: int | None,
    rule: str,
    wait_s: float,
) -> None:
    """Answer every prompt of FILE, cheap tiers first, and write the answers in order.

    Lines as of `submit --file`; `k`, `sub_experts` or `service` say how much each may use. Stopped, it goes on where it was.
    """
    from edge_runtime.elastic.tiers import tier_of
    from edge_runtime.offline import Journal, run_offline
    from edge_runtime.prompts import prompts_from_file, refuse_faults
    from edge_runtime.selector.learned import find_artifact
    from edge_runtime.weights.locate import located, open_model

    options = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
    lines = prompts_from_file(file, options, chat=False, system=None, trace=False)
    cluster = read_cluster(resolve_topology_path(topology))
    checkpoint = open_model(cluster, say)
    artifact = find_artifact(located(cluster, checkpoint), checkpoint.model_hash)
    elasticity = _elasticity(cluster, checkpoint, artifact)
    keys = ("k", "sub_experts", "service")
    full = elasticity.full_tier if elasticity is not None else 1
    tiers, faults = [], []
    for line, prompt in lines:
        try:
            tiers.append(tier_of(elasticity, **{key: prompt.sampling.get(key) for key in keys}) or full)
        except RequestError as error:
            faults.append(f"{file}, line {line}: {error}")
    refuse_faults(faults)
    homes = sum("decode" in node.roles for node in cluster.nodes)
    prompts, served_by = [each.prompt for each in lines], _served_by(cluster, checkpoint, artifact)
    journal = Journal(out, prompts, served_by, file)
    failed = journal.finished()
    if failed is not None:
        say(f"{out} holds the answers to these prompts already; nothing is asked")
    else:
        journal.read(mends=False)  # what is wrong with files is told before anybody is asked
        with open_client(cluster) as client:
            connect(client)
            failed = run_offline(
                client,
                prompts,
                tiers,
                out,
                SystemClock(),
                capacity=size or max(1, homes) * cluster.max_requests,
                served_by=served_by,
                full_tier=full if elasticity is not None else 0,
                rule=rule,  # type: ignore[arg-type]
                wait_ready_s=wait_s,
                say=say,
            )
    click.echo(str(out))
    if failed.total:
        lines_say = f"its line in {out} says" if failed.total == 1 else f"their lines in {out} say"
        told = f"{failed.total} of {counted(len(lines), 'prompt')} failed; {lines_say} why"
        if failed.of_cluster:
            again = "it" if failed.of_cluster == 1 else "them"
            raise ClusterError(f"{told}, and the same command asks {again} again")
        raise RequestError(told)


def _elasticity(
    cluster: Cluster, checkpoint: "Checkpoint", artifact: "Artifact | None"
) -> "Elasticity | None":
    """How far the model of a cluster can be cut down; None if its experts are whole."""
    from edge_runtime.elastic.sub_experts import read_elasticity

    if not cluster.sub_experts:
        return None
    gates = [layer.gate for layer in checkpoint.spec.layers if layer.gate is not None]
    return read_elasticity(artifact, gates[0].top_k if gates else 0)


def _served_by(cluster: Cluster, checkpoint: "Checkpoint", artifact: "Artifact | None") -> dict[str, str]:
    """What answers depend on besides the prompts: another value, and they are another cluster's answers."""
    formats = sorted({f"{node.weight_format}/{node.trunk_format}" for node in cluster.nodes})
    found = {"model": checkpoint.model_hash, "weight formats": ", ".join(formats)}
    found["calibration"] = artifact.content_hash if artifact is not None else "none"
    found["selector"] = f"{cluster.selector}, defer {cluster.defer}, drop {cluster.drop}"
    found["sub_experts"] = str(cluster.sub_experts).lower()
    if cluster.sub_experts:
        found |= {"gate": cluster.gate, "split_tiers": str(cluster.split_tiers).lower()}
    return found


def _say_trace(result: dict[str, Any]) -> None:
    bill, timing = result["bill"], result["timing"]
    say(
        f"home {result['home']}: {result['usage']['prompt_tokens']} prompt tokens "
        f"({result['usage']['cached_tokens']} cached), {result['usage']['completion_tokens']} generated, "
        f"first token {timing['ttft_s'] * 1e3:.1f} ms, then {timing['tpot_s'] * 1e3:.2f} ms a token"
    )
    for name, did in result["nodes"].items():
        say(f"  {name} ({did['role']}): {did['expert_slots']} expert slots, {did['share']:.1%} of all")
    say(f"  gate weight {_shares(bill)}")
    if bill.get("K"):
        ran = float(bill.get("K_run", bill["K"]))
        more = f"; {ran:.1f} ran, since the budget covers no less" if ran > bill["K"] + 0.05 else ""
        noun = "sub-expert" if bill["K"] == 1 else "sub-experts"
        say(f"  {bill['K']:g} {noun} per token and layer{more}")
    if bill.get("budget_spent"):
        say(f"  quality spent {bill['budget_spent']:.4f}, {bill['budget_left']:.4f} left")
    for entry in result.get("trace") or ():
        say(f"  layer {entry['layer']} on {entry['node']}: {_shares(entry)}")


def _shares(bill: dict[str, Any]) -> str:
    """`exactly here 81.0%, by substitutes 19.0%`: what is not 0, and always the first."""
    words = {
        "exact_here": "exactly here",
        "exact_elsewhere": "exactly elsewhere",
        "substituted": "by substitutes",
        "deferred": "deferred",
        "dropped": "dropped",
    }
    return ", ".join(
        f"{word} {bill[key]:.1%}" for key, word in words.items() if bill.get(key) or key == "exact_here"
    )


def _number_or_word(text: str | None) -> float | str | None:
    """A number where it is one; what it may be is checked with the other options. None where nothing was given."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
