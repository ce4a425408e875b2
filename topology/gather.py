"""Rearrange copies so that what a home lacks of a layer stands on few peers: each that a step calls costs it a message.

Rules that look at demand put a copy where it is used, and so scatter what nobody uses much over all nodes. Here some
nodes, the stores, are to hold together every expert of a layer, so that whoever lacks something calls them and nobody
else. Copies change places within their layer, one by one, each the best that there is; several sets of stores are tried,
and each layer takes the arrangement by which its homes call the fewest peers, of those that serve as many choices at home
as before. A layer for which there is none stays as it is.

Works on tables; knows no cluster, no clock and no file. L MoE layers, N nodes, E experts in each layer. A home is a node
where requests live; W is how many of them, as shares of all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.host_choice import cover_tables
from topology.traits import Floats

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

ROWS = 8
"""Rows of a home's step, where nobody says: at 1 every call counts by its chance, at many each peer is called."""
CALLS_PER_ROW = (1.0, 0.3, 0.1)
"""What one more routed row at home is worth beside one call less, while copies are moved: less, where it may be less."""
MORE_STORES = 1
"""Stores beyond the fewest that have room for a layer, which are tried as well."""
MOST_MOVES = 2
"""Copies that change places, for each copy of a layer, before a search ends."""
LEAST_GAIN = 1e-9


@dataclass(frozen=True)
class Demand:
    """What homes choose.

    weight     [N, L] W of each node as a home of each layer; 0 where it is none
    chances    [N, L, E] that a token of its requests chooses an expert; those of a layer sum to K
    together   [L, E, E] whether one expert may stand in for another
    stand_in   what a choice that only a stand-in serves counts beside one that is served exactly
    top_k      K, experts of a token in a layer
    rows       of a home's step
    """

    weight: Floats
    chances: Floats
    together: Bools
    stand_in: float
    top_k: int
    rows: float = ROWS


@dataclass(frozen=True)
class Served:
    """What an arrangement comes to, [L] by layer; expectations over where requests live.

    calls    peers that a step of a home calls
    exact    routed rows of a token whose expert is at its home
    covered  the same, with stand-ins
    """

    calls: Floats
    exact: Floats
    covered: Floats


def served(held: Bools, demand: Demand, rank: Ints) -> Served:
    """What homes find at home and whom they call, by the very cover of `host_choice`.

    held  [L, N, E] who holds what
    rank  [L, N, N] whom each home (second axis) asks first among equals, less first
    """
    weight = demand.weight.T  # [L, N]
    weight = weight / np.maximum(weight.sum(axis=1, keepdims=True), 1e-12)
    chances = demand.chances.transpose(1, 0, 2)  # [L, N, E]
    exact = (chances * held).sum(axis=2)
    found = np.matmul(held.astype(np.float32), demand.together.astype(np.float32)) > 0
    covered = (chances * found).sum(axis=2)
    calls = np.zeros_like(weight)
    for home in np.flatnonzero(demand.weight.any(axis=1)).tolist():
        owner = cover_tables(held, home, rank[:, home])  # [L, E]
        for peer in range(held.shape[1]):
            if peer == home:
                continue
            mine = owner == peer
            mass = (chances[:, home] * mine).sum(axis=1)
            spared = np.maximum(0.0, 1 - mass / demand.top_k) ** demand.top_k
            calls[:, home] += np.where(mine.any(axis=1), 1 - spared**demand.rows, 0.0)
    return Served(*((weight * table).sum(axis=1) for table in (calls, exact, covered)))


def gather(
    held: Bools,
    capacity: Ints,
    pinned: Bools,
    demand: Demand,
    rank: Ints,
    is_slower: Callable[[Bools], Bools] | None = None,
) -> Bools:
    """[L, N, E] who is to hold what; as many copies of each layer as before, nobody beyond its capacity, pins where they are.

    held       [L, N, E] as it is: every expert somewhere
    capacity   [L, N] most experts of a layer on each node
    pinned     [L, N, E] copies that stay
    rank       from `cover_ranks`
    is_slower  which layers [L] of an arrangement would make steps slower than they are now, for whoever can tell

    A layer that has fewer calls by now than a set of stores would let it come to is left out of the search for that set.
    """
    best, before = held.copy(), served(held, demand, rank)
    calls = before.calls.copy()
    for stores in _sets_of_stores(capacity, held.shape[2], demand):
        at = np.flatnonzero(calls > _most_calls(stores, demand))
        for worth in CALLS_PER_ROW:
            if not len(at):
                break
            tried = held.copy()
            tried[at] = _Search(held, capacity, pinned, demand, stores, worth).run(at)
            now = served(tried, demand, rank)
            keeps = (now.exact >= before.exact - LEAST_GAIN) & (now.covered >= before.covered - LEAST_GAIN)
            better = keeps & (now.calls < calls - LEAST_GAIN)
            if is_slower is not None and better.any():
                better &= ~is_slower(tried)
            best[better], calls[better] = tried[better], now.calls[better]
            at = at[
                keeps[at]
            ]  # rows at home are worth less next time, so the others would not keep them either
    return best


def _sets_of_stores(capacity: Ints, num_experts: int, demand: Demand) -> list[Bools]:
    """Sets [N, N]: which nodes each home (first axis) is to find everything on, itself among them; fewest calls first.

    The roomiest nodes are stores for all, from the fewest that have room for a layer up to `MORE_STORES` more; and as many
    teams as can each have room for one, whose members are stores for each other.
    """
    num_nodes = capacity.shape[1]
    room = capacity.mean(axis=0)
    order = np.argsort(-room, kind="stable")
    least = int(np.searchsorted(np.cumsum(room[order]), num_experts)) + 1
    found: list[Bools] = []
    for count in range(least, min(least + MORE_STORES, num_nodes - 1) + 1):
        stores = np.eye(num_nodes, dtype=bool)
        stores[:, order[:count]] = True
        found.append(stores)
    team = _teams(room, num_experts)
    if team.any():
        found.append(team[:, None] == team[None, :])
    return sorted(found, key=lambda stores: _most_calls(stores, demand))


def _most_calls(stores: Bools, demand: Demand) -> float:
    """Peers that a step calls if it calls all stores, as a mean over homes."""
    weight = demand.weight.sum(axis=1)
    return float(weight @ (stores.sum(axis=1) - 1) / max(float(weight.sum()), 1e-12))


def _teams(room: Floats, num_experts: int) -> Ints:
    """[N] team of each node: as many as can each have room for a layer, the roomiest nodes shared out first."""
    for count in range(len(room) // 2, 1, -1):
        sums, team = np.zeros(count), np.zeros(len(room), dtype=np.int64)
        for at in np.argsort(-room, kind="stable").tolist():
            team[at] = int(sums.argmin())
            sums[team[at]] += room[at]
        if sums.min() >= num_experts:
            return team
    return np.zeros(len(room), dtype=np.int64)


class _Search:
    """One search, all layers side by side. Each turn moves one copy, or two, in each layer that is not done.

    What is to become less: the experts that a step of a home needs and its stores lack, as each is one more peer at
    worst; less what rows at home are worth.
    """

    def __init__(
        self,
        held: Bools,
        capacity: Ints,
        pinned: Bools,
        demand: Demand,
        stores: Bools,
        calls_per_row: float,
    ) -> None:
        self.held, self.capacity, self.pinned = held.copy(), capacity, pinned
        self.stores = stores.astype(np.float32)
        weight = demand.weight.T[:, :, None]
        chances = demand.chances.transpose(1, 0, 2)
        self.needs = (weight * (1 - (1 - chances) ** demand.rows)).astype(np.float32)  # [L, N, E]
        self.hits = (calls_per_row * demand.rows * weight * chances).astype(np.float32)
        self.stand_in = demand.stand_in
        self.together = demand.together.astype(np.float32)
        self.of_group = np.matmul(self.hits, self.together) - self.hits  # what an expert could stand in for
        # [N * N, N]: of a copy that goes from n to m, the homes that have m among their stores and not n.
        gains = (self.stores.T[None, :, :] > 0) & (self.stores.T[:, None, :] == 0)
        self.gained = gains.reshape(-1, len(stores)).astype(np.float32)
        losses = gains.transpose(1, 0, 2)
        self.lost = losses.reshape(-1, len(stores)).astype(np.float32)

    def run(self, at: Ints) -> Bools:
        """These layers [l] as no single change makes them better, [l, N, E]."""
        open_ = at
        turns = int(MOST_MOVES * self.held.sum(axis=(1, 2)).max())
        while len(open_) and turns > 0:
            going = open_
            while len(going) and turns > 0:
                going = going[self._replace(going)]
                turns -= 1
            open_ = open_[self._exchange(open_)]
            turns -= 1
        return self.held[at]

    def _tables(self, at: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """[l, N, E]: copies among each home's stores, and what a copy on each node is worth there, if put and if taken."""
        held = self.held[at].astype(np.float32)
        copies = np.matmul(self.stores[None], held)
        put, take = self.hits[at], self.hits[at]
        if self.stand_in:
            members = np.matmul(held, self.together[at])
            put += self.stand_in * np.where(members == 0, self.of_group[at], 0)
            take += self.stand_in * np.where(members == 1, self.of_group[at], 0)
        return copies, put, take

    def _replace(self, at: Ints) -> Bools:
        """In each of these layers, take a further copy away and put another one: [l] where that was better."""
        copies, put, take = self._tables(at)
        held, needs = self.held[at], self.needs[at]
        put += np.matmul(self.stores.T[None], np.where(copies == 0, needs, 0))
        take += np.matmul(self.stores.T[None], np.where(copies == 1, needs, 0))
        put[held] = -np.inf
        can_take = held & ~self.pinned[at] & (held.sum(axis=1) > 1)[:, None, :]
        take[~can_take] = np.inf
        what_in, what_out = put.argmax(axis=2), take.argmin(axis=2)  # [l, N]
        best_in = np.take_along_axis(put, what_in[:, :, None], 2)[:, :, 0]
        best_out = np.take_along_axis(take, what_out[:, :, None], 2)[:, :, 0]
        has_room = held.sum(axis=2) < self.capacity[at]
        num_nodes = held.shape[1]
        allowed = np.eye(num_nodes, dtype=bool)[None] | has_room[:, None, :]
        gain = np.where(allowed, best_in[:, None, :] - best_out[:, :, None], -np.inf).reshape(len(at), -1)
        chosen = gain.argmax(axis=1)
        lines = np.arange(len(at))
        better = gain[lines, chosen] > 1e-6
        source, target = np.divmod(chosen, num_nodes)
        rows = at[better]
        self.held[rows, source[better], what_out[lines, source][better]] = False
        self.held[rows, target[better], what_in[lines, target][better]] = True
        return better

    def _exchange(self, at: Ints) -> Bools:
        """In each of these layers, move one copy to where there is room, or exchange two: [l] where that was better."""
        copies, put, take = self._tables(at)
        held, needs = self.held[at], self.needs[at]
        num_layers, num_nodes, num_experts = held.shape
        gain = np.matmul(self.gained, np.where(copies == 0, needs, 0))
        gain -= np.matmul(self.lost, np.where(copies == 1, needs, 0))
        gain = gain.reshape(num_layers, num_nodes, num_nodes, num_experts)
        gain += put[:, None, :, :] - take[:, :, None, :]
        leaves = held & ~self.pinned[at]
        gain[~(leaves[:, :, None, :] & ~held[:, None, :, :])] = -np.inf
        what = gain.argmax(axis=3)  # [l, n, m]
        best = np.take_along_axis(gain, what[..., None], 3)[..., 0]
        has_room = held.sum(axis=2) < self.capacity[at]
        alone = np.where(has_room[:, None, :], best, -np.inf).reshape(num_layers, -1)
        both = (best + best.transpose(0, 2, 1)).reshape(num_layers, -1)
        lines = np.arange(num_layers)
        of_one, of_two = alone.argmax(axis=1), both.argmax(axis=1)
        goes_alone = alone[lines, of_one] >= both[lines, of_two]
        chosen = np.where(goes_alone, of_one, of_two)
        better = np.where(goes_alone, alone[lines, of_one], both[lines, of_two]) > 1e-6
        source, target = np.divmod(chosen, num_nodes)
        away = what[lines, source, target]
        back = what[lines, target, source]
        rows, n, m = at[better], source[better], target[better]
        self.held[rows, n, away[better]] = False
        self.held[rows, m, away[better]] = True
        two = better & ~goes_alone
        self.held[at[two], target[two], back[two]] = False
        self.held[at[two], source[two], back[two]] = True
        return better
