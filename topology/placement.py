"""A placement for a cluster and a model: the one call of whoever does not care how it was chosen.

Knows no more than `layout.py`, and `stages.py` where the cluster leaves the plan open.
"""

from topology.layout import lay_out as plan_placement
from topology.node_plan import GroupPlan, NodePlan, Placement, Stage

__all__ = ["GroupPlan", "NodePlan", "Placement", "Stage", "plan_placement"]
