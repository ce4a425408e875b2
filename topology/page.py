"""One topology file while it is read: its tables, the line of each key, and the faults found so far.

Knows which tables there are, and nothing of what their keys mean.
"""

import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from topology.cluster import did_you_mean
from topology.errors import ClusterFileError, Fault, why_unread
from topology.readers import Reader
from topology.toml_lines import Path, find_lines

TABLES = ("cluster", "default_node", "node", "default_link", "link", "pin", "routing")
ARRAYS = ("node", "link", "pin")  # written [[node]], once for each

Values = dict[str, Any]  # field of a dataclass -> value


class Key(NamedTuple):
    """What a key of the file becomes."""

    field: str
    """Of the dataclass."""
    read: Reader


class Page:
    """One file while it is read: its tables, the line of each key, the faults found so far."""

    def __init__(self, text: str, source: str) -> None:
        self.document = _load(text, source)
        self.lines = find_lines(text)
        self.faults: list[Fault] = []
        self.malformed: set[str] = set()  # tables that are something else; they count as empty from then on

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
                brackets = f"[[{table}]]" if table in ARRAYS else f"[{table}]"
                return " ".join([brackets, ".".join(map(str, rest))]) if rest else brackets
        raise AssertionError(path)

    def refuse_unknown_tables(self) -> None:
        for name, value in self.document.items():
            if name in TABLES:
                continue
            if isinstance(value, dict | list):
                message = f'unknown table "{name}"{did_you_mean(name, TABLES)}; there are {", ".join(TABLES)}'
            else:
                message = f'key "{name}" stands outside every table; did you mean it to be below [cluster]?'
            self.faults.append(Fault(self.lines[name,], "", message))

    def read_table(self, table: str, keys: Mapping[str, Key]) -> Values:
        """The values of `[table]` that can be read; the rest become faults. Empty if it is not there."""
        raw = self.document.get(table, {})
        if isinstance(raw, dict):
            return self.read_keys((table,), raw, keys)
        self.fault((table,), f"write [{table}], with one pair of brackets, once")
        self._forget(table, {})
        return {}

    def read_tables(self, table: str, keys: Mapping[str, Key]) -> list[Values]:
        """The same for each `[[table]]`."""
        raw = self.document.get(table, [])
        if isinstance(raw, list) and all(isinstance(entry, dict) for entry in raw):
            return [self.read_keys((table, index), entry, keys) for index, entry in enumerate(raw)]
        self.fault((table,), f"write [[{table}]], with two pairs of brackets, once for each {table}")
        self._forget(table, [])
        return []

    def read_keys(self, path: Path, raw: Mapping[str, object], keys: Mapping[str, Key]) -> Values:
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

    def has(self, table: str, key: str) -> bool:
        """Whether `[table]` has the key, readable or not."""
        return key in self.document.get(table, {})

    def _forget(self, table: str, empty: dict[str, Any] | list[Any]) -> None:
        self.malformed.add(table)
        self.document[table] = empty

    def _at(self, path: Path) -> Any:
        found: Any = self.document
        for step in path:
            found = found.get(step, {}) if isinstance(found, dict) else found[step]
        return found


def _load(text: str, source: str) -> dict[str, Any]:
    """`tomllib` with its errors turned into ours."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not TOML, or a number or a nesting beyond all measure
        found = re.fullmatch(r"(.+) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        if found:
            line, what = int(found[2]), f"at column {found[3]}: {found[1]}"
        else:
            line, what = text.rstrip().count("\n") + 1, why_unread(error)
        raise ClusterFileError(source, [Fault(line, "", f"not valid TOML, {what}")]) from error
    if not document:
        what = "the file is empty; a topology needs one [cluster] and a [[node]] for each machine"
        raise ClusterFileError(source, [Fault(1, "", what)])
    return document
