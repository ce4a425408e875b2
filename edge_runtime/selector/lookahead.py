"""What it will cost a token to go on from where it is: cost-to-go over the next layers, tabulated in backward passes.

Costs are seconds; a loss is priced. The budget does not bind inside: it is what the price stands for. What the router
chooses next depends on what it chose now, not on who stood in, since that is how transitions were counted.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topology.traits import Floats

DEPTH = 3
UNSERVED_S = 1e6  # not infinite: what is ahead of other servers must still be told apart


@dataclass(frozen=True)
class Road:
    """What moving and serving costs. M MoE layers, S servers, E experts.

    travel    [S, S] seconds from one server to another, 0 on the diagonal
    serve     [S] seconds to compute a row at a server, its queue included
    loss      [M, S, E] float, least loss of serving expert e at server s by any expert that is there: 0 for e itself,
              inf where nobody there may stand in
    follows   [M-1, E, E] share of choices of an expert that are followed by each one a layer on
    stays     whether a token goes on from the server that served it; else it returns to where it was, and travel counts
              both ways
    """

    travel: Floats
    serve: Floats
    loss: NDArray[np.floating]
    follows: Floats
    stays: bool = True


def least_losses(
    holds: NDArray[np.bool_], together: NDArray[np.bool_], loss: NDArray[np.floating]
) -> tuple[Floats, NDArray[np.int32]]:
    """Least loss of serving each expert at each server, [M, S, E], and by which expert, [M, S, E] int32; -1 if by none.

    holds     [M, S, E], who has which expert
    together  [M, E, E], whether two experts are of one group
    loss      [M, E, E], when column j stands in for row i; the diagonal is 0
    """
    allowed = np.where(together, loss, np.inf)
    diagonal = np.arange(allowed.shape[1])
    allowed[:, diagonal, diagonal] = 0.0
    best = np.full(holds.shape, np.inf)
    by = np.full(holds.shape, -1, dtype=np.int32)
    for server in range(holds.shape[1]):
        table = np.where(holds[:, server, None, :], allowed, np.inf)  # [M, E, E]
        best[:, server] = table.min(axis=2)
        by[:, server] = np.where(np.isfinite(best[:, server]), table.argmin(axis=2), -1)
    return best, by


def price_losses(loss: NDArray[np.floating], price: float) -> Floats:
    """[M, S, E] seconds that losses are worth; what cannot be served is dear whatever the price."""
    can = np.isfinite(loss)
    return np.where(can, price * np.where(can, loss, 0.0), UNSERVED_S)


def cost_to_go(road: Road, price: float, depth: int = DEPTH) -> Floats:
    """V_h: [M, S, E] seconds for a token at server s whose next expert is e, over at most `depth` layers.

    V_h[m, p, e] = min over servers s of travel[p, s] + serve[s] + price * loss[m, s, e] + sum over e2 of
    follows[m, e, e2] * V_(h-1)[m+1, s, e2], and V_0 is 0, as it is after the last layer. Depth 1 is greedy.
    """
    here = road.serve[None, :, None] + price_losses(road.loss, price)
    way = road.travel if road.stays else 2 * road.travel
    found = np.zeros(here.shape)
    for _ in range(depth):
        after = future_of(road, found)  # [M, S, E]
        if road.stays:
            ahead = here + after
            found = np.stack([_least(way, line) for line in ahead])
        else:  # wherever it was served, it goes on from where it is
            found = np.stack([_least(way, line) for line in here]) + after
    return found


def future_of(road: Road, costs: Floats) -> Floats:
    """[M, S, E] what comes after layer m for a token that is then at s and whose router chose e: an expectation."""
    after = np.zeros(costs.shape)
    if len(costs) > 1:
        after[:-1] = costs[1:] @ road.follows.transpose(0, 2, 1)
    return after


def _least(way: Floats, ahead: Floats) -> Floats:
    """min over s of way[p, s] + ahead[s, e]: [S, E]."""
    return (way[:, :, None] + ahead[None, :, :]).min(axis=1)


def choose_server(
    road: Road, future: Floats, price: float, row: int, here: int, expert: int, left: float
) -> int:
    """Where a token at server `here` has its expert of MoE layer `row` served: the least of now and what comes after.

    left  loss that may still be spent; a server that has the expert itself is always allowed
    """
    loss = road.loss[row, :, expert]
    way = road.travel[here] if road.stays else 2 * road.travel[here]
    cost = way + road.serve + price_losses(loss, price)
    if road.stays:  # else it goes on from `here` whoever serves it
        cost = cost + future[row, :, expert]
    return int(np.argmin(np.where(loss <= left, cost, 2 * UNSERVED_S)))
