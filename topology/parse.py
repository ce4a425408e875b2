"""The text of a topology file to a `Cluster`, or to all of its faults at once.

Knows no disk: whether a folder is there is asked through two functions that `files.py` passes in.
"""

from collections.abc import Callable

from topology import readers, units
from topology.cluster import (
    DECODE,
    EXPERTS,
    GPU_RESERVE_BYTES,
    ROLES,
    Cluster,
    Link,
    Node,
    Pin,
    Routing,
    did_you_mean,
    is_loopback,
)
from topology.errors import ClusterFileError
from topology.ids import ExpertId
from topology.page import Key, Page, Values
from topology.toml_lines import Path

_SIZE = readers.read_quantity(units.parse_bytes, "8 GiB")
_RATE = readers.read_quantity(units.parse_rate, "100 Mbit/s")
_BYTE_RATE = readers.read_quantity(units.parse_byte_rate, "8 GB/s")
_FLOPS = readers.read_quantity(units.parse_flops, "120 GFLOP/s")
_DURATION = readers.read_quantity(units.parse_duration, "2 ms")

_CLUSTER_KEYS = {
    "name": Key("name", readers.read_name),
    "model": Key("model", readers.read_text),
    "coordinator": Key("coordinator", readers.read_address),
    "memory_ratio": Key("memory_ratio", readers.read_memory_ratio),
    "plan": Key("plan", readers.read_plan),
    "stages": Key("stages", readers.read_stages),
    "placement": Key("placement", readers.read_placement),
    "selector": Key("selector", readers.read_selector),
    "drop": Key("drop", readers.read_flag),
    "defer": Key("defer", readers.read_flag),
    "look_ahead": Key("look_ahead", readers.read_flag),
    "calibration": Key("calibration", readers.read_text),
    "sub_experts": Key("sub_experts", readers.read_flag),
    "gate": Key("gate", readers.read_gate),
    "split_tiers": Key("split_tiers", readers.read_flag),
    "keys": Key("keys", readers.read_text),
    "process_reserve": Key("process_reserve_bytes", _SIZE),
    "kv_tokens": Key("kv_tokens", readers.read_count),
    "max_batch_rows": Key("max_batch_rows", readers.read_count),
    "max_requests": Key("max_requests", readers.read_count),
    "context_tokens": Key("context_tokens", readers.read_count),
    "call_deadline": Key("call_deadline_s", _DURATION),
    "weights_rate": Key("weights_rate_bps", _RATE),
    "heartbeat": Key("heartbeat_s", _DURATION),
    "lost_after": Key("lost_after_s", _DURATION),
}
_DEFAULT_NODE_KEYS = {
    "roles": Key("roles", readers.read_roles),
    "memory": Key("memory_bytes", _SIZE),
    "device": Key("device", readers.read_device),
    "weight_format": Key("weight_format", readers.read_weight_format),
    "trunk_format": Key("trunk_format", readers.read_weight_format),
    "threads": Key("threads", readers.read_threads),
    "cpu_share": Key("cpu_share", readers.read_cpu_share),
    "memory_bandwidth": Key("memory_bytes_per_s", _BYTE_RATE),
    "compute": Key("flops", _FLOPS),
}
_NODE_KEYS = {
    "name": Key("name", readers.read_name),
    "address": Key("address", readers.read_address),
    **_DEFAULT_NODE_KEYS,
}
_DEFAULT_LINK_KEYS = {"rtt": Key("rtt_s", _DURATION), "bandwidth": Key("bandwidth_bps", _RATE)}
_LINK_KEYS = {"between": Key("between", readers.read_pair), **_DEFAULT_LINK_KEYS}
_ROUTING_KEYS = {
    "policy": Key("policy", readers.read_routing),
    "affinity": Key("affinity", readers.read_affinity),
    "tau": Key("tau", readers.read_tau),
    "min_candidates": Key("min_candidates", readers.read_count),
    "count_speed": Key("count_speed", readers.read_flag),
    "count_transfer": Key("count_transfer", readers.read_flag),
    "refit": Key("refit", readers.read_flag),
    "lanes": Key("lanes", readers.read_flag),
    "lane_share": Key("lane_share", readers.read_lane_share),
    "lane_window": Key("lane_window", readers.read_count),
    "lane_ratio": Key("lane_ratio", readers.read_lane_ratio),
    "lane_dwell": Key("lane_dwell_s", _DURATION),
    "lane_freeze": Key("lane_freeze_s", _DURATION),
}
_PIN_KEYS = {
    "expert": Key("expert", readers.read_expert),
    "layer": Key("layer", readers.read_position),
    "index": Key("index", readers.read_position),
    "node": Key("node", readers.read_text),
}


def parse_cluster(
    text: str,
    *,
    source: str = "topology.toml",
    find_model: Callable[[str], str] = str,
    find_folder: Callable[[str], str] = str,
) -> Cluster:
    """Read a topology file's text; `ClusterFileError` holds every fault, each with its line and key.

    source      how the file is called in messages
    find_model  the value of `model` -> the folder's path; `ValueError` says why it will not do
    find_folder likewise for `keys` and `calibration`, which need not be there yet
    """
    page = Page(text, source)
    page.refuse_unknown_tables()

    cluster = page.read_table("cluster", _CLUSTER_KEYS)
    page.resolve(cluster, "model", find_model)
    page.resolve(cluster, "keys", find_folder)
    page.resolve(cluster, "calibration", find_folder)
    default_node = page.read_table("default_node", _DEFAULT_NODE_KEYS)
    nodes = [{**default_node, **node} for node in page.read_tables("node", _NODE_KEYS)]
    default_link = page.read_table("default_link", _DEFAULT_LINK_KEYS)
    links = page.read_tables("link", _LINK_KEYS)
    pins = page.read_tables("pin", _PIN_KEYS)
    routing = page.read_table("routing", _ROUTING_KEYS)

    _check_cluster(page, cluster)
    _check_nodes(page, cluster, nodes)
    _check_links(page, nodes, links)
    _check_pins(page, nodes, pins)
    for key in ("gate", "split_tiers"):
        if cluster.get(key) and not cluster.get("sub_experts"):
            page.fault(("cluster", key), "counts only with sub_experts = true")
    for index, node in enumerate(nodes):
        _check_device(page, index, node, cluster)
    if routing.get("lanes") and not cluster.get("sub_experts"):
        page.fault(("routing", "lanes"), "lanes are of tiers, so they need sub_experts = true in [cluster]")
    for key, meant in _ROUTING_KEYS.items():
        if key.startswith("lane_") and meant.field in routing and not routing.get("lanes"):
            page.fault(("routing", key), "counts only with lanes = true")
    if page.faults:
        raise ClusterFileError(source, page.faults)

    link_default = Link("*", "*", **default_link)
    return Cluster(
        **cluster,
        nodes=tuple(Node(**node) for node in nodes),
        default_link=link_default,
        links=tuple(_link(link, link_default) for link in links),
        pins=tuple(Pin(expert, pin["node"]) for pin in pins if (expert := _pinned(pin))),
        routing=Routing(**routing),
        source=source,
        lines={key: page.line_of(("routing", key)) for key in _ROUTING_KEYS if page.has("routing", key)},
    )


def _check_cluster(page: Page, cluster: Values) -> None:
    if "cluster" not in page.document:
        page.fault((), "there is no table [cluster]; it needs name and model")
    elif "cluster" not in page.malformed:
        page.require(("cluster",), "name", example='name = "home"')
        page.require(("cluster",), "model", example='model = "models/edge-moe-demo", a folder')
    if "stages" in cluster and cluster.get("plan", Cluster.plan) != "stages":
        page.fault(("cluster", "stages"), 'counts only with plan = "stages"')
    heartbeat_s = cluster.get("heartbeat_s", Cluster.heartbeat_s)
    lost_after_s = cluster.get("lost_after_s", Cluster.lost_after_s)
    if lost_after_s <= 2 * heartbeat_s:
        message = (
            f"a node would be lost after {units.format_duration(lost_after_s)} of silence, at a heartbeat of "
            f"{units.format_duration(heartbeat_s)}: one late heartbeat would do; allow more than two"
        )
        page.fault(("cluster", "lost_after" if "lost_after_s" in cluster else "heartbeat"), message)


def _check_nodes(page: Page, cluster: Values, nodes: list[Values]) -> None:
    if not nodes and "node" not in page.malformed:
        page.fault((), "there is no [[node]]; write one for each machine, with name, address and memory")
    for index in range(len(nodes)):
        page.require(("node", index), "name", example='name = "desk"')
        page.require(("node", index), "address", example='address = "127.0.0.1:5551"')
        page.require(("node", index), "memory", example='memory = "8 GiB"', elsewhere=("default_node",))

    coordinator = cluster.get("coordinator", Cluster.coordinator)
    _refuse_twice(page, [(("node", i, "name"), node.get("name")) for i, node in enumerate(nodes)], "name")
    addresses = [(("node", i, "address"), node.get("address")) for i, node in enumerate(nodes)]
    _refuse_twice(page, [(("cluster", "coordinator"), coordinator), *addresses], "address")
    if not page.has("cluster", "keys"):
        for path, address in [(("cluster", "coordinator"), coordinator), *addresses]:
            if address and not is_loopback(address):
                page.fault(
                    path,
                    f"{address} can be reached from other machines, and [cluster] has no keys: write "
                    'keys = "keys" there and run "edge-runtime keys new"',
                )

    shared = cluster.get("process_reserve_bytes", Cluster.process_reserve_bytes)
    for index, node in enumerate(nodes):
        device = node.get("device", Node.device)
        reserve = shared + (0 if device == "cpu" else GPU_RESERVE_BYTES)
        if node.get("memory_bytes", reserve + 1) <= reserve:
            memory, kept, of_gpu = units.in_one_unit(node["memory_bytes"], reserve, GPU_RESERVE_BYTES)
            beside = "" if device == "cpu" else f", and {of_gpu} that a GPU takes"
            page.fault(
                ("node", index, "memory"),
                f"{memory} leave nothing for the model: the process has {kept} reserved ([cluster] process_reserve{beside})",
            )

    readable = [node.get("roles", frozenset(ROLES)) for node in nodes]
    unreadable = any("roles" in fault.key for fault in page.faults)
    for role, consequence in ((DECODE, "could answer a request"), (EXPERTS, "could hold an expert")):
        if nodes and not unreadable and not any(role in roles for roles in readable):
            page.fault(("node", 0, "roles"), f'no node has the role "{role}", so none {consequence}')


def _check_device(page: Page, index: int, node: Values, cluster: Values) -> None:
    """What no GPU does."""
    if node.get("device", Node.device) == "cpu":
        return
    for key in ("weight_format", "trunk_format"):
        if node.get(key) == "bfloat16x2":
            page.fault(("node", index, key), "bfloat16x2 is for processors; nodes on a GPU keep bfloat16")
    if cluster.get("gate") == "linear":
        page.fault(("node", index, "device"), 'the tuned gate (gate = "linear") runs on processors only')


def _check_links(page: Page, nodes: list[Values], links: list[Values]) -> None:
    names = [node["name"] for node in nodes if "name" in node]
    pairs: list[tuple[Path, str | None]] = []
    for index, link in enumerate(links):
        path: Path = ("link", index, "between")
        page.require(("link", index), "between", example='between = ["desk", "attic"]')
        for name in link.get("between", ()):
            if names and name not in names:
                page.fault(
                    path,
                    f'no node is called "{name}"{did_you_mean(name, names)}; there are {", ".join(names)}',
                )
        if "between" in link:
            pairs.append((path, " and ".join(sorted(link["between"]))))
    _refuse_twice(page, pairs, "link between")


def _check_pins(page: Page, nodes: list[Values], pins: list[Values]) -> None:
    """An expert by name or by layer and index, on a node that there is and that may hold experts, once."""
    by_name = {node["name"]: node for node in nodes if "name" in node}
    taken: list[tuple[Path, str | None]] = []
    for index, pin in enumerate(pins):
        path: Path = ("pin", index)
        page.require(path, "node", example='node = "desk"')
        name = pin.get("node")
        if name is not None and by_name and name not in by_name:
            known = ", ".join(by_name)
            page.fault(
                (*path, "node"), f'no node is called "{name}"{did_you_mean(name, by_name)}; there are {known}'
            )
        elif name is not None and EXPERTS not in by_name.get(name, {}).get("roles", {EXPERTS}):
            page.fault(
                (*path, "node"), f'{name} does not have the role "{EXPERTS}", so it can hold no expert'
            )
        written = page.document["pin"][index]
        if "expert" in written and ("layer" in written or "index" in written):
            page.fault((*path, "expert"), "write either expert, or layer and index")
        elif "expert" not in written and not {"layer", "index"} <= set(written):
            page.fault(path, 'which expert is missing; write expert = "3.17", or layer = 3 and index = 17')
        pinned = _pinned(pin)
        taken.append((path, f"{pinned.layer}.{pinned.index} on {name}" if pinned and name else None))
    _refuse_twice(page, taken, "pin of expert")


def _pinned(pin: Values) -> ExpertId | None:
    if "expert" in pin:
        return pin["expert"]
    return ExpertId(pin["layer"], pin["index"]) if {"layer", "index"} <= set(pin) else None


def _refuse_twice(page: Page, entries: list[tuple[Path, str | None]], what: str) -> None:
    """Fault every entry whose value an earlier one has; `localhost` and 127.0.0.1 are one machine."""
    first: dict[str, Path] = {}
    for path, value in entries:
        if value is None:
            continue
        key = value.replace("localhost:", "127.0.0.1:")
        if key in first:
            earlier = first[key]
            where = f"line {page.line_of(earlier)} ({page.label(earlier)})"
            page.fault(path, f"{what} {value} is already taken in {where}")
        else:
            first[key] = path


def _link(values: Values, default: Link) -> Link:
    a, b = values.pop("between")
    return Link(a, b, **{"rtt_s": default.rtt_s, "bandwidth_bps": default.bandwidth_bps, **values})
