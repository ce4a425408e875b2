"""A sitting's results in Markdown: rates side by side, ours over the best peer, and what limits each cell. Knows no engine."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from testbed.bench.floors import Cost, limit_of
from testbed.bench.peers.engines import Rate
from testbed.bench.sitting import DAEMONS, OWN, Cell, Result

OURS = (OWN, DAEMONS)


def tables(result: Result) -> str:
    """Everything there is to say of one format at one number of threads."""
    titles = [cell.title for cell in result.cells]
    low, high = min(result.load_average), max(result.load_average)
    lines = [
        f"### {result.model}, {result.format}, {result.threads} thread{'s' * (result.threads > 1)}",
        "",
        f"Load average {low:.1f} to {high:.1f}; stream {_median(result.stream_bps) / 1e9:.1f} GB/s "
        f"({min(result.stream_bps) / 1e9:.1f}-{max(result.stream_bps) / 1e9:.1f}), "
        f"multiply-add peak {result.peak_flops / 1e9:.0f} GFLOP/s in float32.",
        "",
        "Tokens per second, median (min-max):",
        "",
        *_grid(["engine", *titles], _rate_rows(result, lambda rate: rate.wall)),
        "",
        "Tokens per second of processor time, per thread count (what waiting for a shared processor leaves out):",
        "",
        *_grid(["engine", *titles], _rate_rows(result, lambda rate: rate.cpu)),
    ]
    if ratios := list(_ratio_rows(result)):
        lines += ["", "Ours over the best other engine:", "", *_grid(["", *titles], ratios)]
    lines += [
        "",
        "Floors, by processor time: bytes are what a decode step (or the prompt) must read at least.",
        "",
        *_grid(FLOOR_HEAD, _floor_rows(result)),
        "",
    ]
    if result.step_us:
        parts = list(next(iter(result.step_us.values())))
        rows = [
            [title, *(f"{by_part[part]:.0f}" for part in parts)] for title, by_part in result.step_us.items()
        ]
        lines += ["Our step by part, microseconds of processor time:", ""]
        lines += [*_grid(["cell", *parts], rows), ""]
    lines += [f"- {name}: {version}" for name, version in result.versions.items()]
    lines += [f"- without {name}: {why}" for name, why in result.left_out.items()]
    return "\n".join(lines)


FLOOR_HEAD = ["cell", "engine", "experts", "MB", "floor tok/s", "of stream", "of peak", "limit"]


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [_line(head), "|---" * len(head) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rate_rows(result: Result, of: Callable[[Rate], float | None]) -> Iterable[list[str]]:
    for name, by_cell in result.rates.items():
        shown = [_spread([of(rate) for rate in by_cell.get(cell.title, ())]) for cell in result.cells]
        if any(shown):
            yield [name, *shown]


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{number(_median(known))} ({number(min(known))}-{number(max(known))})"


def number(value: float) -> str:
    """Three digits that count, or the whole part."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio_rows(result: Result) -> Iterable[list[str]]:
    others = [name for name in result.rates if name not in OURS]
    for name in (name for name in OURS if name in result.rates):
        for label, of in (("", _wall), (", processor time", _cpu)):
            row = [_ratio(result, cell, name, others, of) for cell in result.cells]
            if any(row):
                yield [name + label, *row]


def _wall(rate: Rate) -> float | None:
    return rate.wall


def _cpu(rate: Rate) -> float | None:
    return rate.cpu


def _ratio(
    result: Result, cell: Cell, name: str, others: Sequence[str], of: Callable[[Rate], float | None]
) -> str:
    """Median over the best median of the others, and whose that is."""

    def median(engine: str) -> float | None:
        known = [
            value for rate in result.rates[engine].get(cell.title, ()) if (value := of(rate)) is not None
        ]
        return _median(known) if known else None

    ours = median(name)
    theirs = {other: value for other in others if (value := median(other)) is not None}
    if ours is None or not theirs:
        return ""
    best = max(theirs, key=theirs.__getitem__)
    return f"{ours / theirs[best]:.2f} ({best})"


def _floor_rows(result: Result) -> Iterable[list[str]]:
    stream = _median(result.stream_bps)
    for cell in result.cells:
        for name, by_cell in result.rates.items():
            cost = result.costs.get(name, {}).get(cell.title)
            rates = [rate.cpu or rate.wall for rate in by_cell.get(cell.title, ())]
            if cost is None or not rates:
                continue
            tokens = cell.requests if cell.kind == "decode" else cell.tokens
            limit = limit_of(cost, tokens / _median(rates), stream, result.peak_flops)
            used = result.distinct_experts.get(cell.title)
            yield [
                cell.title,
                name,
                f"{used:.1f}" if used is not None else "all",
                f"{cost.bytes / 1e6:.0f}",
                number(tokens / cost.floor_s(stream, result.peak_flops)),
                f"{limit.bandwidth:.0%}",
                f"{limit.arithmetic:.0%}",
                limit.name,
            ]


def as_json(results: Sequence[Result]) -> list[Mapping[str, Any]]:
    """Plain values of everything measured."""
    return [
        {
            "model": result.model,
            "format": result.format,
            "threads": result.threads,
            "cells": [list(cell) for cell in result.cells],
            "rates": {
                engine: {title: [rate._asdict() for rate in rates] for title, rates in by_cell.items()}
                for engine, by_cell in result.rates.items()
            },
            "bytes_and_flops": {
                engine: {title: [cost.bytes, cost.flops] for title, cost in by_cell.items()}
                for engine, by_cell in result.costs.items()
            },
            "distinct_experts": result.distinct_experts,
            "step_us": result.step_us,
            "stream_bps": result.stream_bps,
            "peak_flops": result.peak_flops,
            "load_average": result.load_average,
            "versions": result.versions,
            "left_out": result.left_out,
        }
        for result in results
    ]


def from_json(found: Sequence[Mapping[str, Any]]) -> list[Result]:
    """What `as_json` gave, as results again. KeyError, TypeError or ValueError if it is something else."""
    results = [
        Result(
            model=each["model"],
            format=each["format"],
            threads=each["threads"],
            cells=tuple(Cell(*cell) for cell in each["cells"]),
            rates={
                engine: {title: [Rate(**rate) for rate in rates] for title, rates in by_cell.items()}
                for engine, by_cell in each["rates"].items()
            },
            costs={
                engine: {title: Cost(*cost) for title, cost in by_cell.items()}
                for engine, by_cell in each["bytes_and_flops"].items()
            },
            distinct_experts=each["distinct_experts"],
            step_us=each["step_us"],
            stream_bps=each["stream_bps"],
            peak_flops=each["peak_flops"],
            load_average=each["load_average"],
            versions=each["versions"],
            left_out=each["left_out"],
        )
        for each in found
    ]
    for result in results:
        msgspec.convert(msgspec.to_builtins(result), Result)  # values of other types
        if not result.stream_bps or not result.load_average:
            raise ValueError("a result without rounds")
    return results


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
