"""What part of the gate's choices a placement serves on the nodes where requests live. An expectation; decides nothing."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.node_plan import Placement
from topology.traits import ExpertTraits, Traffic


@dataclass(frozen=True)
class Coverage:
    """Shares of all choices, weighed by where requests live; 0 to 1."""

    exact: float
    """The expert itself is there: no call."""
    covered: float
    """It or another of its similarity group is there: with a quality budget, no call either."""
    apart: float
    """Groups of several experts that do not all stand on one and the same node; 1 where there are none of several."""


def coverage_of(placement: Placement, traits: ExpertTraits, traffic: Traffic | None = None) -> Coverage:
    """What the homes of a placement find on their own node; 0 where nothing lives anywhere."""
    traffic = traffic or Traffic()
    row_of = {layer: row for row, layer in enumerate(traits.layers)}
    together = traits.groups.together
    here = {}
    for plan in placement.nodes:
        held = np.zeros(traits.frequency.shape, dtype=bool)
        for expert in plan.experts:
            held[row_of[expert.layer], expert.index] = True
        here[plan.node] = held
    exact = covered = total = 0.0
    for stage in (stage for group in placement.groups for stage in group.stages):
        rows = [row_of[layer] for layer in stage.layers if layer in row_of]
        frequency = traits.frequency_at(traffic.mix.get(stage.node))[rows]
        held, share = here[stage.node][rows], traffic.share_of(stage.node)
        exact += share * float((frequency * held).sum())
        covered += share * float((frequency * (together[rows] & held[:, None, :]).any(axis=2)).sum())
        total += share * float(frequency.sum())
    return Coverage(
        exact / total if total else 0.0, covered / total if total else 0.0, _apart(here.values(), traits)
    )


def _apart(held: Collection[NDArray[np.bool_]], traits: ExpertTraits) -> float:
    """Share of groups of several experts of which no node holds all."""
    num_groups = num_apart = 0
    for row in range(len(traits.layers)):
        for members in traits.groups.members(row):
            if len(members) > 1:
                num_groups += 1
                num_apart += not any(bool(table[row, members].all()) for table in held)
    return num_apart / num_groups if num_groups else 1.0
