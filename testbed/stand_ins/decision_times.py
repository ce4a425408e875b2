"""How long a selector takes to decide one layer: processor time on made-up rows, with a model's own tables."""

from statistics import median
from time import process_time
from typing import Any

import numpy as np

from edge_runtime.selector.candidates import layer_view
from edge_runtime.selector.choose import FOREVER_S, NO_OPTIONS, POLICIES, Peers, Slots
from edge_runtime.selector.learned import Losses

NUM_PEERS = 7
CASES, REPEATS = 100, 9


def decision_times(
    losses: Losses, *, top_k: int, batches: tuple[int, ...] = (1, 16, 64)
) -> list[dict[str, Any]]:
    """One row for each policy and batch: microseconds of a layer, the median and both ends over repetitions.

    Half of the experts are here, the others at seven peers; each row may spend, so all of them are weighed.
    """
    draw = np.random.default_rng(1)
    E = losses.loss.shape[1]
    hosts = np.where(draw.random(E) < 0.5, 0, draw.integers(1, NUM_PEERS + 1, E)).astype(np.int32)
    view = layer_view(hosts, losses.near[0], losses.loss[0], power=losses.power)
    waits = np.array([0.0, *draw.uniform(0.004, 0.006, NUM_PEERS), FOREVER_S])
    peers = Peers(waits, np.array([0.0, *[8e-5] * NUM_PEERS, 0.0]))
    rows = []
    for batch in batches:
        cases = [_slots(draw, batch, E, top_k) for _ in range(CASES)]
        late = NO_OPTIONS._replace(late=np.full(E, 0.02))
        for name, policy, options in (
            ("paper", "paper", NO_OPTIONS),
            ("live", "live", NO_OPTIONS),
            ("live, late replies", "live", late),
        ):
            times = []
            for _ in range(REPEATS):
                began = process_time()
                for slots in cases:
                    POLICIES[policy](view, peers, slots, options)
                times.append((process_time() - began) / CASES * 1e6)
            rows.append(
                {
                    "policy": name,
                    "experts": E,
                    "top_k": top_k,
                    "batch": batch,
                    "us": median(times),
                    "us_min": min(times),
                    "us_max": max(times),
                }
            )
    return rows


def _slots(draw: np.random.Generator, batch: int, num_experts: int, top_k: int) -> Slots:
    logits = draw.normal(size=(batch, num_experts)).astype(np.float32)
    ids = np.argsort(-logits, axis=1)[:, :top_k].astype(np.int32)
    drag = draw.uniform(0, 0.05, batch)
    weights = -np.sort(-draw.dirichlet(np.ones(top_k), batch), axis=1)
    return Slots(ids, weights.astype(np.float32), logits, np.full(batch, 0.1), np.full(batch, 0.5), drag)
