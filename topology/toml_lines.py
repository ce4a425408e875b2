"""Where each key of a TOML document stands. `tomllib` gives the values and keeps the lines to itself.

Walks text that `tomllib` has already accepted, so it only has to know where things begin and end, not what
they are worth.
"""

import re
import tomllib

Path = tuple[str | int, ...]

_BLANKS = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")  # white space, line ends and comments
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'  # up to two quotes may stand right before the closing three
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")  # number, boolean or date


def find_lines(text: str) -> dict[Path, int]:
    """Path of every table, array element and key -> line, counted from 1, where it first stands.

    A path is keys and, inside arrays, positions from 0: the name of the second `[[node]]` is at
    `("node", 1, "name")`.
    The empty path is line 1. A dotted key or header gives a line to each table on its way.
    """
    walk = _Walk(text.replace("\r\n", "\n"))
    walk.document()
    return walk.lines


class _Walk:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.counted_to, self.line = 0, 1
        self.lines: dict[Path, int] = {(): 1}
        self.lengths: dict[Path, int] = {}  # tables in each [[array]] so far

    def document(self) -> None:
        table: Path = ()
        while self.skip_blanks():
            if self.took("[["):
                table = self.header()
                count = self.lengths.get(table, 0)
                self.lengths[table] = count + 1
                table = (*table, count)
                self.note(table)
                self.expect("]]")
            elif self.took("["):
                table = self.header()
                self.note(table)
                self.expect("]")
            else:
                self.pair(table)

    def header(self) -> Path:
        """A header's path; a key that names an array of tables on the way means its latest element."""
        path: Path = ()
        for key in self.dotted_key():
            if path in self.lengths:
                path = (*path, self.lengths[path] - 1)
            path = (*path, key)
            self.note(path)
        return path

    def pair(self, table: Path) -> None:
        path = table
        for key in self.dotted_key():
            path = (*path, key)
            self.note(path)
        self.expect("=")
        self.value(path)

    def value(self, path: Path) -> None:
        self.skip_blanks()
        if self.took("["):
            index = 0
            while not self.took("]"):
                self.note((*path, index))
                self.value((*path, index))
                self.took(",")
                index += 1
        elif self.took("{"):
            while not self.took("}"):
                self.pair(path)
                self.took(",")
        else:
            self.match(_STRING) or self.match(_SCALAR)

    def dotted_key(self) -> list[str]:
        keys = [self.key()]
        while self.took("."):
            keys.append(self.key())
        return keys

    def key(self) -> str:
        self.skip_blanks()
        quoted = self.match(_STRING)
        if not quoted:
            return self.match(_BARE_KEY)
        if quoted[0] == "'" or "\\" not in quoted:
            return quoted[1:-1]
        return next(iter(tomllib.loads(f"{quoted} = 0")))

    def note(self, path: Path) -> None:
        """Give the path the line of what was read last, unless it has one."""
        self.line += self.text.count("\n", self.counted_to, self.at)
        self.counted_to = self.at
        self.lines.setdefault(path, self.line)

    def skip_blanks(self) -> bool:
        """Whether anything is left after white space and comments."""
        self.match(_BLANKS)
        return self.at < len(self.text)

    def took(self, mark: str) -> bool:
        self.skip_blanks()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def expect(self, mark: str) -> None:
        found = self.took(mark)
        assert found, f"expected {mark} at offset {self.at}: find_lines is for text that tomllib has accepted"

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            return ""
        self.at = found.end()
        return found[0]
