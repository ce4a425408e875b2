"""The room for experts on one node while a placement is being made. Counts whole bytes; decides nothing."""

from collections.abc import Collection
from dataclasses import dataclass, field

from topology.ids import ExpertId


@dataclass
class Shelf:
    """What one node has room for and what stands there so far.

    room_bytes    for experts, all in all; may be 0
    layer_sizes   bytes of one expert of each layer in this node's weight format, L numbers
    home_layers   layers whose attention runs here, so that an expert of theirs here costs no round trip
    speed         relative to the other nodes; a faster one is to hold more
    pinned        experts that may not leave
    """

    node: str
    room_bytes: int
    layer_sizes: tuple[int, ...]
    home_layers: Collection[int] = range(0)
    speed: float = 1.0
    pinned: frozenset[ExpertId] = frozenset()
    experts: set[ExpertId] = field(default_factory=set)
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.room_bytes - self.used_bytes

    @property
    def fill(self) -> float:
        """Share of the room in use, 0 to 1; a shelf without room is full."""
        return self.used_bytes / self.room_bytes if self.room_bytes else 1.0

    @property
    def burden(self) -> float:
        """The share in use, weighed by speed: of two that are equally full the slower has more of a burden."""
        return self.fill / self.speed

    def is_home_of(self, expert: ExpertId) -> bool:
        return expert.layer in self.home_layers

    def size_of(self, expert: ExpertId) -> int:
        return self.layer_sizes[expert.layer]

    def fits(self, expert: ExpertId) -> bool:
        return self.size_of(expert) <= self.free_bytes

    def takes(self, expert: ExpertId) -> bool:
        """Whether a copy may be put here: it fits, and none is here yet."""
        return expert not in self.experts and self.fits(expert)

    def put(self, expert: ExpertId) -> None:
        assert expert not in self.experts, f"{expert} stands on {self.node} already"
        self.experts.add(expert)
        self.used_bytes += self.size_of(expert)

    def take_away(self, expert: ExpertId) -> None:
        self.experts.remove(expert)
        self.used_bytes -= self.size_of(expert)
