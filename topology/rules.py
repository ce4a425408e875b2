"""The rules by which experts are placed, of which a topology file names one: all on the same shelves.

A rule settles shelves on which every expert stands once, and says where further copies go. Knows no cluster.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from topology.baselines import balance_load, fewest_calls, shuffle
from topology.cluster import PLACEMENTS
from topology.ids import ExpertId
from topology.replicas import add_replicas
from topology.representatives import add_copies_by_benefit, spread_groups
from topology.shelf import Shelf
from topology.spread import give_hot_experts_to_fast_nodes
from topology.traits import ExpertTraits, Traffic

SPREAD, SIMILARITY, POPULARITY, EPLB, LATENCY, RANDOM = PLACEMENTS
"""By room alone; by similarity groups; by how often an expert is chosen; by load; for the fewest calls; at random."""
NEED_TRAITS = (SIMILARITY, POPULARITY, EPLB, LATENCY)


@dataclass(frozen=True)
class Rule:
    """One rule and what it looks at."""

    name: str = SPREAD
    """Of `PLACEMENTS`."""
    demand: Mapping[ExpertId, float] | None = None
    """Tokens that each expert receives, in any unit; None if all are alike."""
    traits: ExpertTraits | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def settle(self, shelves: Sequence[Shelf], experts: Sequence[ExpertId], *, max_copies: int) -> None:
        """Rearrange shelves that hold every expert once, and put further copies where the rule wants them."""
        max_replicas = max_copies - sum(len(shelf.experts) for shelf in shelves)
        if self.name == SIMILARITY:
            spread_groups(shelves, self._traits(), self.traffic)
        elif self.name in (EPLB, LATENCY):
            self._fill_anew(shelves, experts, max_copies)
        elif self.name == RANDOM:
            shuffle(shelves, experts, max_replicas=max_replicas)
        elif self.demand is not None:
            give_hot_experts_to_fast_nodes(shelves, self.demand)
        self.replicate(shelves, experts, max_copies=max_copies)

    def replicate(self, shelves: Sequence[Shelf], experts: Sequence[ExpertId], *, max_copies: int) -> None:
        """Put further copies on shelves that hold at least one of each, up to `max_copies` in all."""
        if self.name in (SIMILARITY, POPULARITY):
            weight = {"stand_in_weight": 0.0} if self.name == POPULARITY else {}
            room = max_copies - sum(len(shelf.experts) for shelf in shelves)
            add_copies_by_benefit(shelves, experts, self._traits(), self.traffic, max_replicas=room, **weight)
        # What is left over spares nobody a call, and makes up for lost nodes.
        room = max_copies - sum(len(shelf.experts) for shelf in shelves)
        add_replicas(shelves, experts, max_replicas=room, demand=self.demand)

    def _fill_anew(self, shelves: Sequence[Shelf], experts: Sequence[ExpertId], max_copies: int) -> None:
        """By a rule that packs from nothing; where sizes differ it may not find a place for all, and nothing changes."""
        before = deepcopy([(shelf.experts, shelf.used_bytes) for shelf in shelves])
        if self.name == EPLB:
            balance_load(shelves, experts, self._traits().demand(), max_copies=max_copies)
        else:
            fewest_calls(shelves, experts, self._traits(), self.traffic, max_copies=max_copies)
        if set().union(*(shelf.experts for shelf in shelves)) != set(experts):
            for shelf, (held, used_bytes) in zip(shelves, before, strict=True):
                shelf.experts, shelf.used_bytes = held, used_bytes

    def _traits(self) -> ExpertTraits:
        assert self.traits is not None, f"the rule {self.name} was let through without traits"
        return self.traits
