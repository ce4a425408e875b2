"""Tables for people: `status` and `plan`. Text only; whoever has the numbers passes them in."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.coverage import coverage_of
from topology.explain import explain
from topology.pin_conflicts import pin_conflicts
from topology.placement import Placement
from topology.rules import NEED_TRAITS
from topology.serving import default_counts, predict_serving
from topology.speeds import machines_of
from topology.stages import why_left_out
from topology.traits import ExpertTraits
from topology.units import format_byte_rate, format_duration, format_flops, format_rate

MIB = 2**20
CREDIBLE_BYTES_PER_S = 1e12
MAX_WIDTH = 2000  # characters of a line: nothing is ever folded


_STATES = {
    "ready": "ready",
    "degraded": "answers, but waits for {waiting_for}",
    "waiting": "waiting for {waiting_for}",
}


def status_table(body: dict[str, Any]) -> str:
    """The text of `edge-runtime status`."""
    requests = body["requests"]
    head = [
        f"cluster {body['cluster']}: "
        + _STATES[body["state"]].format(**body)
        + f", placement epoch {body['epoch']}",
        f"requests: {requests['in_flight']} in flight, {requests['finished']} finished, "
        f"{requests['failed']} failed, {requests['refused']} refused",
    ]
    if body["to_start"]:
        head.append(body["to_start"])
    routing = body.get("routing")
    if routing is not None:
        asked = sum(home["prompt_blocks"] for home in routing["homes"].values())
        hits = sum(home["hit_blocks"] for home in routing["homes"].values())
        sent = ", ".join(f"{name} {home['requests']}" for name, home in routing["homes"].items())
        head.append(f"routing: {routing['text']}" + (f"; sent: {sent}" if asked else ""))
        if routing.get("lanes"):
            head.append(_lanes_line(routing["lanes"]))
        if asked:
            head.append(f"prompt blocks that their home had already: {hits} of {asked}")
    if body["experts_without_host"]:
        head.append(f"{body['experts_without_host']} experts have no living host")
    head += [_group_line(group) for group in body["groups"] if len(group["stages"]) > 1]
    table = Table(box=None, pad_edge=False)
    for name in ("node", "roles", "state", "pid", "address"):
        table.add_column(name)
    for name in (
        "planned MiB",
        "used MiB",
        "experts",
        "KV blocks free",
        "in flight",
        "tokens",
        "calls served",
    ):
        table.add_column(name, justify="right")
    for node in body["nodes"]:
        report = node["report"]
        total = report.get("kv_blocks_total", 0)
        table.add_row(
            node["name"],
            ",".join(node["roles"]),
            node["state"],
            str(node["pid"] or "-"),
            node["address"],
            _mib(node["memory_planned_bytes"]),
            _mib(node["memory_used_bytes"]),
            str(node["experts"]),
            f"{report.get('kv_blocks_free', 0)} of {total}" if total else "-",
            str(node["in_flight"]),
            str(report.get("tokens_generated", 0)),
            str(report.get("calls_served", 0)),
        )
    faults = [f"{node['name']}: {node['fault']}" for node in body["nodes"] if node["fault"]]
    return "\n".join([*head, "", table_text(table), *faults, *_speed_lines(body)])


def _lanes_line(lanes: dict[str, Any]) -> str:
    """Who serves which tiers, and what went where."""
    if lanes["border"] is None:
        return "lanes: none, since fewer than two homes serve"
    lowest, highest = lanes["border"] - lanes["window"], lanes["border"] + lanes["window"]
    sent, crossed = lanes["requests"], lanes["crossings"]
    return (
        f"lanes: K below {lowest} at {', '.join(lanes['low'])} ({sent['low']} requests, {crossed['low']} crossed); "
        f"above {highest} at {', '.join(lanes['high'])} ({sent['high']}, {crossed['high']} crossed); "
        f"between at either ({sent['either']}); border {lanes['border']}, moved {lanes['moves']} times"
    )


def _speed_lines(body: dict[str, Any]) -> list[str]:
    """Declared and measured speeds, where anything was measured."""
    lines = []
    for node in body["nodes"]:
        speed = node["speed"]
        if speed["measured"] is None:
            continue
        found, said = speed["measured"], speed["declared"]
        parts = [
            "memory " + _both(_byte_rate, said["memory_bytes_per_s"], found["memory_bytes_per_s"]),
            "compute " + _both(format_flops, said["flops"], found["flops"]),
        ]
        if found["experts"] is not None:
            parts.append(f"experts {_rough(_byte_rate, found['experts']['bytes_per_s'])}")
        parts.append(f"a call {_rough(format_duration, found['call_overhead_s'])}")
        lines.append(f"{node['name']}: {', '.join(parts)}")
    for link in body["links"]:
        said, found = link["declared"], link["measured"]
        rtt = _rough(format_duration, found["rtt_s"]) if found["rtt_s"] else "too short to tell,"
        rate = _rough(format_rate, found["bandwidth_bps"])
        lines.append(
            f"{link['between'][0]} - {link['between'][1]}: round trip {_rough(format_duration, said['rtt_s'])} declared, "
            f"{rtt} measured; {_rough(format_rate, said['bandwidth_bps'])} declared, "
            f"{'over ' if found['rate_is_bound'] else ''}{rate} measured"
        )
    return ["", "speeds, measured:", *lines] if lines else []


def _byte_rate(bytes_per_s: float) -> str:
    """What no memory does is what a fit leaves of a time that is all arithmetic: small experts lie in cache."""
    return (
        format_byte_rate(bytes_per_s) if bytes_per_s < CREDIBLE_BYTES_PER_S else "no time beside arithmetic"
    )


def _both(told: Callable[[float], str], declared: float | None, measured: float) -> str:
    return ("" if declared is None else f"{_rough(told, declared)} declared, ") + _rough(told, measured)


def _rough(told: Callable[[float], str], value: float) -> str:
    """To three digits: a measurement has no more."""
    return told(float(f"{value:.3g}"))


def _group_line(group: dict[str, Any]) -> str:
    """A decode group whose layers are split."""
    stages = ", ".join(
        f"{stage['node']} layers {stage['first_layer']}-{stage['last_layer']}" for stage in group["stages"]
    )
    state = "serves" if group["serves"] else "lacks a node"
    return f"group of {len(group['stages'])} stages: {stages}: {state}, {group['in_flight']} in flight"


def plan_body(
    cluster: Cluster,
    footprint: ModelFootprint,
    placement: Placement,
    traits: ExpertTraits | None = None,
    cores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """What `plan --json` prints: every node's share in bytes, and the whole; `coverage` where a model is calibrated.

    cores  node -> processors of its machine, for those that are known
    """
    copies = placement.copies()
    predicted = predict_serving(
        footprint,
        machines_of(cluster, cores=cores),
        placement,
        default_counts(cluster.max_requests),
        demand=traits.demand() if traits is not None and placement.rule in NEED_TRAITS else None,
    )
    return {
        "cluster": cluster.name,
        "model": cluster.model,
        "epoch": placement.epoch,
        "experts": len(copies),
        "copies": sum(copies.values()),
        "memory_ratio": cluster.memory_ratio,
        "replicated": sum(count > 1 for count in copies.values()),
        "placement": placement.rule,
        "load_bytes": sum(plan.trunk_bytes + plan.expert_bytes for plan in placement.nodes),
        "coverage": asdict(coverage_of(placement, traits)) if traits is not None else None,
        "pin_conflicts": pin_conflicts(cluster, traits) if traits is not None else [],
        "predicted": [
            {
                "requests": one.requests,
                "seconds": one.seconds,
                "tokens_per_s": one.tokens_per_s,
                "peers_per_layer": one.peers_per_layer,
            }
            for one in predicted
            if math.isfinite(one.seconds)
        ],
        "nodes": [
            asdict(row)
            for row in explain(
                placement, cluster, footprint, why_left_out(cluster, footprint, placement, cores=cores)
            )
        ],
    }


def plan_table(body: dict[str, Any]) -> str:
    """The text of `edge-runtime plan`."""
    table = Table(box=None, pad_edge=False)
    table.add_column("node")
    table.add_column("roles")
    for name in ("process", "trunk", "KV", "workspace", "experts", "bytes", "planned", "memory", "free"):
        table.add_column(name, justify="right")
    for row in body["nodes"]:
        table.add_row(
            row["name"],
            ",".join(row["roles"]),
            *(_mib(row[f"{part}_bytes"]) for part in ("process", "trunk", "kv", "workspace")),
            str(row["num_experts"]),
            *(_mib(row[f"{part}_bytes"]) for part in ("expert", "planned", "memory", "free")),
        )
    reasons = [f"{row['name']}: {row['why']}" for row in body["nodes"]]
    head = (
        f"cluster {body['cluster']}: {body['experts']} experts in {body['copies']} copies "
        f"(at most {body['memory_ratio']:g} per expert), {body['replicated']} of them more than once; sizes in MiB"
    )
    predicted = [
        f"{one['requests']} at once {one['seconds'] * 1e3:.3g} ms ({one['tokens_per_s']:.0f} tok/s)"
        for one in body["predicted"]
    ]
    told = f"between two tokens of a request, as predicted: {', '.join(predicted)}"
    if any(one["peers_per_layer"] for one in body["predicted"]):
        peers = ", ".join(f"{one['peers_per_layer']:.1f}" for one in body["predicted"])
        told += f"; a step calls {peers} other nodes in a layer"
    return "\n".join(
        [
            *(head, _rule_line(body), "", table_text(table), "", *reasons),
            *(f"pins against groups: {sentence}" for sentence in body["pin_conflicts"]),
            *([told] if predicted else []),
        ]
    )


def _rule_line(body: dict[str, Any]) -> str:
    """By what rule experts were placed, what has to be loaded, and what part of the choices finds its expert at home."""
    line = f"placed by {body['placement']}, {_mib(body['load_bytes'])} MiB to load in all"
    found = body["coverage"]
    if found is None:
        return f"{line}; the model is not calibrated, so nothing is predicted of what is served where"
    together = "" if found["apart"] == 1 else f"; {1 - found['apart']:.1%} of groups stand whole on one node"
    return (
        f"{line}; predicted where requests live: {found['exact']:.1%} of choices served exactly, {found['covered']:.1%} "
        f"with stand-ins of the same similarity group{together}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def table_text(table: Table) -> str:
    """A table as wide as it needs, whatever the terminal, so that pipes and people see the same.

    Cells are plain text: an address like [fe80::a:1] would else lose its `:a:` to an emoji.
    """
    console = Console(width=MAX_WIDTH, color_system=None, force_terminal=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
