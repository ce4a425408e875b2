"""Credits: how many messages may be on their way at once, so that no queue ever reaches its high-water mark. Pure."""

from edge_runtime.errors import ProtocolError


class Window:
    """Counts what was sent and not yet acknowledged; `limit` at most.

    The sender takes before it sends, and gives back when the receiver says so. Keep `limit` below the queue's
    high-water mark.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self.limit = limit
        self.in_flight = 0

    @property
    def free(self) -> int:
        return self.limit - self.in_flight

    def take(self, count: int = 1) -> bool:
        """Take `count` credits, all or none; whether they were there."""
        assert count >= 0, count
        if count > self.free:
            return False
        self.in_flight += count
        return True

    def give(self, count: int = 1) -> None:
        """Give `count` credits back. ProtocolError if so many were not taken: the other side counts wrongly."""
        if not 0 <= count <= self.in_flight:
            raise ProtocolError(
                f"{count} credits were given back but {self.in_flight} messages are on their way"
            )
        self.in_flight -= count

    def reset(self) -> None:
        """Forget what is on its way: the connection was replaced."""
        self.in_flight = 0

    def check(self) -> None:
        assert 0 <= self.in_flight <= self.limit, f"{self.in_flight} of {self.limit} in flight"
