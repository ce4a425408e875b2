"""The text of a topology file to a `Cluster`, or to all of its faults at once.

Knows no disk: whether a folder is there is asked through two functions that `files.py` passes in.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from topology import readers, units
from topology.cluster import DECODE, EXPERTS, ROLES, Cluster, Link, Node, did_you_mean, is_loopback
from topology.errors import ClusterFileError, Fault
from topology.toml_lines import Path, find_lines


class _Key(NamedTuple):
    field: str  # of the dataclass
    read: readers.Reader


_SIZE = readers.read_quantity(units.parse_bytes, "8 GiB")
_RATE = readers.read_quantity(units.parse_rate, "100 Mbit/s")
_BYTE_RATE = readers.read_quantity(units.parse_byte_rate, "8 GB/s")
_FLOPS = readers.read_quantity(units.parse_flops, "120 GFLOP/s")
_DURATION = readers.read_quantity(units.parse_duration, "2 ms")

_CLUSTER_KEYS = {
    "name": _Key("name", readers.read_name),
    "model": _Key("model", readers.read_text),
    "coordinator": _Key("coordinator", readers.read_address),
    "memory_ratio": _Key("memory_ratio", readers.read_memory_ratio),
    "keys": _Key("keys", readers.read_text),
    "process_reserve": _Key("process_reserve_bytes", _SIZE),
    "kv_tokens": _Key("kv_tokens", readers.read_count),
    "max_batch_rows": _Key("max_batch_rows", readers.read_count),
    "max_requests": _Key("max_requests", readers.read_count),
    "context_tokens": _Key("context_tokens", readers.read_count),
    "call_deadline": _Key("call_deadline_s", _DURATION),
    "heartbeat": _Key("heartbeat_s", _DURATION),
    "lost_after": _Key("lost_after_s", _DURATION),
}
_DEFAULT_NODE_KEYS = {
    "roles": _Key("roles", readers.read_roles),
    "memory": _Key("memory_bytes", _SIZE),
    "device": _Key("device", readers.read_device),
    "weight_format": _Key("weight_format", readers.read_weight_format),
    "threads": _Key("threads", readers.read_count),
    "memory_bandwidth": _Key("memory_bytes_per_s", _BYTE_RATE),
    "compute": _Key("flops", _FLOPS),
}
_NODE_KEYS = {
    "name": _Key("name", readers.read_name),
    "address": _Key("address", readers.read_address),
    **_DEFAULT_NODE_KEYS,
}
_DEFAULT_LINK_KEYS = {"rtt": _Key("rtt_s", _DURATION), "bandwidth": _Key("bandwidth_bps", _RATE)}
_LINK_KEYS = {"between": _Key("between", readers.read_pair), **_DEFAULT_LINK_KEYS}

_TABLES = ("cluster", "default_node", "node", "default_link", "link")
_ARRAYS = ("node", "link")  # written [[node]], once for each

Values = dict[str, Any]


def parse_cluster(
    text: str,
    *,
    source: str = "topology.toml",
    find_model: Callable[[str], str] = str,
    find_keys: Callable[[str], str] = str,
) -> Cluster:
    """Read a topology file's text; `ClusterFileError` holds every fault, each with its line and key.

    source      how the file is called in messages
    find_model  the value of `model` -> the folder's path; `ValueError` says why it will not do
    find_keys   likewise for `keys`
    """
    page = _Page(text, source)
    page.refuse_unknown_tables()

    cluster = page.read_table("cluster", _CLUSTER_KEYS)
    page.resolve(cluster, "model", find_model)
    page.resolve(cluster, "keys", find_keys)
    default_node = page.read_table("default_node", _DEFAULT_NODE_KEYS)
    nodes = [{**default_node, **node} for node in page.read_tables("node", _NODE_KEYS)]
    default_link = page.read_table("default_link", _DEFAULT_LINK_KEYS)
    links = page.read_tables("link", _LINK_KEYS)

    _check_cluster(page, cluster)
    _check_nodes(page, cluster, nodes)
    _check_links(page, nodes, links)
    if page.faults:
        raise ClusterFileError(source, page.faults)

    link_default = Link("*", "*", **default_link)
    return Cluster(
        **cluster,
        nodes=tuple(Node(**node) for node in nodes),
        default_link=link_default,
        links=tuple(_link(link, link_default) for link in links),
        source=source,
    )


class _Page:
    """One file while it is read: its tables, the line of each key, the faults found so far."""

    def __init__(self, text: str, source: str) -> None:
        self.document = _load(text, source)
        self.lines = find_lines(text)
        self.faults: list[Fault] = []

    def fault(self, path: Path, message: str) -> None:
        """Note a fault at a path; a key that is not there is at its table's line."""
        self.faults.append(Fault(self.line_of(path), self.label(path), message))

    def line_of(self, path: Path) -> int:
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def label(self, path: Path) -> str:
        """How a reader would call a path: `[cluster] name`, `[[node]] desk: memory`."""
        match path:
            case ():
                return ""
            case (str(table), int(index), *rest):
                name = self.document[table][index].get("name")
                label = f"[[{table}]] {name}" if isinstance(name, str) else f"[[{table}]] number {index + 1}"
                return f"{label}: {'.'.join(map(str, rest))}" if rest else label
            case (table, *rest):
                brackets = f"[[{table}]]" if table in _ARRAYS else f"[{table}]"
                return " ".join([brackets, ".".join(map(str, rest))]) if rest else brackets
        raise AssertionError(path)

    def refuse_unknown_tables(self) -> None:
        for name, value in self.document.items():
            if name in _TABLES:
                continue
            if isinstance(value, dict | list):
                message = (
                    f'unknown table "{name}"{did_you_mean(name, _TABLES)}; there are {", ".join(_TABLES)}'
                )
            else:
                message = f'key "{name}" stands outside every table; did you mean it to be below [cluster]?'
            self.faults.append(Fault(self.lines[name,], "", message))

    def read_table(self, table: str, keys: Mapping[str, _Key]) -> Values:
        """The values of `[table]` that can be read; the rest become faults. Empty if it is not there."""
        raw = self.document.get(table, {})
        if isinstance(raw, dict):
            return self.read_keys((table,), raw, keys)
        self.fault((table,), f"write [{table}], with one pair of brackets, once")
        return {}

    def read_tables(self, table: str, keys: Mapping[str, _Key]) -> list[Values]:
        """The same for each `[[table]]`."""
        raw = self.document.get(table, [])
        if isinstance(raw, list) and all(isinstance(entry, dict) for entry in raw):
            return [self.read_keys((table, index), entry, keys) for index, entry in enumerate(raw)]
        self.fault((table,), f"write [[{table}]], with two pairs of brackets, once for each {table}")
        self.document[table] = []
        return []

    def read_keys(self, path: Path, raw: Mapping[str, object], keys: Mapping[str, _Key]) -> Values:
        values: Values = {}
        for name, value in raw.items():
            if name not in keys:
                self.fault(
                    (*path, name), f"unknown key{did_you_mean(name, keys)}; allowed are {', '.join(keys)}"
                )
                continue
            try:
                values[keys[name].field] = keys[name].read(value)
            except ValueError as error:
                self.fault((*path, name), str(error))
        return values

    def resolve(self, cluster: Values, key: str, find: Callable[[str], str]) -> None:
        """Turn a folder as written into its path."""
        if key in cluster:
            try:
                cluster[key] = find(cluster[key])
            except ValueError as error:
                self.fault(("cluster", key), str(error))

    def require(self, path: Path, *keys: str, example: str, elsewhere: tuple[str, ...] = ()) -> None:
        """Fault each key that the table does not have, nor the table `elsewhere`."""
        for key in keys:
            if key not in self._at(path) and key not in self._at(elsewhere or path):
                self.fault((*path, key), f"missing; write it as in {example}")

    def _at(self, path: Path) -> Any:
        found: Any = self.document
        for step in path:
            found = found.get(step, {}) if isinstance(found, dict) else found[step]
        return found


def _load(text: str, source: str) -> dict[str, Any]:
    """`tomllib` with its errors turned into ours."""
    try:
        document = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError, or a number or a nesting beyond all measure
        message, _, place = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+), column (\d+)", place)
        line, column = (
            (int(found[1]), f" at column {found[2]}") if found else (text.rstrip().count("\n") + 1, "")
        )
        what = f"not valid TOML{column}: {message[:1].lower()}{message[1:]}"
        raise ClusterFileError(source, [Fault(line, "", what)]) from error
    if not document:
        what = "the file is empty; a topology needs one [cluster] and a [[node]] for each machine"
        raise ClusterFileError(source, [Fault(1, "", what)])
    return document


def _check_cluster(page: _Page, cluster: Values) -> None:
    if "cluster" not in page.document:
        page.fault((), "there is no table [cluster]; it needs name and model")
    elif isinstance(page.document["cluster"], dict):
        page.require(("cluster",), "name", example='name = "home"')
        page.require(("cluster",), "model", example='model = "models/edge-moe-demo", a folder')
    heartbeat_s = cluster.get("heartbeat_s", Cluster.heartbeat_s)
    lost_after_s = cluster.get("lost_after_s", Cluster.lost_after_s)
    if lost_after_s <= 2 * heartbeat_s:
        message = (
            f"a node would be lost after {units.format_duration(lost_after_s)} of silence, at a heartbeat of "
            f"{units.format_duration(heartbeat_s)}: one late heartbeat would do; allow more than two"
        )
        page.fault(("cluster", "lost_after" if "lost_after_s" in cluster else "heartbeat"), message)


def _check_nodes(page: _Page, cluster: Values, nodes: list[Values]) -> None:
    if not nodes and not any(fault.key == "[[node]]" for fault in page.faults):
        page.fault((), "there is no [[node]]; write one for each machine, with name, address and memory")
    for index in range(len(nodes)):
        page.require(("node", index), "name", example='name = "desk"')
        page.require(("node", index), "address", example='address = "127.0.0.1:5551"')
        page.require(("node", index), "memory", example='memory = "8 GiB"', elsewhere=("default_node",))

    coordinator = cluster.get("coordinator", Cluster.coordinator)
    _refuse_twice(page, [(("node", i, "name"), node.get("name")) for i, node in enumerate(nodes)], "name")
    addresses = [(("node", i, "address"), node.get("address")) for i, node in enumerate(nodes)]
    _refuse_twice(page, [(("cluster", "coordinator"), coordinator), *addresses], "address")
    if "keys" not in page.document.get("cluster", {}):
        for path, address in [(("cluster", "coordinator"), coordinator), *addresses]:
            if address and not is_loopback(address):
                page.fault(
                    path,
                    f"{address} can be reached from other machines, and [cluster] has no keys: run "
                    '"edge-runtime keys new" and name the folder, as in keys = "keys"',
                )

    reserve = cluster.get("process_reserve_bytes", Cluster.process_reserve_bytes)
    for index, node in enumerate(nodes):
        if node.get("memory_bytes", reserve + 1) <= reserve:
            page.fault(
                ("node", index, "memory"),
                f"{units.format_bytes(node['memory_bytes'])} leave nothing for the model: the process has "
                f"{units.format_bytes(reserve)} reserved ([cluster] process_reserve)",
            )

    readable = [node.get("roles", frozenset(ROLES)) for node in nodes]
    unreadable = any("roles" in fault.key for fault in page.faults)
    for role, consequence in ((DECODE, "could answer a request"), (EXPERTS, "could hold an expert")):
        if nodes and not unreadable and not any(role in roles for roles in readable):
            page.fault(("node", 0, "roles"), f'no node has the role "{role}", so none {consequence}')


def _check_links(page: _Page, nodes: list[Values], links: list[Values]) -> None:
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


def _refuse_twice(page: _Page, entries: list[tuple[Path, str | None]], what: str) -> None:
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
