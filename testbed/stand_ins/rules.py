"""Simple ways to replace what the gate chose, to hold a selector against: each replaces the lowest-ranked slots of every row.

They know tables and the row's own gate; they know no placement and no budget.
"""

import torch
from torch import Tensor

from calibration.evaluate import Alternative, Slots
from calibration.exact_model import Choice

RULES = ("next", "similar", "least", "random", "drop")


class LowestReplaced(Alternative):
    """The lowest-ranked `count` slots of every decoding row go to an expert that the row did not choose.

    rule   next     whom the row's gate ranks next
           similar  whose gate logits are most like the replaced one's
           least    whose outputs differ least from the replaced one's
           random   anybody
           drop     nobody; the other weights are made to have the sum that all had
    tables [L, E, E]: similarity for `similar`, mismatch for `least`
    """

    def __init__(
        self, rule: str, count: int = 1, table: Tensor | None = None, *, seed: int = 1, whole: bool = False
    ) -> None:
        self.name = f"{rule}:{count}"
        self.changes_prompts = whole
        self._rule, self._count, self._table = rule, count, table
        self._draw = torch.Generator().manual_seed(seed)

    def choose(self, slots: Slots) -> Choice:
        """See Alternative."""
        first = max(0, slots.expert_ids.shape[1] - self._count)
        if self._rule == "drop":
            weights = slots.gate_weights.clone()
            weights[:, first:] = 0.0
            kept = weights.sum(1, keepdim=True)
            return slots.expert_ids, torch.where(
                kept > 0, weights * slots.gate_weights.sum(1, keepdim=True) / kept, 0.0
            )
        ids = slots.expert_ids.clone()
        is_taken = torch.zeros(slots.logits.shape, dtype=torch.bool).scatter_(1, ids.long(), True)
        for column in range(first, ids.shape[1]):
            scores = self._scores(slots, ids[:, column].long()).masked_fill(is_taken, -torch.inf)
            best, other = scores.max(1)
            found = torch.where(
                best > -torch.inf, other, ids[:, column].long()
            )  # every expert is taken: it stays
            is_taken.scatter_(1, found[:, None], True)
            ids[:, column] = found.int()
        return ids, slots.gate_weights

    def _scores(self, slots: Slots, replaced: Tensor) -> Tensor:
        """[n, E] the higher the better."""
        if self._rule == "next":
            return slots.logits
        if self._rule == "random":
            return torch.rand(slots.logits.shape, generator=self._draw)
        assert self._table is not None, f"{self._rule} needs a table"
        table = self._table[slots.layer_index][replaced]
        return table if self._rule == "similar" else -table
