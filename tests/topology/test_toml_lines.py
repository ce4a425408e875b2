"""The line finder: right wherever TOML lets a key stand."""

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from topology.toml_lines import Path, find_lines

DOCUMENT = '''\
# a comment = "with a key"
top = 1

[cluster]                  # line 4
name = "a # b [[node]] = c"
note = """
name = "not a key"
[node]
"""   # line 9
raw = \'\'\'
it''s \\
\'\'\'
"quoted key" = 1
'single "one"' = 2
"esc\\"aped" = 3
a.b . "c" = 4

[[node]]
roles = [
  "x",  # y = 2
  "],",
]
inner = { p = 1, q = { r = "}" } }

[node.extra]
when = 1979-05-27 07:32:00
[[node]]
list = [ { u = 1 },
  { u = 2,
    v = [1, [2,
      3]] } ]
[ node . extra ]
last = -1.5e3
end = """four quotes: """"
after = true'''
DOCUMENT = DOCUMENT.replace(
    "  { u = 2,\n    v", "  { u = 2,    v"
)  # an inline table may not break between its keys


def line_of(text: str) -> int:
    """The line of DOCUMENT on which a piece of it first stands."""
    return DOCUMENT[: DOCUMENT.index(text)].count("\n") + 1


def paths(value: Any, path: Path = ()) -> set[Path]:
    """Every table, array element and key of a parsed document."""
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path}.union(*(paths(inner, (*path, step)) for step, inner in steps))


def test_every_key_is_found_on_its_line() -> None:
    lines = find_lines(DOCUMENT)
    assert set(lines) == paths(tomllib.loads(DOCUMENT))
    expected = {
        ("top",): 2,
        ("cluster",): 4,
        ("cluster", "name"): 5,
        ("cluster", "note"): 6,
        ("cluster", "raw"): 10,
        ("cluster", "quoted key"): line_of('"quoted key"'),
        ("cluster", 'single "one"'): line_of("'single"),
        ("cluster", 'esc"aped'): line_of('"esc'),
        ("cluster", "a", "b", "c"): line_of("a.b"),
        ("node", 0): line_of("[[node]]\nroles"),
        ("node", 0, "roles", 1): line_of('"],"'),
        ("node", 0, "inner", "q", "r"): line_of("inner ="),
        ("node", 0, "extra"): line_of("[node.extra]"),
        ("node", 0, "extra", "when"): line_of("when"),
        ("node", 1): line_of("[[node]]\nlist"),
        ("node", 1, "list", 1, "u"): line_of("u = 2"),
        ("node", 1, "list", 1, "v", 1, 1): line_of("3]]"),
        ("node", 1, "extra", "last"): line_of("last ="),
        ("node", 1, "extra", "after"): line_of("after ="),
    }
    assert {path: lines[path] for path in expected} == expected


def test_windows_line_ends_count_once() -> None:
    assert find_lines("a = 1\r\n\r\nb = 2\r\n")["b",] == 3


def test_an_empty_text_has_a_first_line() -> None:
    assert find_lines("") == {(): 1}
    assert find_lines("\n# nothing\n") == {(): 1}


SCALARS = st.one_of(
    st.integers(-99, 99).map(str),
    st.sampled_from(
        ["true", '"a"', '"#"', "'[x]'", '"""\nk = 1\n"""', "'''\n'''", '"\\\\"', '"\\""', "1.5", "[]", "{}"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n" + ", # c ]\n".join(items) + "\n]"),
        st.lists(inner, max_size=3).map(
            lambda items: "{" + ", ".join(f"k{i} = {item}" for i, item in enumerate(items)) + "}"
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["t", "[u]", "u.x"]), st.lists(VALUES, max_size=3)), max_size=4))
def test_each_marked_key_of_any_document_is_found_on_its_line(tables: list[tuple[str, list[str]]]) -> None:
    """Each key carries the number of its line: written down while the text is built, and looked up afterwards."""
    text, expected, arrays = "", {}, 0
    for number, (kind, values) in enumerate(tables):
        table: Path
        if kind == "[u]":
            text, table, arrays = text + "[[u]]\n", ("u", arrays), arrays + 1
        elif kind == "u.x" and arrays:
            text, table = text + f"[u.x{number}]\n", ("u", arrays - 1, f"x{number}")
        else:
            text, table = text + f"[t{number}]\n", (f"t{number}",)
        expected[table] = text.count("\n")
        for index, value in enumerate(values):
            expected[(*table, f"key{index}")] = text.count("\n") + 1
            text += f"key{index} = {value} # = [\n"
    lines = find_lines(text)
    assert set(lines) == paths(tomllib.loads(text))
    assert {path: lines[path] for path in expected} == expected
