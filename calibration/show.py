"""What an artifact says, for people: how alike experts are by depth, how unevenly they are used, what errors cost where.

Reads sections, prints text and draws pictures. Sections that are not there are left out. Knows no model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from edge_runtime.artifacts import Artifact
from edge_runtime.errors import ArtifactError, ConfigError
from edge_runtime.tables import table_text

BAR_COLUMNS = 24
NEEDED = ("similarity", "frequency", "sensitivity", "mismatch", "together")


def layer_rows(artifact: Artifact) -> list[dict[str, Any]]:
    """One row for each routed layer: what the sections that are there say of it."""
    present = [name for name in NEEDED if artifact.has(name)]
    if not present:
        raise ArtifactError(
            f"calibration artifact {artifact.folder} has none of the sections {', '.join(NEEDED)}, found "
            f"{', '.join(artifact.sections) or 'none'}; run `edge-runtime calibrate`"
        )
    rows: list[dict[str, Any]] = [{"layer": layer} for layer in artifact.meta(present[0])["layers"]]
    for name in present:
        tensors = artifact.tensors(name)
        for index, row in enumerate(rows):
            row |= _ROW_OF[name]({key: tensor[index] for key, tensor in tensors.items() if key in _OF_LAYERS})
    return rows


_OF_LAYERS = (
    "raw",
    "centred",
    "overall",
    "decode",
    "weight",
    "mismatch",
    "norm",
    "rows",
    "sensitivity",
    "scale",
    "quadratic",
    "late",
)


def _similarity(tensors: dict[str, Tensor]) -> dict[str, float]:
    found: dict[str, float] = {}
    for kind in ("raw", "centred"):
        pairs = _pairs(tensors[kind])
        found |= {f"{kind}_mean": float(pairs.mean()), f"{kind}_max": float(pairs.max())}
        found[f"{kind}_closest"] = float(_without_self(tensors[kind], -2.0).amax(1).mean())
    return found


def _frequency(tensors: dict[str, Tensor]) -> dict[str, float]:
    shares = tensors["decode"].double()
    shares = shares / shares.sum().clamp_min(1e-30)
    top = shares.sort(descending=True).values
    entropy = -(shares * shares.clamp_min(1e-30).log()).sum()
    return {
        "most_used": float(top[0] * len(top)),
        "top_tenth": float(top[: max(1, round(len(top) / 10))].sum()),
        "effective_experts": float(entropy.exp()),
        "never_used": int((shares == 0).sum()),
    }


def _mismatch(tensors: dict[str, Tensor]) -> dict[str, float]:
    pairs = _pairs(tensors["mismatch"])
    return {
        "mismatch_mean": float(pairs.mean()),
        "mismatch_closest": float(_without_self(tensors["mismatch"], 1e9).amin(1).mean()),
        "left_out": float(tensors["norm"].float().mean()),
    }


def _sensitivity(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(tensors[name]) for name in ("sensitivity", "quadratic", "scale") if name in tensors}


def _together(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {"late": float(tensors["late"])}


_ROW_OF = {
    "similarity": _similarity,
    "frequency": _frequency,
    "mismatch": _mismatch,
    "sensitivity": _sensitivity,
    "together": _together,
}


def _pairs(table: Tensor) -> Tensor:
    """The numbers [E * (E - 1)] of a table [E, E] that are not on the diagonal; one 0 if there are none."""
    off = ~torch.eye(len(table), dtype=torch.bool)
    return table.float()[off] if len(table) > 1 else torch.zeros(1)


def _without_self(table: Tensor, instead: float) -> Tensor:
    return table.float().masked_fill(torch.eye(len(table), dtype=torch.bool), instead)


COLUMNS = (
    ("raw_mean", "raw cosine", "{:.3f}"),
    ("centred_closest", "closest, centred", "{:.3f}"),
    ("most_used", "most used / mean", "{:.2f}"),
    ("top_tenth", "top tenth %", "{:.1%}"),
    ("effective_experts", "effective experts", "{:.1f}"),
    ("never_used", "never used", "{}"),
    ("mismatch_mean", "mismatch", "{:.2f}"),
    ("mismatch_closest", "closest", "{:.2f}"),
    ("left_out", "left out", "{:.2f}"),
    ("sensitivity", "sensitivity", "{:.4f}"),
    ("quadratic", "quadratic", "{:.4f}"),
    ("late", "late", "{:.4f}"),
)
BARS = (
    ("raw_mean", "similarity by depth: mean cosine of raw gate logits"),
    ("centred_closest", "similarity by depth: centred cosine with the closest other expert, mean"),
    ("top_tenth", "frequency skew: share of decoded tokens that the most used tenth of the experts takes"),
    ("sensitivity", "sensitivity: nats lost for each relative deviation of a layer's output"),
)
NOTES = (
    "mismatch: length of the difference of two experts' outputs for rows of the first, by the length of the layer's output",
    "left out: the same with nothing in place of the expert; quadratic: nats for each squared relative deviation",
    "late: the same where the output is added one layer late; 0 where that cannot be",
)


def artifact_text(artifact: Artifact) -> str:
    """Head, table and bars."""
    about, rows = artifact.index.corpus, layer_rows(artifact)
    lines = [f"calibration of {artifact.index.model or 'a model'}, model hash {artifact.model_hash}"]
    if about:
        lines.append(
            f"{about.get('requests', '?')} requests, {about.get('tokens', '?')} tokens of "
            f"{len(about.get('domains', ()))} domains ({', '.join(about.get('domains', ()))}), seed {about.get('seed')}"
        )
    lines += [f"sections: {', '.join(artifact.sections)}", "", _table(rows), "", *NOTES]
    if artifact.has("together"):
        alone, together = artifact.tensor("together", "factors").tolist()
        lines.append(
            f"stand-ins in several layers of a token: {alone:.2f} times what each costs alone by these tables, and "
            f"{together:.2f} times what they would cost beyond that if all erred the same way"
        )
    for name, title in BARS:
        if name in rows[0]:
            lines += ["", title, *_bars([(f"layer {row['layer']}", row[name]) for row in rows])]
    return "\n".join(lines)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    shown = [column for column in COLUMNS if column[0] in rows[0]]
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right")
    for _, title, _ in shown:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(str(row["layer"]), *(form.format(row[name]) for name, _, form in shown))
    return table_text(table)


def _bars(values: Sequence[tuple[str, float]]) -> list[str]:
    """A line for each value, the longest as long as there is room; values below 0 have no bar."""
    longest = max((value for _, value in values), default=0.0)
    width = max(len(name) for name, _ in values)
    return [
        f"  {name:>{width}} {value:8.4f} {'#' * round(BAR_COLUMNS * max(value, 0.0) / longest) if longest > 0 else ''}".rstrip()
        for name, value in values
    ]


def draw(artifact: Artifact, path: Path) -> bool:
    """Draw the picture of an artifact to a file; False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = layer_rows(artifact)
    layers = [row["layer"] for row in rows]
    figure = Figure(figsize=(13, 8), layout="constrained")
    similarity, skew, cost, mismatch = figure.subplots(2, 2).flat
    if artifact.has("similarity"):
        tables = artifact.tensors("similarity")
        for kind in ("raw", "centred"):
            pairs = torch.stack([_pairs(table) for table in tables[kind]]).double()
            low, middle, high = (pairs.quantile(share, dim=1) for share in (0.1, 0.5, 0.9))
            similarity.fill_between(layers, low, high, alpha=0.2)
            similarity.plot(layers, middle, marker="o", label=f"{kind}: median, 10 to 90 %")
    if artifact.has("frequency"):
        shares = artifact.tensor("frequency", "decode").double()
        for index, layer in enumerate(layers):
            skew.plot(shares[index].sort(descending=True).values.numpy(), label=f"layer {layer}")
    if artifact.has("sensitivity"):
        cost.bar([str(layer) for layer in layers], artifact.tensor("sensitivity", "sensitivity").numpy())
    if artifact.has("mismatch"):
        pairs = [_pairs(table).numpy() for table in artifact.tensor("mismatch", "mismatch")]
        mismatch.boxplot(pairs, tick_labels=[str(layer) for layer in layers], showfliers=False)
    for axes, title, x, y in (
        (similarity, "similarity of gate logits by depth", "layer", "cosine"),
        (skew, "use of experts while decoding", "expert, most used first", "share of tokens"),
        (cost, "sensitivity", "layer", "nats per relative deviation"),
        (mismatch, "mismatch of outputs", "layer", "relative deviation"),
    ):
        axes.set(title=title, xlabel=x, ylabel=y)
        if axes.get_legend_handles_labels()[0] and len(layers) <= 12:
            axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {path}: {error.strerror}") from error
    except ValueError as error:  # no format of that name
        raise ConfigError(f"the picture cannot be written to {path}: {error}") from error
    return True
