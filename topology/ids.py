"""Names of the things that are placed. Knows nothing of models, nodes or files."""

from collections.abc import Iterable
from typing import NamedTuple


class ExpertId(NamedTuple):
    """One routed expert: its layer in the model and its index within the layer, both counted from 0."""

    layer: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants of an id

    def __str__(self) -> str:
        return f"layer {self.layer} expert {self.index}"


def describe_experts(experts: Iterable[ExpertId], *, max_layers: int = 4) -> str:
    """Name experts in one line for people: `layer 0: 1-3, 7; layer 2: 4; and 12 in 3 more layers`."""
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted(set(experts)):
        by_layer.setdefault(layer, []).append(index)
    if not by_layer:
        return "none"
    shown = [f"layer {layer}: {_ranges(by_layer[layer])}" for layer in list(by_layer)[:max_layers]]
    rest = [len(by_layer[layer]) for layer in list(by_layer)[max_layers:]]
    if rest:
        shown.append(f"and {sum(rest)} in {len(rest)} more layer{'s' if len(rest) > 1 else ''}")
    return "; ".join(shown)


def _ranges(indices: list[int]) -> str:
    """Ascending numbers with runs folded: [1, 2, 3, 7] -> `1-3, 7`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], index]
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
