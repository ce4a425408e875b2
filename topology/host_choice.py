"""Decide which node a home calls for each expert, so that a layer needs as few peers as possible.

The round trip is the cost, and the batch waits for all peers it calls: one more expert from a peer that is called
anyway is nearly free. Knows no link speeds and no routing of tokens; the same everywhere for the same values.
"""

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from topology.ids import ExpertId

NOBODY = -1


def choose_hosts(
    hosts: Mapping[ExpertId, Sequence[str]],
    *,
    home: str,
    alive: Collection[str],
    num_layers: int,
    num_experts: int,
    peers: Sequence[str],
) -> NDArray[np.int32]:
    """The host to call for every expert, as an index into `peers`.

    L layers, E experts per layer.

    hosts    expert -> the nodes that hold it; experts that are missing have no host
    home     the node that asks, `peers[0]`; its own experts are called locally
    alive    nodes that can be called; the home need not be among them
    peers    the home and every node it may call
    returns  [L, E] int32; 0 for a local expert, -1 where no living peer holds it

    Per layer a greedy cover: the peer that holds the most of what is still open is taken, with all of that. Among
    equals a hash of home, peer and layer decides, so that homes share out the replicas among themselves.
    """
    if not peers or peers[0] != home:
        raise ValueError(f"peers must begin with the home {home}, found {list(peers[:1])}")
    chosen = np.full((num_layers, num_experts), NOBODY, dtype=np.int32)
    index_of = {peer: index for index, peer in enumerate(peers)}
    callable_peers = {peer for peer in peers if peer in alive} - {home}

    held: list[dict[str, set[int]]] = [{} for _ in range(num_layers)]  # layer -> peer -> expert indices
    for (layer, index), nodes in hosts.items():
        if home in nodes:
            chosen[layer, index] = 0
        else:
            for node in callable_peers.intersection(nodes):
                held[layer].setdefault(node, set()).add(index)

    for layer, held_by in enumerate(held):
        for peer, experts in _cover(held_by, home, layer):
            chosen[layer, sorted(experts)] = index_of[peer]
    return chosen


def cover_ranks(nodes: Sequence[str], layers: Sequence[int]) -> NDArray[np.int64]:
    """[L, N, N] whom each home (second axis) takes first among equals in each layer, less first."""
    return np.stack([cover_rank(home, nodes, layers) for home in nodes], axis=1)


def cover_rank(home: str, nodes: Sequence[str], layers: Sequence[int]) -> NDArray[np.int64]:
    """[L, N] whom one home takes first among equals in each layer, less first."""
    hashes = np.array(
        [[int.from_bytes(_stable_hash(home, peer, layer), "big") for peer in nodes] for layer in layers],
        dtype=np.uint64,
    ).reshape(len(layers), len(nodes))
    found: NDArray[np.int64] = np.argsort(np.argsort(hashes, axis=1, kind="stable"), axis=1)
    return found


def cover_tables(held: NDArray[np.bool_], home: int, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `choose_hosts` does, for many layers at once: [L, E] the node that a home calls for each expert, itself included,
    or NOBODY.

    held  [L, N, E] who holds what
    rank  [L, N] from `cover_rank`, of this home
    """
    num_layers, num_nodes = held.shape[:2]
    owner = np.where(held[:, home], home, NOBODY)
    still_open = ~held[:, home]
    lines = np.arange(num_layers)
    for _ in range(num_nodes):
        if not still_open.any():
            break
        counts = (held & still_open[:, None, :]).sum(axis=2)
        counts[:, home] = 0
        peer = (counts * num_nodes - rank).argmax(axis=1)
        taken = held[lines, peer] & still_open
        taken &= (peer != home)[:, None]
        owner = np.where(taken, peer[:, None], owner)
        still_open &= ~taken
    return owner


def _cover(held_by: Mapping[str, set[int]], home: str, layer: int) -> list[tuple[str, set[int]]]:
    """Share out the experts to few peers: the peer that holds the most open ones is taken first."""
    rank = {peer: _stable_hash(home, peer, layer) for peer in held_by}
    still_open = set().union(*held_by.values())
    cover = []
    while still_open:
        peer = min(held_by, key=lambda peer: (-len(held_by[peer] & still_open), rank[peer]))
        cover.append((peer, held_by[peer] & still_open))
        still_open -= held_by[peer]
    return cover


def _stable_hash(home: str, peer: str, layer: int) -> bytes:
    """The same in every process, unlike `hash`, which is salted."""
    return blake2b(f"{home}\0{peer}\0{layer}".encode(), digest_size=8).digest()
