"""Tokens that go on from the server that served them, layer by layer: what looking ahead is worth, without any model.

A token needs one expert in each layer, drawn as the calibration saw experts follow each other. Servers serve in turn, so
there are queues. The decision is the runtime's: tables of cost-to-go, renewed while time goes on.
"""

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from edge_runtime.selector.budget import Ledger
from edge_runtime.selector.learned import Losses
from edge_runtime.selector.lookahead import Road, choose_server, cost_to_go, future_of, least_losses
from topology.traits import ExpertTraits, Floats

REFRESH_S = 0.05
HALF_LIFE_S = 1.0  # of what is known of a queue
UPLOAD, HOME_S = 20, (0.0005, 0.004)  # by how much a line gives out less than it takes in, and its delay
NUM_SITES, NEAR_S, FAR_S = 3, (0.0002, 0.001), (0.005, 0.02)  # machines of one site, and of different ones
WHATEVER = 1e9
TYPICAL_WEIGHT = 0.25  # of the gate
BYTES_OF_ROW = 8192  # a Mixtral row in bfloat16: what travels


@dataclass(frozen=True)
class Servers:
    """S servers. delay_s and rate_bps [S, S], seconds_per_row [S], holds [M, S, E]."""

    delay_s: Floats
    rate_bps: Floats
    seconds_per_row: Floats
    holds: np.ndarray

    @property
    def travel(self) -> Floats:
        way = self.delay_s + BYTES_OF_ROW * 8 / self.rate_bps
        np.fill_diagonal(way, 0.0)
        return way


@dataclass(frozen=True)
class Rule:
    """How a token chooses, and where experts are.

    depth   of the look-ahead; 0: the exact expert at the nearest server, whatever waits there
    budget  mean relative loss of a token; `WHATEVER`: a stand-in that is where the token is, whatever it costs
    """

    name: str
    depth: int
    budget: float
    stays: bool = True
    placement: str = "similarity"
    ratio: float = 2.0


@dataclass
class Walk:
    """What tokens took, and how."""

    seconds: list[float]
    moves: int = 0
    stood_in: int = 0
    local: int = 0
    layers: int = 0


def uneven_servers(
    traits: ExpertTraits,
    num_servers: int,
    ratio: float,
    seed: int,
    *,
    placement: str = "similarity",
    lines: str = "sites",
) -> Servers:
    """Servers with rooms, speeds, delays and rates apart by a factor of 4 to 10, each expert somewhere.

    placement  similarity: places are given by what a server's share of the popular and its similarity groups call for, as in
               the rule of that name; popularity: the popular first, whatever their groups; random
    lines      sites: machines of three sites, near each other or far. homes: most servers are behind lines that take in twenty
               times as fast as they give out, so that a token gets there sooner than away
    """
    draw = np.random.default_rng(seed)
    M, E = traits.frequency.shape
    room = draw.uniform(1, 4, num_servers)
    # What is drawn next is drawn whatever the placement, so that all placements meet the same links.
    delay, rate = (_sites if lines == "sites" else _homes)(draw, num_servers)
    speeds = draw.uniform(0.0001, 0.0008, num_servers)
    holds = np.zeros((M, num_servers, E), dtype=bool)
    for row in range(M):
        slots = np.maximum(1, np.round(room / room.sum() * ratio * E)).astype(int)
        groups = traits.groups.group_of[row]
        if placement != "similarity":
            groups = np.arange(E)
        order = np.argsort(-traits.frequency[row]) if placement != "random" else draw.permutation(E)
        for turn in range(int(np.ceil(ratio)) + 1):
            for expert in order.tolist():
                if turn and holds[row].sum() >= ratio * E:
                    break
                in_group = (holds[row] & (groups == groups[expert])).sum(axis=1)
                able = [s for s in range(num_servers) if slots[s] > 0 and not holds[row, s, expert]]
                if not able:
                    able = [] if holds[row, :, expert].any() else [int(np.argmax(room))]
                if able:
                    luck = draw.random(num_servers) if placement == "random" else np.zeros(num_servers)
                    server = min(able, key=lambda s: (in_group[s], luck[s], -slots[s] / room[s], s))
                    holds[row, server, expert] = True
                    slots[server] -= 1
    return Servers(delay, rate, speeds, holds)


def _sites(draw: np.random.Generator, num_servers: int) -> tuple[Floats, Floats]:
    site = np.arange(num_servers) % NUM_SITES
    near, far = draw.uniform(*NEAR_S, (num_servers,) * 2), draw.uniform(*FAR_S, (num_servers,) * 2)
    delay = np.where(site[:, None] == site[None, :], near, far)
    rate = draw.uniform(1e8, 1e9, (num_servers, num_servers))
    return (delay + delay.T) / 2, np.minimum(rate, rate.T)


def _homes(draw: np.random.Generator, num_servers: int) -> tuple[Floats, Floats]:
    down = draw.uniform(5e7, 3e8, num_servers)
    up = down / UPLOAD
    is_central = np.arange(num_servers) % NUM_SITES == 0
    up[is_central] = down[is_central] = 1e9
    one_way = draw.uniform(*HOME_S, num_servers)
    one_way[is_central] /= 4
    return one_way[:, None] + one_way[None, :], np.minimum(up[:, None], down[None, :])


def walk(
    servers: Servers,
    traits: ExpertTraits,
    losses: Losses,
    rule: Rule,
    *,
    rate_per_s: float,
    num_tokens: int,
    seed: int = 1,
) -> Walk:
    """Let tokens arrive at random, at random servers, and go through all layers."""
    draw = np.random.default_rng(seed)
    M, E = traits.frequency.shape
    S = len(servers.seconds_per_row)
    best, _ = least_losses(servers.holds, traits.groups.together, losses.loss * TYPICAL_WEIGHT**losses.power)
    exact = np.where(servers.holds, 0.0, np.inf)
    allowed = best if rule.budget > 0 else exact
    price, busy_until, refreshed_s = 0.0, np.zeros(S), -np.inf
    queue_s, met_s = np.zeros(S), np.zeros(S)
    waits = servers.travel[~np.eye(S, dtype=bool)]
    finite = best[np.isfinite(best) & (best > 0)]
    if 0 < rule.budget < WHATEVER and len(finite):
        price = float(np.median(waits) / np.median(finite))
    road = Road(servers.travel, servers.seconds_per_row, allowed, losses.transitions, rule.stays)
    future = np.zeros((M, S, E))
    found, ledger = Walk([]), Ledger()
    ready: list[tuple[float, int, int, int, int, float]] = []  # moment, token, layer, server, expert, born
    at = 0.0
    chains = _chains(traits, losses, num_tokens, draw)
    users = draw.choice(S, num_tokens, p=_uneven(S))
    for token in range(num_tokens):
        at += draw.exponential(1 / rate_per_s)
        heappush(ready, (at, token, 0, int(users[token]), int(chains[token, 0]), at))
    while ready:
        now, token, layer, here, expert, born = heappop(ready)
        if now - refreshed_s >= REFRESH_S:
            refreshed_s = now
            road = Road(
                servers.travel, servers.seconds_per_row + queue_s, allowed, losses.transitions, rule.stays
            )
            if rule.depth > 1:
                future = future_of(road, cost_to_go(road, price, rule.depth - 1))
        if layer == 0:
            ledger.earn(rule.budget)
        if rule.depth:
            server = choose_server(road, future, price, layer, here, expert, ledger.credit)
        else:
            server = int(np.argmin(np.where(servers.holds[layer, :, expert], servers.travel[here], np.inf)))
        loss = float(allowed[layer, server, expert])
        if loss > 0:
            ledger.spend(min(loss, ledger.credit))
            found.stood_in += 1
        found.moves += server != here
        found.local += server == here
        found.layers += 1
        arrived = now + servers.travel[here, server]
        began = max(arrived, busy_until[server])
        done = began + servers.seconds_per_row[server]
        # Estimates follow what is met: a snapshot of queues would send everybody to the one that was empty.
        weight = 1 - 0.5 ** max(0.01, (now - met_s[server]) / HALF_LIFE_S)
        queue_s[server] += weight * (began - arrived - queue_s[server])
        met_s[server] = now
        busy_until[server] = done
        back = done if rule.stays else done + servers.travel[server, here]
        if layer + 1 < M:
            place = server if rule.stays else here
            heappush(ready, (back, token, layer + 1, place, int(chains[token, layer + 1]), born))
        else:
            found.seconds.append(back - born)
        if 0 < rule.budget < WHATEVER and layer + 1 == M:
            price *= 1 + 0.001 * (ledger.spent / max(ledger.earned, 1e-12) - 1)
    return found


def _chains(traits: ExpertTraits, losses: Losses, num_tokens: int, draw: np.random.Generator) -> np.ndarray:
    """[num_tokens, M] experts, each following the one before it as often as was counted."""
    M, E = traits.frequency.shape
    found = np.empty((num_tokens, M), dtype=np.int64)
    found[:, 0] = draw.choice(E, num_tokens, p=traits.frequency[0])
    for row in range(1, M):
        edges = losses.transitions[row - 1].cumsum(axis=1)
        found[:, row] = np.minimum(
            (draw.random(num_tokens)[:, None] > edges[found[:, row - 1]]).sum(axis=1), E - 1
        )
    return found


def _uneven(num_servers: int) -> Floats:
    share = 1.0 / np.arange(1, num_servers + 1)
    return share / share.sum()
