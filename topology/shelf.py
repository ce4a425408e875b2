"""The room for experts on one node while a placement is being made. Counts whole bytes; decides nothing."""

from dataclasses import dataclass, field

from topology.ids import ExpertId


@dataclass
class Shelf:
    """What one node has room for and what stands there so far.

    room_bytes    for experts, all in all; may be 0
    layer_sizes   bytes of one expert of each layer in this node's weight format, L numbers
    is_home       whether requests live here, so that an expert here costs them no round trip
    """

    node: str
    room_bytes: int
    layer_sizes: tuple[int, ...]
    is_home: bool
    experts: set[ExpertId] = field(default_factory=set)
    used_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return self.room_bytes - self.used_bytes

    @property
    def fill(self) -> float:
        """Share of the room in use, 0 to 1; a shelf without room is full."""
        return self.used_bytes / self.room_bytes if self.room_bytes else 1.0

    def size_of(self, expert: ExpertId) -> int:
        return self.layer_sizes[expert.layer]

    def fits(self, expert: ExpertId) -> bool:
        return self.size_of(expert) <= self.free_bytes

    def takes(self, expert: ExpertId) -> bool:
        """Whether a copy may be put here: it fits, and none is here yet."""
        return expert not in self.experts and self.fits(expert)

    def put(self, expert: ExpertId) -> None:
        self.experts.add(expert)
        self.used_bytes += self.size_of(expert)

    def take_away(self, expert: ExpertId) -> None:
        self.experts.remove(expert)
        self.used_bytes -= self.size_of(expert)
