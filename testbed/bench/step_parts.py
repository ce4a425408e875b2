"""Where a decode step's time goes, per layer: dense products, attention, experts, Python, waiting. One process, no sockets.

The compiled kernels tell how long their calls took, by kind; what no call took is Python. Times are of the clock, so that
waiting shows: measure on a machine that does nothing else.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_runtime.errors import ConfigError
from edge_runtime.model.checkpoint import Checkpoint
from kernels import backends
from testbed.bench.peers.own_worker import OwnRunner, StepSeconds
from testbed.bench.sitting import Corpus, Sitting, free_ports, one_node

CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class StepParts:
    """Microseconds of one decode step; the first five are sums over all layers."""

    dense: float
    """Norms, projections, rope, gate."""
    attention: float
    """Over keys and values."""
    experts: float
    """Routed experts and dense MLPs, with their sum."""
    waiting: float
    """For other nodes; none in one process."""
    python: float
    """What no kernel took, in layers and around them, sampling included."""
    head: float
    """The last norm and product, Python included."""
    step: float
    layers: int
    requests: int


def parts_of(found: StepSeconds, requests: int, waiting_s: float = 0.0) -> StepParts:
    """One step's seconds in parts that add up to it. The head, which is nearly all kernel, is taken out of what is dense."""
    dense, attention, experts = found.spent
    dense = max(0.0, dense - found.head)
    python = max(0.0, found.step - dense - attention - experts - found.head - waiting_s)
    return StepParts(
        dense=dense * 1e6,
        attention=attention * 1e6,
        experts=experts * 1e6,
        waiting=waiting_s * 1e6,
        python=python * 1e6,
        head=found.head * 1e6,
        step=found.step * 1e6,
        layers=found.num_layers,
        requests=requests,
    )


def measure(
    model: Path, format: str, threads: int, batches: Sequence[int], steps: int, corpus: Corpus
) -> list[StepParts]:
    """Load the model in this process and run `steps` decode steps of each batch, after as many that warm up."""
    if backends.active().NAME != "native":
        raise ConfigError(
            f"a step is taken apart by the compiled kernels, and {backends.active().NAME} serves; build them with `make install`"
        )
    with TemporaryDirectory(prefix="edge-step-") as folder:
        topology = Path(folder) / "one_node.toml"
        context = min(CONTEXT_TOKENS, Checkpoint.open(model).spec.context_tokens)
        sitting = Sitting(model, batches=tuple(batches), steps=steps)
        topology.write_text(one_node(sitting, format, threads, context, free_ports(2)))
        runner = OwnRunner({"topology": str(topology)})
    found = []
    for requests in batches:
        prompts = corpus.prompts(requests, sitting.prompt_tokens, requests)
        runner.decode(prompts, steps)
        found.append(parts_of(runner.step_parts(prompts, steps), requests))
    return found


def table(model: str, format: str, threads: int, found: Sequence[StepParts]) -> str:
    """Markdown: a line for each batch, microseconds per layer, then per step."""
    lines = [
        f"### A decode step of {model}, {format}, {threads} thread{'s' * (threads > 1)}: microseconds",
        "",
        "| requests | dense / layer | attention / layer | experts / layer | waiting / layer | Python / layer | head | step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for parts in found:
        layers = max(1, parts.layers)
        each = (parts.dense, parts.attention, parts.experts, parts.waiting, parts.python)
        shown = " | ".join(f"{part / layers:.1f}" for part in each)
        lines.append(f"| {parts.requests} | {shown} | {parts.head:.0f} | {parts.step:.0f} |")
    return "\n".join(lines)


def as_json(model: str, format: str, threads: int, found: Sequence[StepParts]) -> dict[str, Any]:
    """Plain values of `table`."""
    return {"model": model, "format": format, "threads": threads, "steps": [asdict(parts) for parts in found]}
