"""A placement for a cluster and a model: the one call of whoever does not care how it was chosen.

Knows no more than `layout.py`, and `stages.py` where the cluster leaves the plan open.
"""

from collections.abc import Mapping

from topology.cluster import Cluster
from topology.costs import ModelFootprint
from topology.ids import ExpertId
from topology.layout import lay_out
from topology.node_plan import GroupPlan, NodePlan, Placement, Stage
from topology.speeds import LinkSpeed, NodeSpeed
from topology.stages import choose_plan
from topology.traits import ExpertTraits, Traffic
from topology.workload import Workload

__all__ = ["GroupPlan", "NodePlan", "Placement", "Stage", "plan_placement"]


def plan_placement(
    cluster: Cluster,
    footprint: ModelFootprint,
    *,
    epoch: int = 1,
    demand: Mapping[ExpertId, float] | None = None,
    speeds: Mapping[str, NodeSpeed] | None = None,
    links: Mapping[tuple[str, str], LinkSpeed] | None = None,
    cores: Mapping[str, float] | None = None,
    pins: Mapping[ExpertId, str] | None = None,
    previous: Placement | None = None,
    workload: Workload | None = None,
    traits: ExpertTraits | None = None,
    traffic: Traffic | None = None,
) -> Placement:
    """Place a model on a cluster, or raise `PlacementError` with the bytes that are needed and available.

    With `plan = "home"` in the file every decode node is a home, as `lay_out` says, and nothing is predicted; with any
    other plan `choose_plan` decides, and this is its placement.
    """
    if cluster.plan == "home":
        return lay_out(
            cluster,
            footprint,
            epoch=epoch,
            demand=demand,
            speeds=speeds,
            pins=pins,
            previous=previous,
            traits=traits,
            traffic=traffic,
        )
    return choose_plan(
        cluster,
        footprint,
        workload=workload,
        speeds=speeds,
        links=links,
        cores=cores,
        demand=demand,
        pins=pins,
        previous=previous,
        epoch=epoch,
        traits=traits,
        traffic=traffic,
    ).placement
