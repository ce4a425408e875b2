"""Decide where the first copy of every expert goes. Knows no cluster and no model, only shelves."""

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from topology.ids import ExpertId
from topology.shelf import Shelf


def spread_first_copies(
    shelves: Sequence[Shelf], experts: Sequence[ExpertId], *, home_first: bool = False
) -> list[ExpertId]:
    """Put each expert on the shelf that is least full for its size and speed; return those that fit nowhere.

    home_first   homes take what they can of their own layers, and others only what is left of them

    Large experts come first, else they go by layer, so that each shelf gets its share of every layer, give or take
    one expert for each other shelf. Each shelf that is to have any is given one expert before any gets a second.
    """
    sizes = {layer: _largest(shelves, layer) for layer in {expert.layer for expert in experts}}
    layers = sorted(sizes, key=lambda layer: (-sizes[layer], layer))
    targets = _targets(shelves, Counter(expert.layer for expert in experts), home_first=home_first)
    by_layer: dict[int, list[ExpertId]] = {layer: [] for layer in layers}
    for expert in sorted(experts):
        by_layer[expert.layer].append(expert)
    # Pinned experts stand already; a shelf is full for its size when they and its targets so far are used up.
    due = [float(shelf.used_bytes) for shelf in shelves]
    left_over: list[ExpertId] = []
    for layer in layers:
        for index, shelf in enumerate(shelves):
            due[index] += targets[index].get(layer, 0.0) * shelf.layer_sizes[layer]
        left_over += _spread_layer(shelves, by_layer[layer], due)
    return left_over


def _spread_layer(
    shelves: Sequence[Shelf], experts: Sequence[ExpertId], due: Sequence[float]
) -> list[ExpertId]:
    def entry(index: int) -> tuple[float, int, str, int]:
        shelf = shelves[index]
        fill = shelf.used_bytes / due[index] if due[index] > 0 else float("inf")
        return fill, -shelf.room_bytes, shelf.node, index

    queue = [entry(index) for index in range(len(shelves))]
    heapify(queue)
    left_over = []
    for expert in experts:
        passed_over = []
        while queue and not shelves[queue[0][-1]].takes(expert):
            passed_over.append(heappop(queue))
        if queue:
            index = queue[0][-1]
            shelves[index].put(expert)
            heapreplace(queue, entry(index))
        else:
            left_over.append(expert)
        for passed in passed_over:
            heappush(queue, passed)
    return left_over


def _targets(
    shelves: Sequence[Shelf], per_layer: Mapping[int, int], *, home_first: bool
) -> list[dict[int, float]]:
    """For each shelf, layer -> how many of its experts it is to have; fractions.

    In proportion to room and speed, a shelf that runs full leaving the rest to the others; or, with `home_first`,
    each home's room shared out over its own layers before.
    """
    targets: list[dict[int, float]] = [{} for _ in shelves]
    left = [float(shelf.free_bytes) for shelf in shelves]
    rest = {layer: float(count) for layer, count in per_layer.items()}
    if home_first:
        for index, shelf in enumerate(shelves):
            own = {layer: count for layer, count in per_layer.items() if layer in shelf.home_layers}
            wanted = sum(count * shelf.layer_sizes[layer] for layer, count in own.items())
            part = min(1.0, shelf.free_bytes / wanted) if wanted else 0.0
            targets[index] = {layer: part * count for layer, count in own.items()}
        for layer, count in per_layer.items():
            at_homes = sum(target.get(layer, 0.0) for target in targets)
            for target in targets:
                if layer in target:
                    target[layer] *= min(1.0, count / at_homes) if at_homes else 0.0
            rest[layer] = max(0.0, count - at_homes)
        for index, shelf in enumerate(shelves):
            left[index] -= sum(share * shelf.layer_sizes[layer] for layer, share in targets[index].items())
    num_rest = sum(rest.values())
    if num_rest <= 0:
        return targets
    mean_sizes = [
        sum(count * shelf.layer_sizes[layer] for layer, count in rest.items()) / num_rest for shelf in shelves
    ]
    capacities = [max(0.0, room) / size if size else 0.0 for room, size in zip(left, mean_sizes, strict=True)]
    shares = fill_up(capacities, [shelf.speed for shelf in shelves], num_rest)
    for layer, num_left in rest.items():
        open_to = [
            share if not (home_first and layer in shelf.home_layers) else 0.0
            for share, shelf in zip(shares, shelves, strict=True)
        ]
        total = sum(open_to)
        for index, share in enumerate(open_to):
            if share > 0:
                targets[index][layer] = targets[index].get(layer, 0.0) + num_left * share / total
    return targets


def fill_up(capacities: Sequence[float], speeds: Sequence[float], amount: float) -> list[float]:
    """Share out an amount in proportion to capacity times speed, nobody beyond its capacity."""
    shares = [0.0] * len(capacities)
    open_ = [index for index, capacity in enumerate(capacities) if capacity > 0]
    while open_ and amount > 1e-9:
        weight = sum(capacities[index] * speeds[index] for index in open_)
        full = [i for i in open_ if amount * speeds[i] / weight >= 1]  # capacity cancels out
        if not full:
            for index in open_:
                shares[index] = amount * capacities[index] * speeds[index] / weight
            break
        for index in full:
            shares[index] = capacities[index]
            amount -= capacities[index]
        open_ = [index for index in open_ if index not in full]
    return shares


def give_hot_experts_to_fast_nodes(shelves: Sequence[Shelf], demand: Mapping[ExpertId, float]) -> None:
    """Exchange first copies within each layer, which changes no byte: the hottest go to homes, then by speed.

    Each expert goes to the node whose demand per speed stays lowest, so that a node four times slower gets a
    quarter of the demand where its number of experts allows.
    """
    layers = sorted({expert.layer for shelf in shelves for expert in shelf.experts})
    for layer in layers:
        held = [
            [expert for expert in shelf.experts if expert.layer == layer and expert not in shelf.pinned]
            for shelf in shelves
        ]
        slots = [len(experts) for experts in held]
        movable = sorted(
            (expert for experts in held for expert in experts),
            key=lambda expert: (-demand.get(expert, 0.0), expert),
        )
        for shelf, experts in zip(shelves, held, strict=True):
            shelf.experts.difference_update(experts)
        loads = [
            sum(demand.get(expert, 0.0) for expert in shelf.experts if expert.layer == layer)
            for shelf in shelves
        ]
        for expert in movable:
            wanted = demand.get(expert, 0.0)
            index = min(
                (index for index, left in enumerate(slots) if left),
                key=lambda i: (
                    not shelves[i].is_home_of(expert),
                    (loads[i] + wanted) / shelves[i].speed,
                    -shelves[i].speed,
                    shelves[i].node,
                ),
            )
            shelves[index].experts.add(expert)
            slots[index] -= 1
            loads[index] += wanted


def _largest(shelves: Sequence[Shelf], layer: int) -> int:
    return max((shelf.layer_sizes[layer] for shelf in shelves), default=0)
