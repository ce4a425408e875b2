"""The command `edge-runtime`: reads options, calls the part that does the work, prints what came of it.

Everything heavy is imported inside its command, so that `--help` and `submit` stay quick. Settings are resolved here
and nowhere below.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import signal
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from edge_runtime.clock import SystemClock, wall_s
from edge_runtime.config import (
    TOPOLOGY_VARIABLE,
    last_good_text,
    read_snapshot,
    remember_good,
    resolve_topology_path,
    state_dir,
    write_snapshot,
)
from edge_runtime.errors import (
    EXIT_DONE,
    EXIT_USER,
    ClusterError,
    DeadlinePassed,
    EdgeError,
    Refusal,
    RequestError,
)
from edge_runtime.log import setup_logging
from topology.cluster import Cluster, find_node, is_loopback
from topology.errors import TopologyError
from topology.files import HUB, read_cluster, read_cluster_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge_runtime.client import Answer, Client, Prompt
    from edge_runtime.coordinator.epochs import Epochs
    from edge_runtime.elastic.tiers import Elasticity
    from edge_runtime.protocol import Planned
    from edge_runtime.transport.keys import Keys

COMMANDS_GROUP = "edge_runtime.commands"
SHAPE_VARIABLE = "EDGE_SHAPE"
READY_S = 300.0
CONNECT_S = 5.0
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)  # what a person can mend
QUIET_S = 2.0  # a longer wait says what it waits for


class _Commands(click.Group):
    """Own commands, and those that other packages registered."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(context), *(point.name for point in entry_points(group=COMMANDS_GROUP))}
        )

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        own = super().get_command(context, name)
        if own is not None:
            return own
        found = [point for point in entry_points(group=COMMANDS_GROUP) if point.name == name]
        return found[0].load() if found else None


def _example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


topology_option = click.option(
    "--topology",
    "topology",
    type=click.Path(path_type=Path),
    default=None,
    help="Topology file; else $EDGE_RUNTIME_TOPOLOGY, else ./topology.toml.",
)
shape_option = click.option(
    "--shape",
    is_flag=True,
    envvar=SHAPE_VARIABLE,
    help="Give the links between nodes the `rtt` and `bandwidth` of the file; all of it must be this machine.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")


@click.group(
    cls=_Commands,
    epilog=_example(
        "edge-runtime up --detach", "edge-runtime submit 'Once upon a time'", "edge-runtime down"
    ),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="edge-runtime")
def cli() -> None:
    """Serve one Mixture-of-Experts model from several unequal machines."""


# --- daemons ----------------------------------------------------------------------------------------------------


@cli.command(epilog=_example("edge-runtime up --topology testbed/scenarios/eight_nodes.toml --detach"))
@topology_option
@shape_option
@click.option(
    "--limits",
    is_flag=True,
    help="Hold each process to the `memory` and `cpu_share` of the file, by control group where that is allowed.",
)
@click.option("--detach", is_flag=True, help="Return when all nodes are ready; `down` stops them.")
@click.option(
    "--wait", "wait_s", default=READY_S, show_default=True, help="Seconds until all nodes must be ready."
)
def up(topology: Path | None, shape: bool, limits: bool, detach: bool, wait_s: float) -> None:
    """Start the coordinator and every node of the file on this machine."""
    from edge_runtime import launch

    path = resolve_topology_path(topology)
    cluster = read_cluster(path)
    if shape:
        from edge_runtime.transport.shaping import cluster_shaper

        cluster_shaper(cluster, launch.COORDINATOR)  # a file that cannot be shaped is refused here, once
        os.environ[SHAPE_VARIABLE] = "1"  # for the daemons
    clock = SystemClock()
    if cluster.model.startswith(HUB):
        from edge_runtime.weights.locate import open_model

        open_model(cluster, _say)  # once, here, where a person sees how far it is
    _say(
        f"cluster {cluster.name}: {len(cluster.nodes)} nodes, model {cluster.model}, logs in {state_dir(path)}"
    )
    _interrupt_on(signal.SIGTERM, signal.SIGHUP)
    local = launch.start_local(cluster, path, limited=_say if limits else None)
    is_serving = False
    try:
        launch.wait_ready(local, lambda: _client(cluster), clock, wait_s, _say)
        _say(
            f"ready: {len(cluster.nodes)} nodes; try: edge-runtime submit --topology {path} 'Once upon a time'"
        )
        is_serving = True
        if not detach:
            _say("stop with Ctrl-C")
            launch.watch(local, clock, _say)
    except KeyboardInterrupt:
        if not is_serving:
            raise
    finally:
        if not (detach and is_serving):
            _ignore(
                signal.SIGTERM, signal.SIGHUP, signal.SIGINT
            )  # a second one must not leave half of it running
            launch.stop_local(path, clock, _say)
            _say("stopped")


@cli.command(epilog=_example("edge-runtime down --topology testbed/scenarios/eight_nodes.toml"))
@topology_option
def down(topology: Path | None) -> None:
    """Stop what `up` started; nothing of it is left afterwards."""
    from edge_runtime import launch

    path = resolve_topology_path(topology)
    stopped = launch.stop_local(path, SystemClock(), _say)
    _say(f"stopped {', '.join(stopped)}" if stopped else f"nothing of {path} runs here")


@cli.command(
    epilog=_example(
        "edge-runtime node desk --topology topology.toml",
        "edge-runtime node drain attic --topology topology.toml",
    )
)
@click.argument("words", nargs=-1, required=True, metavar="NAME | drain NAME")
@topology_option
@shape_option
def node(words: tuple[str, ...], topology: Path | None, shape: bool) -> None:
    """Run this machine's daemon, or drain a node of a cluster that runs.

    \b
    node NAME        run the daemon of the node NAME of the topology file, here
    node drain NAME  move the requests and experts of NAME, wherever it runs, to the
                     other nodes, then let its daemon stop; refused if they have no
                     room, and then nothing has changed
    """
    if len(words) > 2 or (len(words) == 2 and words[0] != "drain"):
        raise click.UsageError(f"{' '.join(words)!r} is neither NAME nor `drain NAME`")
    path = resolve_topology_path(topology)
    if len(words) == 2:
        _drain(words[1], path)
    else:
        _run_node(words[0], path, shape)


def _run_node(name: str, path: Path, shape: bool) -> None:
    cluster = read_cluster(path, needs_model=False)
    mine = find_node(cluster, name)
    setup_logging(name)
    keys = _keys(cluster, name)
    _shape_links(shape, cluster, name)
    from edge_runtime.launch import recorded
    from edge_runtime.node.daemon import NodeDaemon
    from edge_runtime.weights.locate import located, model_for_node

    clock = SystemClock()
    checkpoint, cache = model_for_node(cluster, mine, keys, clock)
    daemon = NodeDaemon(located(cluster, checkpoint), mine, checkpoint, keys, clock, cache)
    _stop_on_signal(daemon)
    with recorded(path, name):
        daemon.run()


def _drain(name: str, path: Path) -> None:
    from edge_runtime import changes, launch

    clock = SystemClock()
    with _client(_running_cluster(path)) as client:
        _connect(client)
        epoch = changes.begin(lambda: client.drain(name), clock, _say)
        click.echo(changes.follow(client, epoch, clock, _say, lambda: None))
    launch.await_end(state_dir(path), [name], clock, _say)


@cli.command(epilog=_example("edge-runtime coordinator --topology topology.toml"))
@topology_option
@shape_option
def coordinator(topology: Path | None, shape: bool) -> None:
    """Run the coordinator of the topology file."""
    path = resolve_topology_path(topology)
    cluster = read_cluster(path)
    setup_logging("coordinator")
    keys = _keys(cluster, "coordinator")
    _shape_links(shape, cluster, "coordinator")
    from edge_runtime.coordinator.daemon import CoordinatorDaemon
    from edge_runtime.coordinator.deploy import Plan, plan_for
    from edge_runtime.coordinator.learned_routes import find_learned
    from edge_runtime.coordinator.snapshot import (
        decode_snapshot,
        encode_snapshot,
        plan_to_go_on_with,
        snapshot_of,
    )
    from edge_runtime.launch import COORDINATOR, recorded
    from edge_runtime.model.footprint import footprint
    from edge_runtime.weights.locate import located, open_model
    from edge_runtime.weights.stores import FullFolder

    checkpoint = open_model(cluster, _say)
    parts = footprint(checkpoint, context_tokens=cluster.context_tokens)
    traits, routes = find_learned(
        located(cluster, checkpoint), parts, checkpoint.model_hash, seed=secrets.randbits(63)
    )
    content = read_snapshot(path)
    before = decode_snapshot(content) if content is not None else None
    found, why = plan_to_go_on_with(
        before, cluster, checkpoint.model_hash, _hash_of(path), parts.context_tokens
    )
    if why:
        _say(why)
    epoch = before.newest + 1 if before is not None else 1
    plan = found or Plan(
        cluster,
        plan_for(cluster, parts, cluster.node_names, traits=traits, joint=routes.joint, epoch=epoch),
    )

    def keep(where: "Epochs") -> None:
        snapshot = snapshot_of(where, checkpoint.model_hash, _hash_of(path))
        write_snapshot(path, encode_snapshot(snapshot))

    daemon = CoordinatorDaemon(
        plan.cluster,
        parts,
        plan.placement,
        model_hash=checkpoint.model_hash,
        before=before,
        keep=keep,
        traits=traits,
        routes=routes,
        keys=keys,
        clock=SystemClock(),
        weights=FullFolder(checkpoint),
    )
    _stop_on_signal(daemon)
    with recorded(path, COORDINATOR):
        _remember(path)
        daemon.run()


def _hash_of(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


# --- requests ---------------------------------------------------------------------------------------------------


@cli.command(
    epilog=_example(
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
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the best token.")
@click.option("--top-k", type=int, default=0, help="Choose among the k best tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Choose among the best tokens of this probability.")
@click.option("--min-p", type=float, default=0.0, help="Leave out tokens below this share of the best one's.")
@click.option(
    "--repetition-penalty", type=float, default=1.0, help="Above 1: seen tokens become less likely."
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
    default="exact",
    show_default=True,
    help="exact, balanced, fast, or the mean relative loss that a token may cost for being quicker, as in 0.01.",
)
@click.option("--k", type=float, default=None, help="Experts per token, as in 2.25: fewer are quicker.")
@click.option("--sub-experts", type=int, default=None, help="The same, counted in sub-experts.")
@click.option("--service", default=None, help="The same, by name: full, balanced or economy.")
@click.option("--user", default="", help="Whose quality budget it spends from; without one, its own.")
@click.option("--trace", is_flag=True, help="Show which node did what, and where each layer was served.")
@click.option(
    "--wait",
    "wait_s",
    type=float,
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

    from edge_runtime.prompts import prompt_from_options, prompts_from_file

    options = {
        "stop": list(sampling.pop("stop")),
        "stop_token_ids": list(sampling.pop("stop_token_id")),
        **sampling,
    }
    if (prompt is None) == (file is None):
        raise RequestError("give either PROMPT or --file")
    if sampling.get("logprobs") is not None and not (as_json or file is not None):
        raise RequestError("--logprobs are part of the JSON; add --json")
    if file is not None:
        prompts = prompts_from_file(file, options, chat=chat, system=system, trace=trace)
    else:
        text = sys.stdin.read() if prompt == "-" else str(prompt)
        prompts = [prompt_from_options(text, options, chat=chat, system=system, trace=trace)]
    prompts = [msgspec.structs.replace(prompt, user=user) for prompt in prompts]
    cluster = _running_cluster(resolve_topology_path(topology))
    with _client(cluster) as client:
        _connect(client)
        if file is not None:
            _submit_file(client, prompts, wait_s, trace=trace)
        else:
            _submit_one(client, prompts[0], wait_s, as_json=as_json, trace=trace)


def _submit_one(client: "Client", prompt: "Prompt", wait_s: float, *, as_json: bool, trace: bool) -> None:
    from edge_runtime.protocol import Tokens

    def show(answer: "Answer", tokens: Tokens) -> None:
        if not as_json:
            click.echo(tokens.text, nl=False)

    [answer] = client.run([prompt], wait_ready_s=wait_s, on_tokens=show, on_wait=_say)
    if not as_json and answer.text:
        click.echo()
    error = answer.error()
    if error is not None:
        raise error
    if as_json:
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
    if trace:
        _say_trace(answer.as_json())


def _submit_file(client: "Client", prompts: "list[Prompt]", wait_s: float, *, trace: bool) -> None:
    answers = client.run(prompts, wait_ready_s=wait_s, on_wait=_say)
    errors = []
    for number, answer in enumerate(answers, 1):
        click.echo(json.dumps(answer.as_json(), ensure_ascii=False))
        if (error := answer.error()) is not None:
            errors.append(error)
        elif trace:
            _say(f"prompt {number}:")
            _say_trace(answer.as_json())
    if errors:
        _say(f"error: {len(errors)} of {len(answers)} prompts failed; the first: {errors[0]}")
        sys.exit(max(error.exit_code for error in errors))


@cli.command(epilog=_example("edge-runtime batch prompts.jsonl --out answers.jsonl --max-tokens 64"))
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
@click.option("--wait", "wait_s", type=float, default=60.0, show_default=True, help="As of `submit`.")
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
    from edge_runtime.offline import run_offline
    from edge_runtime.prompts import prompts_from_file

    options = {"max_tokens": max_tokens, "ignore_eos": ignore_eos}
    prompts = prompts_from_file(file, options, chat=False, system=None, trace=False)
    cluster = read_cluster(resolve_topology_path(topology))
    elasticity = _elasticity(cluster)
    keys = ("k", "sub_experts", "service")
    asked = [{key: prompt.sampling.get(key) for key in keys} for prompt in prompts]
    full = elasticity.full_tier if elasticity is not None else 1
    tiers = [tier_of(elasticity, **each) or full for each in asked]
    homes = sum("decode" in node.roles for node in cluster.nodes)
    with _client(cluster) as client:
        _connect(client)
        failed = run_offline(
            client,
            prompts,
            tiers,
            out,
            SystemClock(),
            capacity=size or max(1, homes) * cluster.max_requests,
            rule=rule,  # type: ignore[arg-type]
            wait_ready_s=wait_s,
            say=_say,
        )
    click.echo(str(out))
    if failed:
        raise ClusterError(f"{failed} of {len(prompts)} prompts failed; their lines in {out} say why")


def _elasticity(cluster: Cluster) -> "Elasticity | None":
    """How far the model of a cluster can be cut down; None if its experts are whole."""
    from edge_runtime.elastic.tiers import Elasticity
    from edge_runtime.model.checkpoint import Checkpoint
    from edge_runtime.selector.learned import find_artifact

    if not cluster.sub_experts:
        return None
    checkpoint = Checkpoint.open(cluster.model)
    artifact = find_artifact(cluster, checkpoint.model_hash)
    gates = [layer.gate for layer in checkpoint.spec.layers if layer.gate is not None]
    if artifact is None or not gates:
        return None
    return Elasticity(int(artifact.meta("partition")["num_parts"]), gates[0].top_k)


def _say_trace(result: dict[str, Any]) -> None:
    bill, timing = result["bill"], result["timing"]
    _say(
        f"home {result['home']}: {result['usage']['prompt_tokens']} prompt tokens "
        f"({result['usage']['cached_tokens']} cached), {result['usage']['completion_tokens']} generated, "
        f"first token {timing['ttft_s'] * 1e3:.1f} ms, then {timing['tpot_s'] * 1e3:.2f} ms a token"
    )
    for name, did in result["nodes"].items():
        _say(f"  {name} ({did['role']}): {did['expert_slots']} expert slots, {did['share']:.1%} of all")
    _say(f"  gate weight {_shares(bill)}")
    if bill.get("K"):
        _say(
            f"  {bill['K']} sub-experts per token and layer; {bill['dropped']:.1%} of the gate weight left out"
        )
    if bill.get("budget_spent"):
        _say(f"  quality spent {bill['budget_spent']:.4f}, {bill['budget_left']:.4f} left")
    for entry in result.get("trace") or ():
        _say(f"  layer {entry['layer']}: {_shares(entry)}")


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


def _number_or_word(text: str) -> float | str:
    """A number where it is one; what it may be is checked with the other options."""
    try:
        return float(text)
    except ValueError:
        return text


# --- looking ----------------------------------------------------------------------------------------------------


@cli.command(
    epilog=_example(
        "edge-runtime gateway --topology topology.toml",
        "edge-runtime gateway --listen 0.0.0.0:8000 --api-key-file api.key",
    )
)
@topology_option
@click.option(
    "--listen", "address", default="127.0.0.1:8000", show_default=True, help="host:port to serve HTTP on."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help="The first line is the key that clients send as bearer token; required unless only this machine is served.",
)
@click.option("--model-name", default=None, help="What clients call the model.  [default: its folder's name]")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Seconds that a request waits for a cluster that loads.",
)
def gateway(
    topology: Path | None, address: str, api_key_file: Path | None, model_name: str | None, wait_s: float
) -> None:
    """Serve the OpenAI API over HTTP until Ctrl-C: chat completions, completions, models."""
    from edge_runtime.gateway import server
    from edge_runtime.gateway.answering import Answering
    from edge_runtime.gateway.app import Gateway
    from edge_runtime.model.tokenizer import Tokenizer
    from edge_runtime.weights.locate import whole_folder

    cluster = read_cluster(resolve_topology_path(topology))
    setup_logging("gateway")
    api_key = server.read_api_key(api_key_file, address)
    tokenizer = Tokenizer.open(whole_folder(cluster, _say))
    _client(cluster).close()  # what is wrong with its keys is said before anything is served
    name = model_name or Path(cluster.model).name
    served = Gateway(
        Answering(lambda: _client(cluster), wait_s),
        model=name,
        api_key=api_key,
        wall_s=wall_s,
        token_text=lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False),
    )
    with server.listen(address) as listening:
        host, port = listening.getsockname()[:2]
        _say(f"serving {name} at http://{host}:{port}/v1; stop with Ctrl-C")
        server.serve(served.app(), listening)


@cli.command(epilog=_example("edge-runtime status", "edge-runtime status --json"))
@topology_option
@json_option
def status(topology: Path | None, as_json: bool) -> None:
    """Show every node: roles, pid, state, memory planned and used."""
    from edge_runtime.tables import status_table

    cluster = _running_cluster(resolve_topology_path(topology))
    with _client(cluster) as client:
        _connect(client)
        body = client.status()
    click.echo(json.dumps(body, ensure_ascii=False) if as_json else status_table(body))


@cli.command(
    epilog=_example(
        "edge-runtime plan --topology testbed/scenarios/eight_nodes.toml",
        "edge-runtime plan edited.toml --topology topology.toml",
        "edge-runtime plan edited.toml --from topology.toml",
    )
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@topology_option
@click.option(
    "--from",
    "old",
    type=click.Path(path_type=Path),
    default=None,
    help="With FILE: the topology file to compare it with, instead of a running cluster.",
)
@json_option
def plan(file: Path | None, topology: Path | None, old: Path | None, as_json: bool) -> None:
    """Show what each node will hold, in bytes, and why. Starts nothing.

    With FILE: what that file would change in the running cluster (or in that of another file), and how long it would take.
    """
    if file is None and old is not None:
        raise click.UsageError("--from OLD compares it with FILE, which is missing")
    if file is not None:
        planned = _plan_between(old, file) if old is not None else _plan_running(file, topology)
        click.echo(json.dumps(planned.body) if as_json else planned.text)
        return
    from edge_runtime.coordinator.learned_routes import find_learned
    from edge_runtime.coordinator.routes import homes_of
    from edge_runtime.model.footprint import footprint
    from edge_runtime.tables import plan_body, plan_table
    from edge_runtime.weights.locate import located, open_model
    from topology.placement import plan_placement

    cluster = read_cluster(resolve_topology_path(topology))
    checkpoint = open_model(cluster, _say)
    parts = footprint(checkpoint, context_tokens=cluster.context_tokens)
    traits, routes = find_learned(located(cluster, checkpoint), parts, checkpoint.model_hash)
    traits, traffic = routes.joint(homes_of(cluster), traits)
    cores = {node.name: float(os.cpu_count() or 1) for node in cluster.nodes if is_loopback(node.address)}
    placement = plan_placement(cluster, parts, cores=cores, traits=traits, traffic=traffic)
    body = plan_body(cluster, parts, placement, traits, cores)
    click.echo(json.dumps(body) if as_json else plan_table(body))


def _plan_between(old: Path, file: Path) -> "Planned":
    """What one file would change of another, if that one ran as it is."""
    from edge_runtime.coordinator.deploy import Plan, plan_for
    from edge_runtime.coordinator.learned_routes import find_learned
    from edge_runtime.coordinator.preview import preview_of
    from edge_runtime.model.footprint import footprint
    from edge_runtime.weights.locate import located, open_model

    before, after = read_cluster(old), read_cluster(file)
    checkpoint = open_model(after, _say)
    parts = footprint(checkpoint, context_tokens=after.context_tokens)
    traits, routes = find_learned(located(before, checkpoint), parts, checkpoint.model_hash)
    placement = plan_for(before, parts, before.node_names, traits=traits, joint=routes.joint)
    traits, routes = find_learned(located(after, checkpoint), parts, checkpoint.model_hash)
    placed = plan_for(
        after, parts, after.node_names, placement, placement.epoch + 1, traits, joint=routes.joint
    )
    plan = Plan(after, placed)
    return preview_of(before, placement, before.node_names, plan, parts, traits)


def _plan_running(file: Path, topology: Path | None) -> "Planned":
    cluster = read_cluster(file, needs_model=False)
    running = _running_cluster(_running_path(file, topology))
    with _client(running) as client:
        try:
            _connect(client)
        except DeadlinePassed as error:
            raise ClusterError(f"{error}; for a cluster that does not run, give --from OLD") from error
        return _asked(lambda: client.plan(file.read_text(encoding="utf-8-sig"), cluster.source))


def _running_path(file: Path, topology: Path | None) -> Path:
    """The file of the running cluster: the one that was named, else the very file that is to be applied."""
    named = topology is not None or os.environ.get(TOPOLOGY_VARIABLE)
    return resolve_topology_path(topology if named else file)


def _asked(ask: "Callable[[], Planned]") -> "Planned":
    """What is refused for the file's sake is the user's to mend."""
    try:
        return ask()
    except Refusal as refusal:
        if refusal.reason != "topology":
            raise
        raise TopologyError(str(refusal)) from refusal


# --- changing ---------------------------------------------------------------------------------------------------


@cli.command(
    epilog=_example(
        "edge-runtime apply topology.toml",
        "edge-runtime apply edited.toml --topology topology.toml",
        "edge-runtime apply topology.toml --watch",
    )
)
@click.argument("file", type=click.Path(path_type=Path))
@topology_option
@click.option(
    "--dry-run", is_flag=True, help="Only show what would change, as `edge-runtime plan FILE` does."
)
@click.option("--watch", is_flag=True, help="Apply FILE again after each edit, until Ctrl-C.")
def apply(file: Path, topology: Path | None, dry_run: bool, watch: bool) -> None:
    """Change the running cluster to what FILE says, while it answers.

    The running cluster is that of --topology, else of FILE itself. Where it was started by `up` on this machine, nodes that
    FILE adds are started and those that it removes are stopped. A file that is refused changes nothing.
    """
    from edge_runtime import changes

    file = file.absolute()
    if watch and dry_run:
        raise click.UsageError("--watch and --dry-run exclude each other")
    if watch:
        running = _running_path(file, topology)  # one that is not there is told at once
        _say(f"watching {file}; stop with Ctrl-C")
        changes.watch(file, SystemClock(), lambda: _apply(file, running, dry_run=False), _say)
    _apply(file, _running_path(file, topology), dry_run=dry_run)


def _apply(file: Path, running: Path, *, dry_run: bool) -> None:
    from edge_runtime import changes, launch

    clock, wanted = SystemClock(), read_cluster(file, needs_model=False)
    text = file.read_text(encoding="utf-8-sig")
    directory = state_dir(running)
    local = launch.LocalCluster(directory, {})
    with _client(_running_cluster(running)) as client:
        _connect(client)
        _say(_asked(lambda: client.plan(text, str(file))).text)
        if dry_run:
            return
        before = [found["name"] for found in client.status()["nodes"]]
        epoch = changes.begin(lambda: client.apply(text, str(file)), clock, _say)
        if not epoch:
            click.echo("nothing to change")
            return
        added = [name for name in wanted.node_names if name not in before]
        if added and launch.runs_here(directory):
            _say(f"starting {', '.join(added)}")
            local = launch.start_nodes(wanted, added, file, directory)
        elif added:
            names = ", ".join(added)
            _say(f"on the machine of each of {names}, run: edge-runtime node NAME --topology {file}")
        try:
            click.echo(changes.follow(client, epoch, clock, _say, local.ended_line))
        except ClusterError:
            launch.await_end(directory, list(local.processes), clock, _say)
            raise
    removed = [name for name in before if name not in wanted.node_names]
    if stopped := launch.await_end(directory, removed, clock, _say):
        _say(f"stopped {', '.join(stopped)}")
    if file == running:
        _remember(running)
    else:
        _say(f"{running} is as it was: `down` and `up` go back to it")


@cli.command(epilog=_example("edge-runtime doctor", "edge-runtime doctor --topology topology.toml"))
@topology_option
@json_option
def doctor(topology: Path | None, as_json: bool) -> None:
    """Check this machine, the kernels, the topology file, and whether its peers can be reached."""
    from edge_runtime.doctor import examine

    findings = []
    for finding in examine(topology, SystemClock()):
        findings.append(finding)
        if not as_json:
            click.echo(f"{'ok  ' if finding.is_well else 'FAIL'}  {finding.what}: {finding.detail}")
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings]))
    if not all(finding.is_well for finding in findings):
        sys.exit(min(finding.exit_code for finding in findings if not finding.is_well))


@cli.group(epilog=_example("edge-runtime keys new --topology topology.toml"))
def keys() -> None:
    """Make the keys with which machines recognise one another."""


@keys.command("new", epilog=_example("edge-runtime keys new", "edge-runtime keys new laptop"))
@click.argument("names", nargs=-1)
@topology_option
@click.option(
    "--folder", type=click.Path(path_type=Path), default=None, help="Where to; default: the file's `keys`."
)
def keys_new(names: tuple[str, ...], topology: Path | None, folder: Path | None) -> None:
    """Make a key pair for each of NAMES; without NAMES for coordinator, client and every node of the file."""
    from edge_runtime.transport.keys import new_keys

    is_unused = False
    if not names or folder is None:
        cluster = read_cluster(resolve_topology_path(topology), needs_model=False)
        is_unused = cluster.keys is None
        names = names or ("coordinator", "client", *cluster.node_names)
        folder = folder or Path(cluster.keys or Path(cluster.source).parent / "keys")
    for path in new_keys(folder, names):
        click.echo(str(path))
    _say("copy *.key to every machine; NAME.key_secret belongs on NAME's machine alone")
    if is_unused:
        _say(f'they are not used yet: write keys = "{folder.name}" in [cluster] of {cluster.source}')


# --- shared -----------------------------------------------------------------------------------------------------


def _say(line: str) -> None:
    """A line for the person, beside the answer on standard output."""
    click.echo(line, err=True)


def _running_cluster(path: Path) -> Cluster:
    """What is needed to reach a cluster that runs: from its file, or from the file as it was if it has faults by now."""
    try:
        return read_cluster(path, needs_model=False)
    except TopologyError as error:
        text = last_good_text(path)
        if text is None:
            raise
        _say(f"{error}\nthe file as it was when the cluster was started or last changed is used instead")
        return read_cluster_text(text, path, needs_model=False)


def _remember(path: Path) -> None:
    """Keep the file that the cluster runs by; where that cannot be, commands need the file without faults."""
    with contextlib.suppress(OSError):
        remember_good(path, path.read_text(encoding="utf-8-sig"))


def _keys(cluster: Cluster, name: str) -> "Keys | None":
    from edge_runtime.transport.keys import load_keys

    return load_keys(Path(cluster.keys), name) if cluster.keys else None


def _shape_links(shape: bool, cluster: Cluster, name: str) -> None:
    """Before the daemon opens its sockets."""
    if shape:
        from edge_runtime.transport.shaping import shape_this_process

        shape_this_process(cluster, name, SystemClock())


def _client(cluster: Cluster) -> "Client":
    from edge_runtime.client import Client

    return Client(cluster.coordinator, _keys(cluster, "client"), SystemClock(), cluster.name)


def _connect(client: "Client") -> None:
    """Greet the coordinator; a wait for it is shown after 2 s and over after 5."""
    try:
        client.connect(QUIET_S)
    except DeadlinePassed:
        _say(f"waiting for the coordinator at {client.address}")
        client.connect(CONNECT_S - QUIET_S)


def _interrupt_on(*numbers: signal.Signals) -> None:
    """Let these signals do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        signal.signal(number, interrupt)


def _ignore(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _stop_on_signal(daemon: Any) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.stop())


def main() -> NoReturn:
    """Run a command; what we foresee is one sentence and an exit code, anything else is ours and shows itself."""
    try:
        cli(prog_name="edge-runtime", standalone_mode=False)
        code = EXIT_DONE
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        code = EXIT_USER
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "edge-runtime"
        _say(f"error: {error.format_message().rstrip('.')}; see {path} --help")
        code = EXIT_USER
    except click.ClickException as error:
        _say(f"error: {error.format_message()}")
        code = EXIT_USER
    except TopologyError as error:
        _say(f"error: {error}")
        code = EXIT_USER
    except EdgeError as error:
        _say(f"error: {error}")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE  # the reader went away
    except OSError as error:
        if error.errno in NO_RIGHT and error.filename is not None:
            _say(f"error: {error.filename} cannot be used: {error.strerror}")
            sys.exit(EXIT_USER)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _say(f"error: the output cannot be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_USER
    sys.exit(code)
