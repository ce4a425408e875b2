"""Other ways to place experts, for comparison: at random, by load alone, and for the fewest expected calls.

Each fills shelves that hold at least their pinned experts. Knows only shelves, traits and a seed.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from topology.ids import ExpertId
from topology.shelf import Shelf
from topology.traits import ExpertTraits, Floats, Traffic

SEED = 1


def shuffle(
    shelves: Sequence[Shelf], experts: Sequence[ExpertId], *, max_replicas: int, seed: int = SEED
) -> None:
    """Exchange first copies within each layer at random, and put further copies anywhere."""
    generator = random.Random(seed)
    for layer in sorted({expert.layer for expert in experts}):
        held = [
            sorted(e for e in shelf.experts if e.layer == layer and e not in shelf.pinned)
            for shelf in shelves
        ]
        mixed = [expert for part in held for expert in part]
        generator.shuffle(mixed)
        for shelf, part in zip(shelves, held, strict=True):
            shelf.experts.difference_update(part)
        for shelf, part in zip(shelves, held, strict=True):
            shelf.experts.update(mixed[: len(part)])
            mixed = mixed[len(part) :]
    places = [(at, expert) for at in range(len(shelves)) for expert in experts]
    generator.shuffle(places)
    for at, expert in places:
        if max_replicas <= 0:
            return
        if shelves[at].takes(expert):
            shelves[at].put(expert)
            max_replicas -= 1


def balance_load(
    shelves: Sequence[Shelf],
    experts: Sequence[ExpertId],
    demand: Mapping[ExpertId, float],
    *,
    max_copies: int,
) -> None:
    """A further copy to whoever has the most demand per copy, then heaviest first to the node with the least demand.

    Knows load and no group, and not where requests live. What finds no place so is left to the caller.
    """
    pinned = Counter(expert for shelf in shelves for expert in shelf.pinned)
    copies = {expert: max(1, pinned[expert]) for expert in experts}
    queue = [(-demand.get(expert, 0.0) / copies[expert], expert) for expert in experts]
    heapify(queue)
    budget = min(max_copies, _room_in_copies(shelves)) - sum(copies.values())
    while queue and budget > 0:
        _, expert = heappop(queue)
        if copies[expert] < len(shelves):
            copies[expert] += 1
            budget -= 1
            heappush(queue, (-demand.get(expert, 0.0) / copies[expert], expert))
    _take_all_but_pinned(shelves)
    loads = [sum(demand.get(e, 0.0) / copies[e] for e in shelf.experts) / shelf.speed for shelf in shelves]
    weight = {expert: demand.get(expert, 0.0) / copies[expert] for expert in experts}
    # First copies before further ones: otherwise the last of them might find every place taken.
    wanted = [(turn, expert) for expert in experts for turn in range(pinned[expert], copies[expert])]
    for _, expert in sorted(wanted, key=lambda entry: (entry[0] > 0, -weight[entry[1]], entry[1])):
        able = [at for at in range(len(shelves)) if shelves[at].takes(expert)]
        if able:
            chosen = min(able, key=lambda at: (loads[at], shelves[at].burden, shelves[at].node))
            shelves[chosen].put(expert)
            loads[chosen] += weight[expert] / shelves[chosen].speed


def fewest_calls(
    shelves: Sequence[Shelf],
    experts: Sequence[ExpertId],
    traits: ExpertTraits,
    traffic: Traffic,
    *,
    max_copies: int,
) -> None:
    """Each node takes what its own requests choose most, layers sharing its room by the entropy of what is chosen there;
    then each expert that nobody took replaces the least used further copy.

    Nodes without requests of their own come last, with the overall frequencies. What finds no place so is left to the
    caller.
    """
    _take_all_but_pinned(shelves)
    copies = Counter(expert for shelf in shelves for expert in shelf.experts)
    budget = max_copies - copies.total()
    tables = [traits.frequency_at(traffic.mix.get(shelf.node)) for shelf in shelves]
    worth = {
        (at, ExpertId(layer, index)): traffic.share_of(shelves[at].node) * float(tables[at][row, index])
        for at in range(len(shelves))
        for row, layer in enumerate(traits.layers)
        for index in range(tables[at].shape[1])
    }
    order = sorted(
        range(len(shelves)),
        key=lambda at: (not shelves[at].home_layers, -traffic.share_of(shelves[at].node), shelves[at].node),
    )
    fair = [
        max(1, budget * shelf.room_bytes // max(1, sum(s.room_bytes for s in shelves))) for shelf in shelves
    ]
    for at in order:
        for layer, quota in _slots(fair[at], tables[at], traits.layers).items():
            of_layer = [expert for expert in experts if expert.layer == layer]
            for expert in sorted(of_layer, key=lambda e: (-worth[at, e], e))[:quota]:
                if budget > 0 and shelves[at].takes(expert):
                    shelves[at].put(expert)
                    copies[expert] += 1
                    budget -= 1
    for expert in [expert for expert in experts if not copies[expert]]:
        able = [at for at in range(len(shelves)) if shelves[at].takes(expert)]
        if able and budget > 0:
            at = max(able, key=lambda at: (worth[at, expert], -shelves[at].burden, shelves[at].node))
            budget -= 1
        else:
            freed = _least_missed(shelves, expert, copies, worth)
            if freed is None:
                continue
            at = freed
        shelves[at].put(expert)
        copies[expert] += 1


def _least_missed(
    shelves: Sequence[Shelf],
    expert: ExpertId,
    copies: Counter[ExpertId],
    worth: Mapping[tuple[int, ExpertId], float],
) -> int | None:
    """Take the further copy away that its node uses least, if that makes room; which shelf it was."""
    found = [
        (worth[at, other], shelf.node, other, at)
        for at, shelf in enumerate(shelves)
        if expert not in shelf.experts
        for other in shelf.experts - shelf.pinned
        if copies[other] > 1 and shelf.size_of(expert) <= shelf.free_bytes + shelf.size_of(other)
    ]
    if not found:
        return None
    _, _, other, at = min(found)
    shelves[at].take_away(other)
    copies[other] -= 1
    return at


def _slots(amount: int, frequency: Floats, layers: Sequence[int]) -> dict[int, int]:
    """Layer -> how many of `amount` places it gets, in proportion to the entropy of its choices."""
    chosen = np.maximum(frequency, 1e-12)
    entropy = np.maximum(-(chosen * np.log(chosen)).sum(axis=1), 1e-9)
    exact = amount * entropy / entropy.sum()
    whole = np.floor(exact).astype(int)
    for row in np.argsort(whole - exact, kind="stable")[: amount - int(whole.sum())]:
        whole[row] += 1
    return {layer: int(count) for layer, count in zip(layers, whole, strict=True)}


def _room_in_copies(shelves: Sequence[Shelf]) -> int:
    largest = max((size for shelf in shelves for size in shelf.layer_sizes), default=0)
    return sum(shelf.room_bytes // largest for shelf in shelves) if largest else 0


def _take_all_but_pinned(shelves: Sequence[Shelf]) -> None:
    for shelf in shelves:
        for expert in shelf.experts - shelf.pinned:
            shelf.take_away(expert)
