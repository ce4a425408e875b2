"""Compare lanes with none: Poisson arrivals of mixed K at several loads, several seeds, times from a cost model.

Each seed's arrivals are served twice, with lanes and without; what is compared are pairs. Writes a table, a CSV and a plot.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

import numpy as np

from edge_runtime.routing.lanes import LaneSettings
from testbed.lanes.costs import StepCosts
from testbed.lanes.replay import Outcome, capacity, replay, workload

Row = dict[str, Any]
WAYS = {"own tiers": False, "batch maximum": True}


class Setting(NamedTuple):
    """What is replayed. loads: shares of what the homes could answer without lanes; tiers: drawn alike often."""

    tiers: tuple[int, ...]
    num_homes: int = 4
    loads: tuple[float, ...] = (0.5, 0.8, 0.95)
    seeds: int = 5
    requests: int = 1000
    slots: int = 16
    dwell_s: float = 2.0


def compare(costs: StepCosts, setting: Setting, say: Callable[[str], None] = lambda line: None) -> list[Row]:
    """One row for each way of running a batch and each load."""
    full = costs.geometry.full_tier
    lanes = LaneSettings(full, dwell_s=setting.dwell_s, freeze_s=2.5 * setting.dwell_s)
    rows = []
    for way, batch_max in WAYS.items():
        most = capacity(costs, setting.tiers, setting.num_homes, slots=setting.slots, batch_max=batch_max)
        for load in setting.loads:
            pairs: list[tuple[Outcome, Outcome]] = []
            for seed in range(setting.seeds):
                arrivals = workload(setting.requests, load * most, setting.tiers, np.random.default_rng(seed))
                without, with_lanes = (
                    replay(
                        arrivals,
                        costs,
                        num_homes=setting.num_homes,
                        lanes=each,
                        slots=setting.slots,
                        batch_max=batch_max,
                    )
                    for each in (None, lanes)
                )
                pairs.append((without, with_lanes))
                say(f"{costs.geometry.name}, {way}, load {load:g}: {seed + 1} of {setting.seeds} seeds")
            rows.append(_row(costs, way, load, load * most, pairs, setting))
    return rows


def _row(
    costs: StepCosts,
    way: str,
    load: float,
    rate: float,
    pairs: Sequence[tuple[Outcome, Outcome]],
    setting: Setting,
) -> Row:
    found: Row = {
        "model": costs.geometry.name,
        "tiers": "/".join(map(str, setting.tiers)),
        "homes": setting.num_homes,
        "rows run": way,
        "load": load,
        "requests/s": round(rate, 3),
    }
    measures: dict[str, Callable[[Outcome], float]] = {
        "mean": lambda outcome: float(outcome.ttft_ms.mean()),
        "p99": lambda outcome: outcome.p(99),
        "p99 low K": lambda outcome: float(
            np.percentile(outcome.ttft_ms[outcome.tier == min(setting.tiers)], 99)
        ),
        "p99 high K": lambda outcome: float(
            np.percentile(outcome.ttft_ms[outcome.tier == max(setting.tiers)], 99)
        ),
    }
    for name, measure in measures.items():
        before, after = ([measure(pair[place]) for pair in pairs] for place in (0, 1))
        found[f"{name} ms"] = mean(before)
        found[f"{name} ms, lanes"] = mean(after)
        changes = [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]
        found[f"{name} %"] = 100 * (mean(after) / mean(before) - 1)
        found[f"{name} % sd"] = stdev(changes)
        found |= {f"{name} % median": median(changes), f"{name} % least": min(changes)}
        found[f"{name} % most"] = max(changes)
    found["tokens/s %"] = 100 * (
        mean(b.tokens_per_s for _, b in pairs) / mean(a.tokens_per_s for a, _ in pairs) - 1
    )
    found["over-served"] = mean(a.over_served for a, _ in pairs)
    found["over-served, lanes"] = mean(b.over_served for _, b in pairs)
    found["crossings"] = mean(b.crossings for _, b in pairs)
    found["moves"] = mean(b.moves for _, b in pairs)
    return found


def shown(rows: Sequence[Row]) -> list[Row]:
    """The columns that a person compares, rounded: means over all seeds, then median and range of what each seed changed by."""
    return [
        {
            "model": row["model"],
            "rows run": row["rows run"],
            "load": row["load"],
            **{
                f"{name} ms": f"{row[f'{name} ms']:.0f} to {row[f'{name} ms, lanes']:.0f} "
                f"({row[f'{name} %']:+.1f} %; by seed {row[f'{name} % median']:+.1f}, "
                f"{row[f'{name} % least']:+.1f} to {row[f'{name} % most']:+.1f})"
                for name in ("mean", "p99")
            },
            "p99 low K": f"{row['p99 low K %']:+.1f} %",
            "p99 high K": f"{row['p99 high K %']:+.1f} %",
            "over-served": f"{row['over-served']:.0%} to {row['over-served, lanes']:.0%}",
            "crossings": round(row["crossings"]),
        }
        for row in rows
    ]


def plot(path: Path, rows: Sequence[Row]) -> bool:
    """p99 against load, with lanes and without; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for model in dict.fromkeys(row["model"] for row in rows):
        for way in WAYS:
            mine = [row for row in rows if row["model"] == model and row["rows run"] == way]
            loads = [row["load"] for row in mine]
            for column, style in (("p99 ms", "--"), ("p99 ms, lanes", "-")):
                axes.plot(
                    loads, [row[column] for row in mine], style, marker="o", label=f"{model}, {way}, {column}"
                )
    axes.set_xlabel("load, share of what the homes could answer")
    axes.set_ylabel("time to the first token, ms")
    axes.set_yscale("log")
    axes.legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return True
