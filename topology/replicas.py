"""Decide which experts get further copies, and where, in the room that first copies have left.

Knows no cluster and no model, only shelves.
"""

from collections import Counter
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

    shelves  hold at least one copy of each expert
    demand   tokens that each expert receives, in any unit; None if all are alike

    Every expert gets a second copy before any gets a third, so that the loss of a node loses as few experts as
    can be; beyond that the next copy goes to whoever has the most demand per copy, and among equals to the
    one that the fewest homes have. A copy goes to a home of its layer rather than to a mere host, since it saves the
    home a round trip, and there to the one with the least burden: emptiest, weighed by speed.
    """
    copies = Counter(expert for shelf in shelves for expert in shelf.experts)
    homes = _num_homes(shelves)

    def turn(expert: ExpertId) -> tuple[bool, float, int, int, int]:
        wanted = demand.get(expert, 0.0) if demand is not None else 1.0
        # By index before layer: where the room ends early, no layer has been favoured.
        return copies[expert] >= 2, -wanted / copies[expert], homes[expert], expert.index, expert.layer

    queue = [(turn(expert), expert) for expert in experts]
    heapify(queue)
    num_added = 0
    least = min((size for shelf in shelves for size in shelf.layer_sizes if size), default=0)
    roomy = [shelf for shelf in shelves if shelf.free_bytes >= least]  # the others are not worth asking
    while queue and roomy and num_added < max_replicas:
        _, expert = heappop(queue)
        shelf = _choose_shelf(roomy, expert)
        if shelf is None:
            shelf = _make_room(shelves, expert)
            if shelf is None:
                continue  # nor will it find room later: what is free only shrinks
            homes = _num_homes(shelves)  # another expert moved for it
        shelf.put(expert)
        homes[expert] += shelf.is_home_of(expert)
        roomy = [shelf for shelf in roomy if shelf.free_bytes >= least]
        copies[expert] += 1
        num_added += 1
        heappush(queue, (turn(expert), expert))
    return num_added


def _num_homes(shelves: Sequence[Shelf]) -> Counter[ExpertId]:
    """Expert -> how many homes of its layer hold it."""
    return Counter(expert for shelf in shelves for expert in shelf.experts if shelf.is_home_of(expert))


def _choose_shelf(shelves: Sequence[Shelf], expert: ExpertId) -> Shelf | None:
    able = [shelf for shelf in shelves if shelf.takes(expert)]
    return min(able, key=lambda shelf: preference(shelf, expert), default=None)


def _make_room(shelves: Sequence[Shelf], expert: ExpertId) -> Shelf | None:
    """Move one other expert so that this one gets a place, or None.

    The last free room is often on nodes that hold the expert already. Some full node without it then hands one of
    its own experts to such a node, and takes it in.
    """
    roomy = sorted(
        (shelf for shelf in shelves if shelf.fits(expert)), key=lambda shelf: preference(shelf, expert)
    )
    if not roomy:
        return None
    lacking = (shelf for shelf in shelves if expert not in shelf.experts)
    for full in sorted(lacking, key=lambda shelf: preference(shelf, expert)):
        for receiver in roomy:
            for moved in sorted(full.experts - receiver.experts - full.pinned):
                enough = full.size_of(expert) <= full.free_bytes + full.size_of(moved)
                if enough and receiver.fits(moved):
                    full.take_away(moved)
                    receiver.put(moved)
                    return full
    return None


def preference(shelf: Shelf, expert: ExpertId) -> tuple[bool, float, str]:
    """Sorts first where a copy does the most good."""
    return not shelf.is_home_of(expert), shelf.burden, shelf.node
