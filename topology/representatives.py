"""Place experts by their similarity groups: one member of each group on as many nodes as can be, then copies by benefit
per byte for busy nodes. Knows only shelves and traits.

How much an expert is worth on a node is what the node's own requests would get out of it: hits on the expert itself,
and, where no member of its group is there yet, the chance that it stands in for the others.
"""

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from topology.ids import ExpertId
from topology.shelf import Shelf
from topology.traits import ExpertTraits, Floats, Traffic

STAND_IN_WEIGHT = 1.0
"""How much a choice counts that a substitute may serve, beside one that is served exactly."""


class Benefit:
    """What copies are worth to the nodes whose attention they spare a call. Follows what is put on the shelves.

    stand_in_weight  0: only exact hits count, as for popularity
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        traits: ExpertTraits,
        traffic: Traffic,
        stand_in_weight: float = STAND_IN_WEIGHT,
    ) -> None:
        self._row = {layer: row for row, layer in enumerate(traits.layers)}
        self._group_of = traits.groups.group_of.tolist()
        self._weight = stand_in_weight
        self._share = [traffic.share_of(shelf.node) for shelf in shelves]
        tables = [traits.frequency_at(traffic.mix.get(shelf.node)) for shelf in shelves]
        self._hits = [table.tolist() for table in tables]
        self._stand_ins = [_stand_ins(table, traits).tolist() for table in tables]
        self._covered = [
            {(expert.layer, self.group(expert)) for expert in shelf.experts} for shelf in shelves
        ]
        self._shelves = shelves

    def group(self, expert: ExpertId) -> int:
        return self._group_of[self._row[expert.layer]][expert.index]

    def hits(self, index: int, expert: ExpertId) -> float:
        """What a shelf's own requests would find there of the expert itself; 0 on a node that only lends experts."""
        if not self._shelves[index].is_home_of(expert):
            return 0.0
        return self._share[index] * self._hits[index][self._row[expert.layer]][expert.index]

    def of(self, index: int, expert: ExpertId) -> float:
        """Hits, and stand-ins gained as the shelf is now. Only falls as more is put there."""
        if not self._shelves[index].is_home_of(expert):
            return 0.0
        row = self._row[expert.layer]
        gained = self._hits[index][row][expert.index]
        if self._weight and (expert.layer, self._group_of[row][expert.index]) not in self._covered[index]:
            gained += self._weight * self._stand_ins[index][row][expert.index]
        return self._share[index] * gained

    def put(self, index: int, expert: ExpertId) -> None:
        """Put a copy on a shelf."""
        self._shelves[index].put(expert)
        self._covered[index].add((expert.layer, self.group(expert)))


def _stand_ins(frequency: Floats, traits: ExpertTraits) -> Floats:
    """[M, E] share of choices of an expert's group, times its mean similarity to the others of it; 0 if it has none."""
    together = traits.groups.together
    of_group = np.einsum("mij,mj->mi", together.astype(np.float64), frequency)
    others = together & ~np.eye(together.shape[1], dtype=bool)
    alike = np.where(others, np.maximum(traits.similarity, 0.0), 0.0).sum(axis=2)
    return of_group * alike / np.maximum(others.sum(axis=2), 1)


def importance(traits: ExpertTraits) -> Floats:
    """[M, E] frequency, raised by how much of its group an expert can stand in for."""
    together = traits.groups.together & ~np.eye(traits.frequency.shape[1], dtype=bool)
    stands_for = np.where(together, np.maximum(traits.similarity, 0.0) * traits.frequency[:, None, :], 0.0)
    return traits.frequency * (1 + stands_for.sum(axis=2))


def spread_groups(shelves: Sequence[Shelf], traits: ExpertTraits, traffic: Traffic) -> None:
    """Exchange first copies within each layer, which changes no byte, so that members of a group stand apart.

    Groups go by how often they are chosen, members by importance. Each goes where the fewest of its group are, before
    all to nodes with requests of their own, there to the one that would call it most, then to the emptiest.
    """
    benefit = Benefit(shelves, traits, traffic)
    weight = importance(traits)
    for row, layer in enumerate(traits.layers):
        held = [
            {expert for expert in shelf.experts if expert.layer == layer and expert not in shelf.pinned}
            for shelf in shelves
        ]
        slots = [len(experts) for experts in held]
        left = list(slots)
        movable = {expert for experts in held for expert in experts}
        for shelf, experts in zip(shelves, held, strict=True):
            shelf.experts.difference_update(experts)  # used_bytes stays: as many come back
        in_group = [_counts_by_group(shelf.experts, benefit, layer) for shelf in shelves]
        for members in _by_frequency(traits, row):
            for index in sorted(members, key=lambda index: (-weight[row, index], index)):
                expert = ExpertId(layer, index)
                if expert not in movable:
                    continue
                group = benefit.group(expert)
                chosen = min(
                    (at for at in range(len(shelves)) if left[at]),
                    key=lambda at: (
                        in_group[at].get(group, 0),
                        -benefit.hits(at, expert),
                        (slots[at] - left[at]) / slots[at],
                        shelves[at].burden,
                        shelves[at].node,
                    ),
                )
                shelves[chosen].experts.add(expert)
                left[chosen] -= 1
                in_group[chosen][group] = in_group[chosen].get(group, 0) + 1


def _by_frequency(traits: ExpertTraits, row: int) -> list[list[int]]:
    groups = traits.groups.members(row)
    return sorted(groups, key=lambda members: (-float(traits.frequency[row, members].sum()), members))


def _counts_by_group(experts: Collection[ExpertId], benefit: Benefit, layer: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for expert in experts:
        if expert.layer == layer:
            group = benefit.group(expert)
            counts[group] = counts.get(group, 0) + 1
    return counts


def add_copies_by_benefit(
    shelves: Sequence[Shelf],
    experts: Sequence[ExpertId],
    traits: ExpertTraits,
    traffic: Traffic,
    *,
    max_replicas: int,
    stand_in_weight: float = STAND_IN_WEIGHT,
) -> int:
    """Put up to `max_replicas` more copies where they are worth most per byte; say how many there were.

    Ends where nothing is worth anything any more: on nodes without requests of their own a copy spares no call.
    Lazily greedy: a benefit is worked out anew only when it comes to the front, since it only falls.
    """
    benefit = Benefit(shelves, traits, traffic, stand_in_weight)
    sizes = [shelf.layer_sizes for shelf in shelves]
    queue = [
        (-worth / sizes[at][expert.layer], shelves[at].node, expert, at)
        for at in range(len(shelves))
        for expert in experts
        if shelves[at].takes(expert) and (worth := benefit.of(at, expert)) > 0 and sizes[at][expert.layer]
    ]
    heapify(queue)
    num_added = 0
    while queue and num_added < max_replicas:
        claimed, node, expert, at = queue[0]
        if not shelves[at].takes(expert):
            heappop(queue)
            continue
        worth = -benefit.of(at, expert) / sizes[at][expert.layer]
        if worth > claimed:
            heapreplace(queue, (worth, node, expert, at))
            continue
        heappop(queue)
        benefit.put(at, expert)
        num_added += 1
    return num_added
