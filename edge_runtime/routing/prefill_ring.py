"""Which worker computes a prompt: consistent hashing with bounded load. Pure.

Prompts that begin alike go to the same worker, which has their beginning in its cache, unless it has too much to do.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import blake2b

HASHED_BYTES = 1024
VIRTUAL_NODES = 160
MOST_LOAD = 1.25  # times the mean, with the request itself counted


class PrefillRing:
    """Workers on a ring of 64-bit hashes, 160 places each."""

    def __init__(self, workers: Sequence[str]) -> None:
        """workers: at least one, in the order that decides among equally loaded ones."""
        if not workers:
            raise ValueError("a ring needs at least one worker")
        self.workers = tuple(workers)
        places = sorted(
            (_hash(f"{worker}#{index}".encode()), order)
            for order, worker in enumerate(self.workers)
            for index in range(VIRTUAL_NODES)
        )
        self._hashes = [place for place, _ in places]
        self._owners = [order for _, order in places]

    def choose(self, prompt: bytes, loads: Mapping[str, int]) -> str:
        """The worker of the prompt's first 1024 bytes; where it is overloaded, the least loaded one.

        loads  requests in prefill by worker; one that is missing has none
        """
        found = [loads.get(worker, 0) for worker in self.workers]
        place = bisect_left(self._hashes, _hash(prompt[:HASHED_BYTES])) % len(self._hashes)
        owner = self._owners[place]
        if found[owner] > MOST_LOAD * (sum(found) + 1) / len(found):
            owner = found.index(min(found))
        return self.workers[owner]


def _hash(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
