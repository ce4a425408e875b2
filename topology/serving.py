"""What a placement's groups do together under so many requests: seconds between two tokens, with shared processors.

Requests go to groups as the coordinator's router sends them: to the one with the fewest, the first of equals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topology.costs import ModelFootprint
from topology.ids import ExpertId
from topology.node_plan import GroupPlan, Placement
from topology.speeds import Machines
from topology.step_time import DEFAULT_CONTEXT_TOKENS, GroupPrediction, PlacementClock
from topology.workload import Predict, group_seconds


@dataclass(frozen=True)
class ServingPrediction:
    """`requests` answers at once: what one of them waits for a token, on average, and what all of them get."""

    requests: int
    seconds: float
    tokens_per_s: float
    groups: tuple[tuple[GroupPlan, int, float], ...]
    """Group, how many of the requests it has, seconds between two of their tokens."""
    peers_per_layer: float = 0.0
    """Nodes that a step calls for experts in a layer that has any, on average."""


def predict_serving(
    footprint: ModelFootprint,
    machines: Machines,
    placement: Placement,
    counts: Sequence[int],
    *,
    context_tokens: float = DEFAULT_CONTEXT_TOKENS,
    demand: Mapping[ExpertId, float] | None = None,
) -> tuple[ServingPrediction, ...]:
    """A prediction for each number of requests; none for a model of unknown shape, or where nobody answers."""
    if not placement.groups or (footprint.moe_layers and not (footprint.width and footprint.top_k)):
        return ()
    clock = PlacementClock(footprint, machines, placement, demand=demand)

    def predict(group: GroupPlan, batch: int) -> GroupPrediction:
        return clock.predict(group, batch, context_tokens)

    num_layers = len(footprint.moe_layers)
    return tuple(_at(predict, machines, placement.groups, requests, num_layers) for requests in counts)


def default_counts(most: int) -> tuple[int, ...]:
    """1, 4 and 16 requests, as far as there may be so many."""
    return tuple(count for count in (1, 4, 16) if count <= max(1, most))


def _at(
    predict: Predict, machines: Machines, groups: Sequence[GroupPlan], requests: int, num_layers: int
) -> ServingPrediction:
    shares = [requests // len(groups) + (index < requests % len(groups)) for index in range(len(groups))]
    used = [(group, share) for group, share in zip(groups, shares, strict=True) if share]
    seconds = group_seconds(predict, used, machines)
    told = tuple((group, share, took) for (group, share), took in zip(used, seconds, strict=True))
    called = sum(share * _calls(predict, group, share) for group, share in used)
    return ServingPrediction(
        requests=requests,
        seconds=sum(share * took for _, share, took in told) / requests,
        tokens_per_s=sum(share / took for _, share, took in told),
        groups=told,
        peers_per_layer=called / requests / num_layers if num_layers else 0.0,
    )


def _calls(predict: Predict, group: GroupPlan, requests: int) -> float:
    """Calls of one step of a group that has so many requests, in as many batches as it has stages."""
    batch = -(-requests // min(len(group.stages), requests))
    return sum(stage.calls for stage in predict(group, batch).stages)
