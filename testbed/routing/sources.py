"""Where the traces of a routing experiment come from, and what a step costs there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from edge_runtime.errors import ConfigError
from testbed.routing.experiment import measure_costs
from testbed.routing.replay import Costs
from testbed.routing.traces import GEOMETRIES, Traces, load, record, save, saving, synthetic

NUM_FIT, NUM_SERVE = 800, 480
FIXED_S, PER_ROW_S = 0.5e-3, 1.0e-4
"""Of a step of the demo model without its routed experts: README's table of one node at 1 and 16 streams."""
EXPERT_S = 8e-6
"""What one distinct expert of a drawn geometry costs; with 14.3 experts' worth of fixed cost, the fit to ELDR's figures."""
ATTENTION_SHARE = 0.3
"""Of a decode step that is not experts, as ELDR's figures imply."""


class Source(NamedTuple):
    """Requests to fit on, requests to serve, what a step costs; layers that costs count for; a line about all that."""

    fit: Traces
    serve: Traces
    costs: Costs
    model_layers: int
    about: str


def drawn_sources(name: str) -> Source:
    """Traces in the geometry of a published model."""
    if name not in GEOMETRIES:
        raise ConfigError(f"no geometry is called {name!r}; there are {', '.join(GEOMETRIES)}")
    geometry = GEOMETRIES[name]
    both = synthetic(geometry, NUM_FIT + NUM_SERVE)
    rows = range(NUM_FIT + NUM_SERVE)
    fit, serve = both.of(list(rows[:NUM_FIT])), both.of(list(rows[NUM_FIT:]))
    experts_s = geometry.model_layers * EXPERT_S * (14.3 + geometry.experts * 0.6)
    fixed = experts_s * ATTENTION_SHARE / (1 - ATTENTION_SHARE)
    costs = Costs(fixed=fixed, per_row=0.0, per_expert=EXPERT_S, prefill_per_token=2e-5)
    about = (
        f"{name}: {geometry.experts} experts top-{geometry.top_k}, {geometry.layers} layers drawn for {geometry.model_layers}; "
        f"batches of 32 of one domain touch {saving(serve, 32, 1):.1%} fewer experts than mixed ones"
    )
    return Source(fit, serve, costs, geometry.model_layers, about)


def recorded_sources(model: Path, corpus: Path, folder: Path | None, say: Callable[[str], None]) -> Source:
    """Traces of a model over text: its calibration split to fit on, its validation split to serve."""
    from calibration.exact_model import all_experts
    from edge_runtime.model.build import load_experts
    from edge_runtime.model.checkpoint import Checkpoint

    found = []
    for split, count, seed in (("calibration", NUM_FIT, 1), ("validation", NUM_SERVE, 2)):
        path = folder / f"{split}.npz" if folder is not None else None
        if path is not None and path.exists():
            found.append(load(path))
            continue
        say(f"recording {count} requests of the {split} split")
        found.append(record(model, corpus, split, count, seed=seed))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            save(found[-1], path)
    checkpoint = Checkpoint.open(model)
    spec = checkpoint.spec
    kept = folder / "costs.json" if folder is not None else None
    if kept is not None and kept.exists():
        a, b, c = json.loads(kept.read_text(encoding="utf-8"))
    else:
        store = load_experts(checkpoint, spec, all_experts(spec))
        gate = spec.layers[spec.moe_layers[0]].gate
        assert gate is not None, "a MoE layer has a gate"
        banks = [bank for layer in spec.moe_layers if (bank := store.bank(layer)) is not None]
        a, b, c = measure_costs(banks, gate.top_k)
        if kept is not None:  # so that what is compared in pieces is compared alike
            kept.write_text(json.dumps([a, b, c]), encoding="utf-8")
    per_row = PER_ROW_S + len(spec.moe_layers) * max(c, 0.0)
    costs = Costs(
        fixed=FIXED_S + len(spec.moe_layers) * max(a, 0.0),
        per_row=per_row,
        per_expert=max(b, 1e-9),
        base_experts=0.0,
        prefill_per_token=8e-5,
    )
    serve = found[1]
    about = (
        f"experts of a layer on this machine: {a * 1e6:.1f} us + {b * 1e6:.2f} us per distinct one + {c * 1e6:.2f} us per row; "
        f"batches of one domain touch {saving(serve, 8, 1):.1%} (8), {saving(serve, 16, 1):.1%} (16) fewer experts than mixed"
    )
    return Source(found[0], serve, costs, len(spec.moe_layers), about)
