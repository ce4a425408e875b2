"""Credits: how many messages may still be sent before the receiver grants more, so that no queue reaches its mark. Pure."""

MAX_FREE = 2**31 - 1  # a receiver may grant for ever; more than this is never counted


class Window:
    """What one sender may still send to one receiver.

    The receiver says at the start how much it takes, and grants more as it has dealt with what came.
    """

    def __init__(self, free: int) -> None:
        assert free >= 0, free
        self.free = min(free, MAX_FREE)

    def take(self, count: int = 1) -> bool:
        """Take `count` credits, all or none; whether they were there."""
        assert count >= 0, count
        if count > self.free:
            return False
        self.free -= count
        return True

    def give(self, count: int) -> None:
        """The receiver grants `count` more."""
        assert count >= 0, count
        self.free = min(self.free + count, MAX_FREE)
