"""Read one value of a topology file: convert it, or say in a `ValueError` what was found and what is allowed.

Knows neither tables nor lines.
"""

import re
from collections.abc import Callable

from topology.cluster import (
    DEVICES,
    GATES,
    MOST_STAGES,
    PLACEMENTS,
    PLANS,
    ROLES,
    ROUTING,
    SELECTORS,
    WEIGHT_FORMATS,
    did_you_mean,
)
from topology.ids import ExpertId

Reader = Callable[[object], object]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/]+):([0-9]+)")
_EXPERT = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")
_EVERYWHERE = ("0.0.0.0", "[::]", "*")
SHORT_FORMATS = {"bf16": "bfloat16", "bf16x2": "bfloat16x2", "fp16": "float16", "fp32": "float32"}
"""Other names of `WEIGHT_FORMATS`, by which commands call them."""
RESERVED_NAMES = (
    "coordinator",
    "gateway",
    "client",
    "all",
    "drain",
)  # words of commands, and other processes
MOST = 10**9  # of anything that is counted: more is a slip of the pen
MOST_COPIES = 1000.0


def read_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text in quotes, found {_kind(value)}")
    if not value.strip():
        raise ValueError("expected text, found an empty one")
    return value


def read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {_kind(value)}")
    return value


def read_name(value: object) -> str:
    name = read_text(value)
    if not _NAME.fullmatch(name):
        raise ValueError(
            f'"{name}" is not a name: use up to 63 letters, digits, ".", "_" and "-", a letter or digit first'
        )
    if name in RESERVED_NAMES:
        raise ValueError(f'"{name}" is reserved; choose another name')
    return name


def read_address(value: object) -> str:
    address = read_text(value)
    match = _ADDRESS.fullmatch(address)
    if not match:
        raise ValueError(f'"{address}" is not an address: write host:port, as in "127.0.0.1:5551"')
    if not 1 <= int(match[2]) <= 65535:
        raise ValueError(f"port {match[2]} is out of range: ports go from 1 to 65535")
    if match[1] in _EVERYWHERE:
        raise ValueError(f"{match[1]} is no address that peers can reach; write the machine's own")
    return f"{match[1].lower()}:{int(match[2])}"


def read_roles(value: object) -> frozenset[str]:
    if not isinstance(value, list):
        raise ValueError(f'expected an array of roles, as in ["decode", "experts"], found {_kind(value)}')
    if not value:
        raise ValueError(f"expected at least one of {', '.join(ROLES)}, found an empty array")
    return frozenset(read_one_of("role", ROLES)(role) for role in value)


def read_one_of(what: str, allowed: tuple[str, ...]) -> Callable[[object], str]:
    """A reader of one word out of `allowed`."""

    def read(value: object) -> str:
        word = read_text(value)
        if word not in allowed:
            raise ValueError(
                f'{what} "{word}" is not supported{did_you_mean(word, allowed)}; use {", ".join(allowed)}'
            )
        return word

    return read


def read_device(value: object) -> str:
    """One of `DEVICES`, a GPU with its number if there are several."""
    word = read_text(value)
    if re.fullmatch(r"cuda:(0|[1-9][0-9]?)", word):
        return word
    if word not in DEVICES:
        raise ValueError(
            f'device "{word}" is not supported{did_you_mean(word, DEVICES)}; use {", ".join(DEVICES)} or cuda:N, '
            "the GPU of that number"
        )
    return word


read_plan = read_one_of("plan", PLANS)
read_routing = read_one_of("routing policy", ROUTING)
read_placement = read_one_of("placement", PLACEMENTS)
read_gate = read_one_of("gate", GATES)
read_selector = read_one_of("selector", SELECTORS)


def read_weight_format(value: object) -> str:
    """One of `WEIGHT_FORMATS`; the usual short forms are understood."""
    return read_one_of("weight format", WEIGHT_FORMATS)(SHORT_FORMATS.get(read_text(value), value))


def read_quantity(parse: Callable[[str], float], example: str) -> Callable[[object], float]:
    """A reader of a positive number with a unit, through one of the parsers of `units.py`."""

    def read(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(
                f'expected a number with its unit in quotes, as in "{example}", found {_kind(value)}'
            )
        amount = parse(value)
        if amount <= 0:
            raise ValueError(f'"{value}" is not more than 0')
        return amount

    return read


def read_count(value: object) -> int:
    """A whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number from 1 on, found {_kind(value)}")
    if not 1 <= value <= MOST:
        raise ValueError(f"expected a whole number from 1 to {MOST}, found {value}")
    return value


def read_stages(value: object) -> int:
    """How many stages layers are split into; one is no split."""
    count = read_count(value)
    if not 2 <= count <= MOST_STAGES:
        raise ValueError(f"{count} stages; give 2 to {MOST_STAGES}")
    return count


def read_threads(value: object) -> int:
    """A whole number from 1 to 1024."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise ValueError(f"expected a whole number from 1 to 1024, found {_kind(value)}")
    return value


def read_cpu_share(value: object) -> float:
    """Processors, from a hundredth of one on."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number of processors, as in 0.5, found {_kind(value)}")
    if not 0.01 <= value <= 1024:
        raise ValueError(f"expected a number of processors from 0.01 to 1024, found {value}")
    return float(value)


def read_position(value: object) -> int:
    """A whole number from 0 on: layers and experts are counted from 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"expected a whole number from 0 on, found {_kind(value)}")
    if value < 0:
        raise ValueError(f"expected a whole number from 0 on, found {value}")
    return value


def read_expert(value: object) -> ExpertId:
    """`"3.17"`: expert 17 of layer 3, both counted from 0."""
    match = _EXPERT.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f'expected layer and index in quotes, as in "3.17", found {_kind(value)}')
    return ExpertId(int(match[1]), int(match[2]))


def read_tau(value: object) -> float:
    """A number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"expected a number from 0 (best match alone) to 1 (load alone), found {_kind(value)}"
        )
    if not 0 <= value <= 1:
        raise ValueError(f"expected a number from 0 (best match alone) to 1 (load alone), found {value}")
    return float(value)


def read_affinity(value: object) -> float:
    """How many mean loads a match is worth."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise ValueError(f"expected a number from 0 to 100, as in 0.5, found {_kind(value)}")
    return float(value)


def read_lane_share(value: object) -> float:
    """A share of the homes, neither none nor all."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"expected a number between 0 and 1, as in 0.5, found {_kind(value)}")
    return float(value)


def read_lane_ratio(value: object) -> float:
    """A ratio of two loads that differ."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 < value <= 100:
        raise ValueError(f"expected a number above 1, at most 100, as in 1.25, found {_kind(value)}")
    return float(value)


def read_memory_ratio(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"expected a number from 1.0 on, found {_kind(value)}")
    if not 1.0 <= value <= MOST_COPIES:
        raise ValueError(f"expected a number from 1.0 (each expert once) to {MOST_COPIES:g}, found {value}")
    return float(value)


def read_pair(value: object) -> tuple[str, str]:
    """The two different nodes that a link joins."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(name, str) for name in value):
        raise ValueError(f'expected the names of two nodes, as in ["desk", "attic"], found {_kind(value)}')
    if value[0] == value[1]:
        raise ValueError(f'a link joins two different nodes, found "{value[0]}" twice')
    return value[0], value[1]


def _kind(value: object) -> str:
    """What a value is, in a reader's words."""
    match value:
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f'the text "{value}"'
        case list():
            return f"an array of {len(value)}"
        case dict():
            return "a table"
        case _:
            return f"the date or time {value}"
