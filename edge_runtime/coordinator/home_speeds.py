"""How fast each home decodes against the others, by what was measured of nodes and links. Pure.

A request is worth less pressure where it is served faster. Speeds are those that the step-time model predicts for a home that
is half full, in steps of a tenth: homes that differ by less than measurements do stay equal, and ties go as they always did.
"""

import math

from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.node_plan import GroupPlan
from topology.placement import Placement
from topology.speeds import Measured, machines_of
from topology.step_time import GroupPrediction, PlacementClock
from topology.workload import period_s

STEP = 1.1
LEAST, MOST = 1 / 16, 16.0


def home_speeds(
    cluster: Cluster, footprint: ModelFootprint, placement: Placement, measured: Measured
) -> dict[str, float]:
    """First node of each decode group -> its rate over the mean one of all, 1 for homes that are alike.

    Empty where there is nothing to compare, or nothing was measured or declared that tells homes apart.
    """
    if len(placement.groups) < 2 or (footprint.moe_layers and not (footprint.width and footprint.top_k)):
        return {}
    machines = machines_of(cluster, measured.speeds, measured.links, measured.cores)
    clock = PlacementClock(footprint, machines, placement)
    batch = max(1, cluster.max_requests // 2)

    def predict(group: GroupPlan, count: int) -> GroupPrediction:
        return clock.predict(group, count)

    rates = {group.nodes[0]: 1.0 / period_s(predict, group, batch) for group in placement.groups}
    mean = math.exp(sum(math.log(max(rate, 1e-9)) for rate in rates.values()) / len(rates))
    return {home: _in_steps(rate / mean) for home, rate in rates.items()}


def _in_steps(speed: float) -> float:
    bounded = min(max(speed, LEAST), MOST)
    return STEP ** round(math.log(bounded, STEP))
