"""The rules by which experts are placed, of which a topology file names one: all on the same shelves.

A rule settles shelves on which every expert stands once, and says where further copies go. Knows no cluster.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topology.baselines import balance_load, fewest_calls, shuffle
from topology.cluster import PLACEMENTS
from topology.gather import Bools, Demand, gather
from topology.host_choice import cover_ranks
from topology.ids import ExpertId
from topology.replicas import add_replicas
from topology.representatives import STAND_IN_WEIGHT, add_copies_by_benefit, spread_groups
from topology.shelf import Shelf
from topology.spread import give_hot_experts_to_fast_nodes
from topology.step_time import scaled_to
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
    top_k: int = 0
    """K, experts of a token in a layer; 0 if not known: then nothing is gathered."""
    is_slower: Callable[[Bools], Bools] | None = None
    """Which layers of an arrangement [L, N, E] on the shelves would make steps slower; None: nobody can tell."""

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
        if self.name in (SIMILARITY, POPULARITY) and self.top_k:
            self._gather(shelves)

    def replicate(self, shelves: Sequence[Shelf], experts: Sequence[ExpertId], *, max_copies: int) -> None:
        """Put further copies on shelves that hold at least one of each, up to `max_copies` in all."""
        if self.name in (SIMILARITY, POPULARITY):
            weight = {"stand_in_weight": 0.0} if self.name == POPULARITY else {}
            room = max_copies - sum(len(shelf.experts) for shelf in shelves)
            add_copies_by_benefit(shelves, experts, self._traits(), self.traffic, max_replicas=room, **weight)
        # What is left over spares nobody a call, and makes up for lost nodes.
        room = max_copies - sum(len(shelf.experts) for shelf in shelves)
        add_replicas(shelves, experts, max_replicas=room, demand=self.demand)

    def _gather(self, shelves: Sequence[Shelf]) -> None:
        """Let what a home lacks stand on few peers, as `gather.py` says; a shelf may take what it has room for in every layer."""
        traits, layers = self._traits(), self._traits().layers
        weight = np.array(
            [[self.traffic.share_of(s.node) * (layer in s.home_layers) for layer in layers] for s in shelves]
        )
        if not weight.any():
            return
        held = as_table(shelves, traits)
        sizes = [sum(shelf.layer_sizes[layer] for layer in layers) for shelf in shelves]
        more = [shelf.free_bytes // size if size else 0 for shelf, size in zip(shelves, sizes, strict=True)]
        demand = Demand(
            weight=weight,
            chances=np.stack([chances_at(traits, self.traffic, shelf.node, self.top_k) for shelf in shelves]),
            together=traits.groups.together,
            stand_in=STAND_IN_WEIGHT if self.name == SIMILARITY else 0.0,
            top_k=self.top_k,
        )
        found = gather(
            held,
            held.sum(axis=2) + np.array(more)[None, :],
            as_table(shelves, traits, pinned_only=True),
            demand,
            cover_ranks([shelf.node for shelf in shelves], layers),
            self.is_slower,
        )
        for at, shelf in enumerate(shelves):
            for row, index in np.argwhere(held[:, at] & ~found[:, at]).tolist():
                shelf.take_away(ExpertId(layers[row], index))
            for row, index in np.argwhere(found[:, at] & ~held[:, at]).tolist():
                shelf.put(ExpertId(layers[row], index))

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


def as_table(
    shelves: Sequence[Shelf], traits: ExpertTraits, *, pinned_only: bool = False
) -> NDArray[np.bool_]:
    """[L, N, E] what stands on each shelf, or of that what may not leave."""
    row_of = {layer: row for row, layer in enumerate(traits.layers)}
    table = np.zeros((len(row_of), len(shelves), traits.frequency.shape[1]), dtype=bool)
    for at, shelf in enumerate(shelves):
        for expert in shelf.experts & shelf.pinned if pinned_only else shelf.experts:
            table[row_of[expert.layer], at, expert.index] = True
    return table


def chances_at(traits: ExpertTraits, traffic: Traffic, node: str, top_k: int) -> NDArray[np.float64]:
    """[L, E] that a token of a node's requests chooses each expert."""
    frequency = traits.frequency_at(traffic.mix.get(node))
    return np.stack([scaled_to(line + 1e-6 / len(line), top_k) for line in frequency])
