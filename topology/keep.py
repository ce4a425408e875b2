"""Make a placement out of the one before it, so that a small edit moves few bytes. Knows only shelves.

What is loaded again: copies that lost their room (their node left, shrank or changed its format), and what fills new
room. Nothing moves between nodes that did not change, but where the last free bytes can only be used by an exchange.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from topology.ids import ExpertId
from topology.replicas import preference
from topology.shelf import Shelf

ENOUGH = 0.9  # of what a fresh placement would give a node that is new or has grown


def keep_previous(
    shelves: Sequence[Shelf],
    held: Mapping[str, Sequence[ExpertId]],
    experts: Sequence[ExpertId],
    *,
    max_copies: int,
    grown_bytes: Mapping[str, int],
    fresh_bytes: Mapping[str, int],
    demand: Mapping[ExpertId, float] | None = None,
) -> bool:
    """Fill shelves that hold their pinned experts only; False if that cannot be done without starting afresh.

    held          node -> what lies there now in the format it will have
    max_copies    of all experts together
    grown_bytes   node -> how much more room it has than before, for those that have
    fresh_bytes   node -> bytes of experts that a fresh placement would give it
    """
    table = _Table(shelves, demand)
    table.keep(held)
    if not table.place_missing(experts):
        return False
    table.drop_surplus(max_copies)
    table.fill_grown(grown_bytes, fresh_bytes)
    return True


class _Table:
    def __init__(self, shelves: Sequence[Shelf], demand: Mapping[ExpertId, float] | None) -> None:
        self.shelves = sorted(shelves, key=lambda shelf: shelf.node)
        self.copies = Counter(expert for shelf in shelves for expert in shelf.experts)
        self.demand = demand

    def worth(self, shelf: Shelf, expert: ExpertId) -> tuple[bool, bool, float, int, int]:
        """Sorts first what a shelf should keep: the only copy, a home's own layers, the hot."""
        wanted = self.demand.get(expert, 0.0) if self.demand is not None else 1.0
        only = self.copies[expert] <= 1
        return not only, not shelf.is_home_of(expert), -wanted, expert.index, expert.layer

    def put(self, shelf: Shelf, expert: ExpertId) -> None:
        shelf.put(expert)
        self.copies[expert] += 1

    def take_away(self, shelf: Shelf, expert: ExpertId) -> None:
        shelf.take_away(expert)
        self.copies[expert] -= 1

    def keep(self, held: Mapping[str, Sequence[ExpertId]]) -> None:
        """Leave on each shelf what it had and still has room for. Where it has not, further copies go first."""
        here = {
            shelf.node: [e for e in held.get(shelf.node, ()) if e not in shelf.experts]
            for shelf in self.shelves
        }
        self.copies.update(expert for experts in here.values() for expert in experts)
        for shelf in self.shelves:
            for expert in sorted(here[shelf.node], key=lambda expert: self.worth(shelf, expert)):
                if shelf.fits(expert):
                    shelf.put(expert)
                else:
                    self.copies[expert] -= 1

    def place_missing(self, experts: Sequence[ExpertId]) -> bool:
        """Give every expert a copy, in free room or in that of another's further copy."""
        for expert in experts:
            if self.copies[expert]:
                continue
            able = [shelf for shelf in self.shelves if shelf.takes(expert)]
            shelf = min(able, key=lambda shelf: preference(shelf, expert), default=None)
            shelf = shelf or self._evict_for(expert)
            if shelf is None:
                return False
            self.put(shelf, expert)
        return True

    def _evict_for(self, expert: ExpertId) -> Shelf | None:
        for shelf in sorted(self.shelves, key=lambda shelf: preference(shelf, expert)):
            spare = [e for e in shelf.experts - shelf.pinned if self.copies[e] > 1]
            for victim in sorted(spare, key=lambda e: (self.copies[e], self.worth(shelf, e)), reverse=True):
                if shelf.size_of(expert) <= shelf.free_bytes + shelf.size_of(victim):
                    self.take_away(shelf, victim)
                    return shelf
        return None

    def drop_surplus(self, max_copies: int) -> None:
        """Down to as many copies as are allowed: of the experts with the most, the coldest, where they help least."""
        surplus = self.copies.total() - max_copies
        while surplus > 0:
            most = max(self.copies.values())
            if most < 2:
                return
            candidates = [
                (shelf, expert)
                for shelf in self.shelves
                for expert in shelf.experts - shelf.pinned
                if self.copies[expert] == most
            ]
            if not candidates:
                return
            candidates.sort(key=lambda pair: (self.worth(*pair), pair[0].burden, pair[0].node), reverse=True)
            for shelf, expert in candidates:
                if surplus > 0 and self.copies[expert] == most:
                    self.take_away(shelf, expert)
                    surplus -= 1

    def fill_grown(self, grown_bytes: Mapping[str, int], fresh_bytes: Mapping[str, int]) -> None:
        """Move experts to nodes with new room from those that have more than a fresh placement would give them."""
        for taker in self.shelves:
            may_take = min(
                grown_bytes.get(taker.node, 0),
                int(ENOUGH * fresh_bytes.get(taker.node, 0)) - taker.used_bytes,
            )
            for giver in sorted(
                self.shelves,
                key=lambda giver: (fresh_bytes.get(giver.node, 0) - giver.used_bytes, giver.node),
            ):
                may_give = giver.used_bytes - fresh_bytes.get(giver.node, 0)
                if giver is taker or may_give <= 0:
                    continue
                movable = giver.experts - giver.pinned - taker.experts
                for expert in sorted(
                    movable,
                    key=lambda e: (giver.is_home_of(e), not taker.is_home_of(e), e.index, e.layer),
                ):
                    size = taker.size_of(expert)
                    if size > may_take or giver.size_of(expert) > may_give:
                        break
                    if taker.takes(expert):
                        giver.take_away(expert)
                        taker.put(expert)
                        may_take -= size
                        may_give -= giver.size_of(expert)
