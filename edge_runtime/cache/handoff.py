"""Fetch a prompt's KV blocks from the node that computed them: what to ask for next, and what an answer is worth. Pure.

Blocks are asked for by content hash, in order, a few chunks at a time. So a chunk that was lost is asked for again, a
block that the source has given away in the meantime ends the fetch there, and nothing is owed to anybody if it ends
early: what did not come is computed again from the text. It knows positions in a list of wanted blocks; no socket, no
memory, no hash.
"""

from typing import NamedTuple

WINDOW = 2  # chunks on their way, so that the link works while one is being put away
MAX_LOSSES = 3  # broken connections and damaged chunks, before the rest is left to be computed


class Ask(NamedTuple):
    """Blocks [first, first + num_blocks) of those wanted; `number` is new for every ask."""

    number: int
    first: int
    num_blocks: int


class BlockFetch:
    """One fetch of `num_blocks` blocks, begun at `now`. It is late `deadline_s` after that, or `stall_s` after the last answer.

    num_taken  leading blocks that came, in order and sound
    why        what ended it before the last one came; empty if nothing did
    """

    def __init__(
        self, num_blocks: int, *, chunk_blocks: int, now: float, deadline_s: float, stall_s: float
    ) -> None:
        assert chunk_blocks >= 1, chunk_blocks
        self.num_taken = 0
        self.why = ""
        self.losses = 0
        self._end = num_blocks
        self._chunk_blocks = chunk_blocks
        self._late_s = now + deadline_s
        self._stall_s = stall_s
        self._heard_s = now
        self._asked: list[Ask] = []  # on their way, in order
        self._numbers = 0

    @property
    def is_over(self) -> bool:
        """Nothing more will be taken."""
        return self.num_taken >= self._end or bool(self.why)

    def due_s(self) -> float:
        """When the fetch is late."""
        return min(self._late_s, self._heard_s + self._stall_s)

    def asks(self, now: float) -> list[Ask]:
        """What to ask for now, and why not if time is over."""
        if not self.is_over and now >= self.due_s():
            self.give_up("it took too long")
        found: list[Ask] = []
        while not self.is_over and len(self._asked) < WINDOW:
            first = self._asked[-1].first + self._asked[-1].num_blocks if self._asked else self.num_taken
            count = min(self._chunk_blocks, self._end - first)
            if count <= 0:
                break
            self._numbers += 1
            ask = Ask(self._numbers, first, count)
            self._asked.append(ask)
            found.append(ask)
        return found

    def came(self, number: int, num_blocks: int, now: float, *, is_sound: bool) -> Ask | None:
        """An answer with the first `num_blocks` blocks of what was asked: which positions to take, None for none.

        Answers to what is not awaited any more, or not next, bring nothing.
        """
        if self.is_over or not self._asked or self._asked[0].number != number:
            return None
        ask = self._asked[0]
        self._heard_s = now
        if not is_sound or num_blocks > ask.num_blocks:
            self.lost("a chunk came damaged")
            return None
        del self._asked[0]
        if num_blocks < ask.num_blocks:
            self._end = ask.first + num_blocks
            self._asked.clear()
            self.why = "the source does not have all of them any more"
        self.num_taken = ask.first + num_blocks
        return Ask(number, ask.first, num_blocks) if num_blocks else None

    def lost(self, why: str) -> None:
        """What was on its way will not come: it is asked for again, a few times."""
        self._asked.clear()
        self.losses += 1
        if self.losses >= MAX_LOSSES:
            self.give_up(why)

    def give_up(self, why: str) -> None:
        """Take no more."""
        if not self.is_over:
            self.why = why
            self._asked.clear()

    def check(self) -> None:
        """Assert what must always hold."""
        assert 0 <= self.num_taken <= self._end
        assert len(self._asked) <= WINDOW
        at = self.num_taken
        for ask in self._asked:
            assert ask.first == at and ask.num_blocks >= 1, (self._asked, self.num_taken)
            at += ask.num_blocks
        assert at <= self._end
