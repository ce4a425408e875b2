"""Clusters and models for the planner's tests, and what it predicts for a scenario, as a table for people.

`python -m tests.support.planning` prints the table of issue 4's scenario: 5 ms round trips, 200 Mbit/s.
"""

from dataclasses import replace
from itertools import permutations

from topology import costs
from topology.cluster import Cluster, Link, Node
from topology.costs import ModelFootprint
from topology.errors import PlacementError
from topology.layout import lay_out
from topology.node_plan import GroupPlan, Stage
from topology.speeds import Machines, machines_of
from topology.stages import choose_plan
from topology.step_time import GroupPrediction, PlacementClock
from topology.workload import Workload

MIB = 2**20
ALL = frozenset({"prefill", "decode", "experts"})
EXPERTS_ONLY = frozenset({"experts"})


def model(
    *,
    layers: int = 6,
    experts: int = 32,
    top_k: int = 4,
    width: int = 256,
    inner: int = 96,
    vocab: int = 8192,
) -> ModelFootprint:
    """A bfloat16 model with float32 KV of half the width; by default the demo model, nearly."""
    expert = 2 * 3 * width * inner
    layer = 2 * (3 * width * width + experts * width) + 8 * width
    return ModelFootprint(
        num_layers=layers,
        moe_layers=tuple(range(layers)),
        experts_per_layer=experts,
        expert_bytes={"as_stored": (expert,) * layers, "float32": (2 * expert,) * layers},
        embed_bytes=2 * vocab * width,
        head_bytes=4 * width,
        head_is_tied=True,
        layer_bytes=(layer,) * layers,
        kv_bytes_per_token=(4 * width,) * layers,
        context_tokens=512,
        table_bytes=128 * 1024,
        row_workspace_bytes=40 * width,
        request_workspace_bytes=4 * vocab,
        expert_row_workspace_bytes=4 * width * (1 + top_k),
        width=width,
        top_k=top_k,
    )


DEMO = model()
QWEN3_30B = replace(
    model(layers=48, experts=128, top_k=8, width=2048, inner=768, vocab=151_936), context_tokens=4096
)


def cluster(*nodes: Node, rtt_s: float = 0.001, bandwidth_bps: float = 1e9, **changes: object) -> Cluster:
    values: dict = {
        "name": "test",
        "model": "model",
        "process_reserve_bytes": 10 * MIB,
        "kv_tokens": 2048,
        "max_batch_rows": 64,
        "plan": "auto",
        "default_link": Link("*", "*", rtt_s, bandwidth_bps),
    }
    return Cluster(nodes=nodes, **{**values, **changes})


def node(
    name: str,
    memory_bytes: float,
    roles: frozenset[str] = ALL,
    *,
    rate: float | None = None,
    weight_format: str = "as_stored",
    port: int = 6000,
) -> Node:
    """A node; `rate` is its memory bandwidth in bytes per second."""
    return Node(
        name=name,
        address=f"127.0.0.1:{port}",
        memory_bytes=int(memory_bytes),
        roles=roles,
        memory_bytes_per_s=rate,
        weight_format=weight_format,
    )


def needed_bytes(
    cluster: Cluster, footprint: ModelFootprint, first: int, last: int, share: float = 1.0
) -> int:
    """Memory of a node that runs layers [first, last) and holds that share of their experts, at the KV asked for."""
    probe = node("probe", 0)
    blocks = costs.kv_blocks(footprint, max(cluster.kv_tokens, costs.context_limit(cluster, footprint)))
    experts = footprint.experts_per_layer * sum(footprint.expert_bytes["as_stored"][first:last])
    return (
        cluster.process_reserve_bytes
        + costs.trunk_bytes(footprint, first, last)
        + blocks * costs.kv_block_bytes(footprint, first, last)
        + costs.workspace_bytes(cluster, probe, footprint)
        + int(share * experts)
    )


def shapes(names: tuple[str, ...], num_layers: int) -> list[GroupPlan]:
    """Every single group there is: every ordered choice of nodes and every cut of the layers between them."""
    found = []

    def cuts(count: int, first: int) -> list[list[tuple[int, int]]]:
        if count == 1:
            return [[(first, num_layers)]]
        return [
            [(first, end), *rest]
            for end in range(first + 1, num_layers - count + 2)
            for rest in cuts(count - 1, end)
        ]

    for count in range(1, min(len(names), num_layers) + 1):
        for chosen in permutations(names, count):
            for ranges in cuts(count, 0):
                found.append(
                    GroupPlan(tuple(Stage(n, a, b) for n, (a, b) in zip(chosen, ranges, strict=True)))
                )
    return found


def best_by_trying_all(
    cluster: Cluster, footprint: ModelFootprint, machines: Machines, workload: Workload
) -> float:
    """Seconds per token of the best plan with one group, or every node a home, each laid out with every set of hosts."""
    names = tuple(n.name for n in cluster.nodes if "decode" in n.roles)
    able = tuple(n.name for n in cluster.nodes if "experts" in n.roles)
    plans: list[tuple[GroupPlan, ...] | None] = [
        None,
        *((group,) for group in shapes(names, footprint.num_layers)),
    ]
    best = float("inf")
    for groups in plans:
        for bits in range(1, 2 ** len(able)):
            hosts = {name for index, name in enumerate(able) if bits >> index & 1}
            try:
                placement = lay_out(cluster, footprint, groups=groups, hosts=hosts)
            except PlacementError:
                continue
            clock = PlacementClock(footprint, machines, placement)
            best = min(
                best,
                workload.seconds(
                    lambda group, batch, clock=clock: clock.predict(group, batch, workload.context_tokens),
                    placement.groups,
                ),
            )
    return best


def even_stages(names: tuple[str, ...], num_layers: int) -> GroupPlan:
    """The layers in as many equal parts as there are names, as far as they divide."""
    ends = [round(num_layers * (index + 1) / len(names)) for index in range(len(names))]
    return GroupPlan(tuple(Stage(n, a, b) for n, a, b in zip(names, [0, *ends[:-1]], ends, strict=True)))


def fixed_plans(cluster: Cluster, footprint: ModelFootprint) -> dict[str, tuple[GroupPlan, ...]]:
    """The plans that are compared: solo or one home on the first node, 2 and 4 even stages."""
    names = tuple(n.name for n in cluster.nodes if "decode" in n.roles)
    counts = [count for count in (1, 2, 4) if count <= min(len(names), footprint.num_layers)]
    called = {1: "one home", 2: "2 stages", 4: "4 stages"}
    return {called[count]: (even_stages(names[:count], footprint.num_layers),) for count in counts}


def predictions(
    cluster: Cluster, footprint: ModelFootprint, *, batches: tuple[int, ...] = (1, 4, 16)
) -> list[tuple[str, int, float, GroupPrediction]]:
    """(plan, requests at once, seconds between a request's tokens, its fastest group's step at one request).

    Of a first node that holds everything, of each fixed plan, and of the planner's choice for so many requests.
    """
    machines = machines_of(cluster)
    ample = replace(
        cluster, nodes=(replace(cluster.nodes[0], memory_bytes=2**50, roles=ALL), *cluster.nodes[1:]), pins=()
    )
    alone = even_stages((ample.nodes[0].name,), footprint.num_layers)
    layouts = {"solo, if it fitted": lay_out(ample, footprint, groups=(alone,))}
    for name, groups in fixed_plans(cluster, footprint).items():
        try:
            layouts[name] = lay_out(cluster, footprint, groups=groups)
        except PlacementError:
            continue
    found = [(name, batch, placement) for name, placement in layouts.items() for batch in batches]
    for batch in batches:
        chosen = choose_plan(cluster, footprint, workload=Workload(batches=((batch, 1.0),)))
        groups = "; ".join(map(str, chosen.placement.groups))
        found.append((f"chosen: {chosen.kind}, {groups}", batch, chosen.placement))
    rows = []
    for name, batch, placement in found:
        clock = PlacementClock(footprint, machines, placement)
        seconds = Workload(batches=((batch, 1.0),)).seconds(
            lambda group, rows, clock=clock: clock.predict(group, rows), placement.groups
        )
        fastest = min((clock.predict(group, 1) for group in placement.groups), key=lambda p: p.latency_s)
        rows.append((name, batch, seconds, fastest))
    return rows


def prediction_table(cluster: Cluster, footprint: ModelFootprint) -> str:
    """The predictions as text, one row for each plan and number of requests."""
    lines = [f"{'plan':<72} {'requests':>8} {'ms/token':>9} {'tok/s':>8} {'calls':>6} {'hit':>5}"]
    for name, batch, seconds, step in predictions(cluster, footprint):
        calls = sum(stage.calls for stage in step.stages)
        hit = sum(stage.hit_rate for stage in step.stages) / len(step.stages)
        lines.append(
            f"{name[:72]:<72} {batch:>8} {seconds * 1e3:>9.2f} {batch / seconds:>8.1f} {calls:>6.2f} {hit:>5.2f}"
        )
    return "\n".join(lines)


def issue_scenario(
    footprint: ModelFootprint, *, share: float = 0.4, num_nodes: int = 4, rate: float | None = None
) -> Cluster:
    """Equal nodes with 5 ms and 200 Mbit/s between them, each with room for `share` of the experts beside a whole trunk."""
    empty = cluster(rtt_s=0.005, bandwidth_bps=200e6, kv_tokens=footprint.context_tokens)
    memory = needed_bytes(empty, footprint, 0, footprint.num_layers, share)
    return replace(
        empty, nodes=tuple(node(f"n{i}", memory, rate=rate, port=6001 + i) for i in range(num_nodes))
    )


if __name__ == "__main__":
    for title, footprint, rate in (
        ("the demo model", DEMO, 8e9),
        ("as large as Qwen3-30B-A3B, memory at 80 GB/s", QWEN3_30B, 80e9),
    ):
        for share in (0.3, 0.6):
            print(f"\n{title}: 4 nodes, each with room for {share:.0%} of the experts; 5 ms, 200 Mbit/s")
            print(prediction_table(issue_scenario(footprint, share=share, rate=rate), footprint))
