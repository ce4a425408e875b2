"""Decide which experts get further copies, and where, in the room that first copies have left.

Knows no cluster and no model, only shelves.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from topology.ids import ExpertId
from topology.shelf import Shelf


def add_replicas(
    shelves: Sequence[Shelf],
    experts: Sequence[ExpertId],
    *,
    max_replicas: int,
    demand: Mapping[ExpertId, float] | None = None,
) -> int:
    """Put up to `max_replicas` more copies on the shelves, never two of an expert on one; say how many there were.

    shelves  hold exactly one copy of each expert
    demand   tokens that each expert receives, in any unit; None if all are alike

    Every expert gets a second copy before any gets a third, so that the loss of a node loses as few experts as
    can be; beyond that the next copy goes to whoever has the most demand per copy, and among equals to the
    one that the fewest homes have. A copy goes to a home rather than to a mere host, since it saves the home a
    round trip, and there to the emptiest.
    """
    copies = dict.fromkeys(experts, 1)

    def turn(expert: ExpertId) -> tuple[bool, float, int, int, int]:
        wanted = demand.get(expert, 0.0) if demand is not None else 1.0
        num_homes = sum(shelf.is_home and expert in shelf.experts for shelf in shelves)
        # By index before layer: where the room ends early, no layer has been favoured.
        return copies[expert] >= 2, -wanted / copies[expert], num_homes, expert.index, expert.layer

    queue = [(turn(expert), expert) for expert in experts]
    heapify(queue)
    num_added = 0
    while queue and num_added < max_replicas:
        _, expert = heappop(queue)
        shelf = _choose_shelf(shelves, expert) or _make_room(shelves, expert)
        if shelf is None:
            continue  # nor will it find room later: what is free only shrinks
        shelf.put(expert)
        copies[expert] += 1
        num_added += 1
        heappush(queue, (turn(expert), expert))
    return num_added


def _choose_shelf(shelves: Sequence[Shelf], expert: ExpertId) -> Shelf | None:
    return min((shelf for shelf in shelves if shelf.takes(expert)), key=_preference, default=None)


def _make_room(shelves: Sequence[Shelf], expert: ExpertId) -> Shelf | None:
    """Move one other expert so that this one gets a place, or None.

    The last free room is often on nodes that hold the expert already. Some full node without it then hands one of
    its own experts to such a node, and takes it in.
    """
    roomy = sorted((shelf for shelf in shelves if shelf.fits(expert)), key=_preference)
    if not roomy:
        return None
    for full in sorted((shelf for shelf in shelves if expert not in shelf.experts), key=_preference):
        for receiver in roomy:
            for moved in sorted(full.experts - receiver.experts):
                enough = full.size_of(expert) <= full.free_bytes + full.size_of(moved)
                if enough and receiver.fits(moved):
                    full.take_away(moved)
                    receiver.put(moved)
                    return full
    return None


def _preference(shelf: Shelf) -> tuple[bool, float, str]:
    return not shelf.is_home, shelf.fill, shelf.node
