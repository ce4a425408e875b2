"""Sizes, rates and durations as people write them, and back. The one place where units are converted.

Inside the program: whole bytes, bits per second, bytes per second, operations per second, seconds. A number
and its unit are both needed, and units are spelled exactly (`Mb` and `MB` differ by a factor of eight). What a
`format_` function writes, its `parse_` function reads back unchanged; `format_bytes_rounded` is for tables.
"""

import difflib
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction

Scales = Mapping[str, int | Fraction]  # unit -> how much it is of the base unit

BINARY_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
DECIMAL_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES = {**BINARY_BYTES, **DECIMAL_BYTES}
BITS_PER_SECOND = {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
BYTES_PER_SECOND = {f"{unit}/s": scale for unit, scale in BYTES.items()}
FLOPS = {"MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12}
SECONDS: Scales = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 10**3),
    "s": 1,
    "min": 60,
    "h": 3600,
}

_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]+)\s*")


def parse_bytes(text: str) -> int:
    """`"8 GiB"`, `"512 MB"`, `"1.5 GiB"` to whole bytes, rounded down."""
    return int(_parse(text, "a size", BYTES, "8 GiB"))


def parse_rate(text: str) -> float:
    """A link's rate, `"100 Mbit/s"` or `"12.5 MB/s"`, to bits per second."""
    in_bytes = {unit: 8 * scale for unit, scale in BYTES_PER_SECOND.items()}
    return float(_parse(text, "a rate", {**BITS_PER_SECOND, **in_bytes}, "100 Mbit/s"))


def parse_byte_rate(text: str) -> float:
    """A memory's bandwidth, `"8 GB/s"`, to bytes per second."""
    return float(_parse(text, "a memory bandwidth", BYTES_PER_SECOND, "8 GB/s"))


def parse_flops(text: str) -> float:
    """A processor's speed, `"120 GFLOP/s"`, to operations per second."""
    return float(_parse(text, "a compute speed", FLOPS, "120 GFLOP/s"))


def parse_duration(text: str) -> float:
    """`"2 ms"`, `"150 us"`, `"10 s"` to seconds."""
    return float(_parse(text, "a duration", SECONDS, "2 ms"))


def format_bytes(num_bytes: int) -> str:
    """Exact: 367001600 -> `350 MiB`, 8000000000 -> `8 GB`, 1025 -> `1025 B`."""
    whole = [(num_bytes // scale, unit) for unit, scale in BYTES.items() if num_bytes % scale == 0]
    count, unit = min(whole, key=lambda pair: pair[0]) if num_bytes else (0, "B")
    return f"{count} {unit}"


def format_bytes_rounded(num_bytes: int) -> str:
    """For reading, to one decimal: 6710886 -> `6.4 MiB`. Not exact; negative sizes keep their sign."""
    size, sign = abs(num_bytes), "-" if num_bytes < 0 else ""
    unit = max(
        (unit for unit, scale in BINARY_BYTES.items() if scale <= max(size, 1)), key=BINARY_BYTES.__getitem__
    )
    return f"{sign}{size} B" if unit == "B" else f"{sign}{size / BINARY_BYTES[unit]:.1f} {unit}"


def in_one_unit(*sizes: int) -> list[str]:
    """The sizes of one sentence, to be compared: 100 MiB and 104333312 -> `100.0 MiB`, `99.5 MiB`.

    In the largest unit that the largest fills and that leaves something of the smallest, with as many decimals as tell
    different sizes apart; in whole bytes where three do not.
    """
    given = [abs(size) for size in sizes if size] or [0]
    fitting = [
        unit for unit, scale in BINARY_BYTES.items() if max(given) >= scale > 1 and min(given) >= 0.05 * scale
    ]
    unit = max(fitting, key=BINARY_BYTES.__getitem__, default="B")
    for decimals in (1, 2, 3) if unit != "B" else ():
        told = [f"{size / BINARY_BYTES[unit]:.{decimals}f} {unit}" for size in sizes]
        if len(set(told)) == len(set(sizes)):
            return told
    return [f"{size} B" for size in sizes]


def counted(count: int, noun: str) -> str:
    """`1 line`, `3 lines`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_rate(bits_per_second: float) -> str:
    """Bits per second to `100 Mbit/s`."""
    return _format(bits_per_second, BITS_PER_SECOND)


def format_byte_rate(bytes_per_second: float) -> str:
    """Bytes per second to `8 GB/s`."""
    return _format(
        bytes_per_second, {"B/s": 1, **{f"{unit}/s": scale for unit, scale in DECIMAL_BYTES.items()}}
    )


def format_flops(operations_per_second: float) -> str:
    """Operations per second to `120 GFLOP/s`."""
    return _format(operations_per_second, FLOPS)


def format_duration(seconds: float) -> str:
    """Seconds to `2 ms`; nothing longer than seconds is used."""
    return _format(seconds, {unit: SECONDS[unit] for unit in ("ns", "us", "ms", "s")})


def _parse(text: str, what: str, units: Scales, example: str) -> Fraction:
    match = _FORM.fullmatch(text)
    if match and match[2] in units:
        return Fraction(match[1]) * units[match[2]]
    meant = _nearest_unit(match[2], units) if match else None
    hint = f'; did you mean "{match[1]} {meant}"?' if match and meant else ""
    raise ValueError(
        f'"{text}" is not {what}: write a number and one of {", ".join(units)}, as in "{example}"{hint}'
    )


def _nearest_unit(unit: str, units: Scales) -> str | None:
    """The unit that differs only in capitals, else one spelled much alike."""
    alike = [known for known in units if known.lower() == unit.lower()]
    return next(iter(alike or difflib.get_close_matches(unit, units, n=1, cutoff=0.5)), None)


def _format(value: float, units: Scales) -> str:
    """In the largest unit not above the value, or the smallest; scales are powers of ten: nothing is lost."""
    below = [unit for unit, scale in units.items() if scale <= value] or [next(iter(units))]
    exact = Fraction(Decimal(repr(float(value)))) / Fraction(units[below[-1]])
    number = f"{Decimal(exact.numerator) / Decimal(exact.denominator):f}"
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {below[-1]}"
